"""After a warm-up, no request within its extent compiles a program."""

import json
import random
import re
import types

import jax
import pytest
from PIL import Image
from servers import opened, serving, user
from small_world import stepprune
from tiny_llava_next import tiny_llava_next
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli import serve
from stepprune_jax.inference import pipeline
from stepprune_jax.serving import local as local_module
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import Defaults, RequestParser
from stepprune_jax.serving.metrics import Metrics
from stepprune_jax.serving.warm_up import Extent, warm_up

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """The programs that are compiled from now on, of jax's own operations as well."""
    events = []

    def note(event, duration, **about):
        if event == COMPILED:
            events.append(about)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


class Planned(Local):
    """Plans batches as the server, and runs none of them."""

    def warm(self, chats, shapes):
        shape, kept = self.shape(chats)
        shapes.add(shape)
        self.planned = shapes
        return kept

    def shape(self, chats):
        generator, request = self._prepare(chats)
        options, prompts = generator.options, request.prompts()
        batch = pipeline.prepare(self._model, generator.placed, prompts, request.images, options)
        drawn = bool(chats[0].sampling.temperature)
        return (drawn, local_module._shape(batch)), int(batch.kept[0])


@pytest.fixture(scope="module")
def models(llava_model, qwen_model, tmp_path_factory):
    folder = tiny_llava_next(tmp_path_factory.mktemp("next"))
    tiled = load_vlm(folder, dtype=jax.numpy.float32, progress=False)
    return {"llava": llava_model, "qwen": qwen_model, "next": tiled}


CASES = [
    ("llava", "sparsevlm", "3", (24, 24)),  # several stages of rows, with rows of text
    ("llava", "stepprune", "3", (24, 24)),  # widths of words
    ("qwen", "divprune", "1/3", (70, 44)),
    ("next", "divprune", "1/3", (72, 48)),
]


def drawn_image(draw, size):
    """A black image with sides of up to the size's, in either orientation."""
    return Image.new("RGB", tuple(draw.randint(1, side) for side in draw.sample(size, 2)))


@pytest.mark.parametrize(("name", "size"), [("qwen", (70, 44)), ("next", (72, 48))])
def test_listed_pixels_have_all_shapes_with_the_fewest_and_the_most_tokens(models, name, size):
    model, draw, counts = models[name], random.Random(1), {}
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
        shape, count = shape_and_count(drawn_image(draw, size))
        assert min(counts[shape]) <= count <= max(counts[shape])


@pytest.mark.parametrize(("name", "pruner", "budget", "size"), CASES, ids=str)
def test_every_batch_of_requests_has_a_planned_shape(models, name, pruner, budget, size):
    model, draw = models[name], random.Random(0)
    policy = stepprune() if pruner == "stepprune" else None
    defaults = Defaults(pruner, policy, budget, max_tokens=4)
    reader = RequestParser(model, "tiny", defaults, RequestLimits(), engine=False)
    planned, extent = Planned(model, Metrics(), batch_size=2, max_tokens=4), Extent(size, 110)
    warm_up(reader, planned, extent)
    planned.batcher.close()

    def image():
        return drawn_image(draw, size)

    for _ in range(20):
        count, rows, heat = draw.choice((0, 1, 1, 2)), draw.choice((1, 2)), draw.choice((0, 1))
        chats = []
        while len(chats) < (1 if heat else rows):
            said = " ".join(draw.choices(["red", "dog", "?", "two"], k=draw.randint(1, 30)))
            spoken = [user(said, *[image() for _ in range(count)])]
            spoken += [{"role": "system", "content": "a"}] if draw.random() < 0.5 else []
            body = {"model": "tiny", "messages": spoken[::-1], "max_tokens": draw.randint(1, 4)}
            chat = reader.read(json.dumps(body | {"temperature": heat}).encode())
            if len(chat.request.ids[0]) - count <= extent.text:
                chats.append(chat)
        shape, _ = planned.shape(chats)
        assert shape in planned.planned, (count, rows, [len(c.request.ids[0]) for c in chats])
    assert len(planned.planned) < 400


def test_no_request_compiles_anything_after_a_warm_up(llava_model, compiled, monkeypatch):
    """Requests as clients send them: with and without images, greedy and drawn, short and long."""
    metrics, lines = Metrics(), []
    log = types.SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr("stepprune_jax.serving.warm_up._logger", log)
    monkeypatch.setattr("stepprune_jax.serving.warm_up._MOST_IMAGES", 1)  # to compile less
    defaults = Defaults(policy=stepprune(draw=0.0), max_tokens=4)
    reader = RequestParser(llava_model, "tiny", defaults, RequestLimits(), engine=False)
    local = Local(llava_model, metrics, batch_size=1, batch_seconds=0.0, max_tokens=4)
    warm_up(reader, local, Extent((1, 1), 30))
    assert lines[-1].startswith("warm-up: ") and len(compiled) > 4
    assert all(re.match(r"compiled in \d+\.\d s: 1 request, ", line) for line in lines[:-1])
    before, system = len(compiled), {"role": "system", "content": "a"}
    with serving(ChatApp(reader, local, metrics, 9).app()) as address, opened(address) as client:
        for images, heat in (([], 0), ([noise(1)], 0), ([noise(2, (50, 9))], 0.7)):
            for text, longest in (("red?", 1), ("two yes no", 3), ("is this a dog ?", 4)):
                client.chat.completions.create(
                    model="tiny",
                    messages=[system, user(text, *images)],
                    max_tokens=longest,
                    temperature=heat,
                )
    assert len(compiled) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [("", "expected the largest image as W"), ("44", "--warm_up is '44'"), ("0x9", "is '0x9'")],
)
def test_a_size_that_a_model_needs_is_asked_for(qwen_folder, monkeypatch, given, words):
    monkeypatch.setattr(serve, "load_vlm", None)
    where = ("--model", str(qwen_folder), "--port", "8083", "--no_compile_cache")
    with pytest.raises(ValueError, match=words):
        serve.prepare([*where, "--warm_up", given])


def test_the_server_warms_up_before_it_listens(llava_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(serve, "warm_up", lambda *arguments: asked.append(arguments))
    where = ("--model", str(llava_folder), "--dtype", "float32", "--port", "8083")
    serve.prepare([*where, "--no_compile_cache", "--warm_up", "--warm_up_text", "70"])
    ((reader, backend, extent),) = asked
    assert reader.name == "tiny_llava0" and backend.batch_size == 8
    assert extent == Extent((1, 1), 70)
