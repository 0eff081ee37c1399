"""After a warm-up, no request within its extent compiles a program."""

import json
import random
import re
import types

import jax
import pytest
from PIL import Image
from servers import openai_client, run_server, user_message
from small_world import stepprune
from tiny_llava_next import tiny_llava_next
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli import serve
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.policy.buckets import bucket_ladder
from stepprune_jax.serving import local as local_module
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import Defaults, RequestParser
from stepprune_jax.serving.warm_up import Extent, warm_up
from stepprune_jax.user_input import UserError

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """Events of the programs that are compiled from now on, including jax's own operations."""
    events = []

    def record(event, duration, **attributes):
        if event == COMPILED:
            events.append(attributes)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield events
    jax.monitoring.unregister_event_duration_listener(record)


class PlanningBackend(LocalBackend):
    """Plans batches as the server does, without running them."""

    def warm(self, chats, shapes):
        shape, kept = self.shape(chats)
        shapes.add(shape)
        self.planned_shapes = shapes
        return kept

    def shape(self, chats):
        generator, request = self._join_batch(chats)
        options, prompts = generator.options, request.prompts()
        batch = plan_batch(self._model, generator.placed, prompts, request.images, options)
        inputs = pipeline.prepare_prefill(self._model, batch)
        is_sampled = bool(chats[0].sampling.temperature)
        return (is_sampled, local_module._batch_shape(inputs)), int(inputs.num_kept[0])


@pytest.fixture(scope="module")
def models(llava_model, qwen_model, tmp_path_factory):
    folder = tiny_llava_next(tmp_path_factory.mktemp("next"))
    tiled = load_vlm(folder, dtype=jax.numpy.float32, progress=False)
    return {"llava": llava_model, "qwen": qwen_model, "next": tiled}


CASES = [
    # Rows have several stages, and some rows have text only.
    ("llava", "sparsevlm", "3", (24, 24)),
    # Questions have several padded lengths.
    ("llava", "stepprune", "3", (24, 24)),
    ("qwen", "divprune", "1/3", (70, 44)),
    ("next", "divprune", "1/3", (72, 48)),
]


def random_image(rng, size):
    """Returns a random black image within the size, in either orientation."""
    return Image.new("RGB", tuple(rng.randint(1, side) for side in rng.sample(size, 2)))


@pytest.mark.parametrize(("name", "size"), [("qwen", (70, 44)), ("next", (72, 48))])
def test_listed_pixels_cover_all_shapes_and_their_token_counts(models, name, size):
    model, rng, counts = models[name], random.Random(1), {}
    backbone = model.backbone

    def shape_and_count(image):
        pixels = backbone.preprocess(model.image_settings, [image])
        (count,) = backbone.num_tokens(backbone.grids(pixels)).tolist()
        return pixels.values.shape, count

    for pixels in backbone.list_example_pixels(*size):
        (count,) = backbone.num_tokens(backbone.grids(pixels)).tolist()
        counts.setdefault(pixels.values.shape, []).append(count)
    assert len(counts) > 2
    for _ in range(100):
        shape, count = shape_and_count(random_image(rng, size))
        assert min(counts[shape]) <= count <= max(counts[shape])


@pytest.mark.parametrize(("name", "pruner", "budget", "size"), CASES, ids=str)
def test_every_batch_of_requests_has_a_planned_shape(models, name, pruner, budget, size):
    model, rng = models[name], random.Random(0)
    policy = stepprune() if pruner == "stepprune" else None
    defaults = Defaults(pruner, policy, budget, max_tokens=4)
    parser = RequestParser(model, "tiny", defaults, RequestLimits(), engine=False)
    backend = PlanningBackend(model, Metrics(), batch_size=2, max_tokens=4)
    extent = Extent(size, 110)
    warm_up(parser, backend, extent)
    backend.batcher.close()

    def image():
        return random_image(rng, size)

    for _ in range(20):
        count, rows, temperature = rng.choice((0, 1, 1, 2)), rng.choice((1, 2)), rng.choice((0, 1))
        chats = []
        while len(chats) < (1 if temperature else rows):
            text = " ".join(rng.choices(["red", "dog", "?", "two"], k=rng.randint(1, 30)))
            messages = [user_message(text, *[image() for _ in range(count)])]
            messages += [{"role": "system", "content": "a"}] if rng.random() < 0.5 else []
            body = {"model": "tiny", "messages": messages[::-1], "max_tokens": rng.randint(1, 4)}
            chat = parser.parse(json.dumps(body | {"temperature": temperature}).encode())
            if len(chat.request.ids[0]) - count <= extent.text:
                chats.append(chat)
        shape, _ = backend.shape(chats)
        lengths = [len(chat.request.ids[0]) for chat in chats]
        assert shape in backend.planned_shapes, (count, rows, lengths)
    assert len(backend.planned_shapes) < 400


def test_no_request_compiles_anything_after_a_warm_up(llava_model, compiled, monkeypatch):
    """Requests have images or none, are greedy or sampled, and short or long."""
    metrics, lines = Metrics(), []
    log = types.SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr("stepprune_jax.serving.warm_up._logger", log)
    monkeypatch.setattr("stepprune_jax.serving.warm_up._MAX_IMAGES", 1)  # Compiles fewer programs.
    defaults = Defaults(policy=stepprune(draw=0.0), max_tokens=4)
    parser = RequestParser(llava_model, "tiny", defaults, RequestLimits(), engine=False)
    backend = LocalBackend(llava_model, metrics, batch_size=1, batch_seconds=0.0, max_tokens=4)
    warm_up(parser, backend, Extent((1, 1), 30, ("4",)))
    assert any("1 image of 9 tokens, budget 4, rows of" in line for line in lines)
    assert lines[-1].startswith("warm-up: ") and len(compiled) > 4
    assert lines[0].startswith("warm-up: 8 kinds of batches, ")
    line_pattern = r"[1-8] of 8, compiled in \d+\.\d s: 1 request, "
    assert all(re.match(line_pattern, line) for line in lines[1:-1])
    start_count, system = len(compiled), {"role": "system", "content": "a"}
    with (
        run_server(ChatApp(parser, backend, metrics, 9).app()) as address,
        openai_client(address) as client,
    ):
        for images, temperature in (([], 0), ([noise(1)], 0), ([noise(2, (50, 9))], 0.7)):
            for text, max_tokens in (("red?", 1), ("two yes no", 3), ("is this a dog ?", 4)):
                # Budgets up to 4 share their programs.
                for budget in ({}, {"budget": 3}):
                    client.chat.completions.create(
                        model="tiny",
                        messages=[system, user_message(text, *images)],
                        max_tokens=max_tokens,
                        temperature=temperature,
                        extra_body=budget,
                    )
    assert len(compiled) == start_count


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("", "expected the size of the largest image as W"),
        ("44", "--warm_up is '44'"),
        ("0x9", "is '0x9'"),
    ],
)
def test_a_model_with_varying_sizes_needs_the_size_of_the_largest_image(
    qwen_folder, monkeypatch, size, message
):
    monkeypatch.setattr(serve, "load_vlm", None)
    arguments = ("--model", str(qwen_folder), "--port", "8083", "--no_compile_cache")
    with pytest.raises(ValueError, match=message):
        serve.prepare([*arguments, "--warm_up", size])


def test_the_server_warms_up_before_it_listens(llava_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(serve, "warm_up", lambda *arguments: calls.append(arguments))
    flags = ("--model", str(llava_folder), "--dtype", "float32", "--port", "8083")
    flags += ("--no_compile_cache", "--warm_up", "--warm_up_text", "70")
    serve.prepare(flags)
    parser, backend, extent = calls.pop()
    assert parser.name == "tiny_llava0" and backend.batch_size == 8
    assert extent == Extent((1, 1), 70)
    budget_flags = ("--pruner", "grid", "--budget", "3", "--warm_up_budgets")
    serve.prepare([*flags, *budget_flags, "4", "1/9"])
    assert calls.pop()[2].budgets == ("4", "1/9")
    serve.prepare([*flags, *budget_flags])
    assert calls.pop()[2].budgets == tuple(map(str, bucket_ladder(9)))
    with pytest.raises(
        ValueError, match="--warm_up_budgets: grid: budget is 400, expected at most"
    ):
        serve.prepare([*flags, *budget_flags, "400"])


def test_the_warm_up_covers_only_budgets_that_the_policy_allows(monkeypatch):
    """The policy of the shapes keeps at most half of the 144 tokens."""
    extents = []
    monkeypatch.setattr(serve, "warm_up", lambda *arguments: extents.append(arguments[2]))
    flags = "--model shapes --policy shapes --dtype float32 --port 8083 --no_compile_cache"
    serve.prepare([*flags.split(), "--warm_up", "--warm_up_budgets"])
    assert extents[0].budgets == ("16", "24", "32", "48", "64", "72")
    with pytest.raises(UserError, match="--warm_up_budgets: "):
        serve.prepare([*flags.split(), "--pruner", "all", "--warm_up", "--warm_up_budgets"])
