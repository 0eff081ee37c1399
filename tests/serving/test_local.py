"""The server without an engine gives the answers of `generate` to OpenAI clients."""

import concurrent.futures

import jax.numpy as jnp
import openai
import pytest
from pages import ROOT, blocks
from PIL import Image
from servers import PATIENCE, ask, openai_client, run_server, user_message
from small_world import broken_at, stepprune
from tiny_llava_next import tiny_llava_next
from tiny_qwen import tiny_qwen, tiny_qwen3
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.inference import Generator, RunOptions, answer_text, generate, programs
from stepprune_jax.registry import build_pruner
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import Defaults, RequestParser

# Without a draw limit, the answer of a row does not depend on its place in the batch.
PLAIN = stepprune(draw=0.0)


def assert_answers_of_generate(model, questions, replies):
    prompts, images, _ = zip(*questions, strict=True)
    pruner = build_pruner(policy=PLAIN)
    expected_answers = generate(model, prompts, images, pruner, options=RunOptions(8))
    for (*_, max_tokens), reply, expected in zip(questions, replies, expected_answers, strict=True):
        assert tuple(reply.choices[0].token_ids) == expected.token_ids[:max_tokens]


@pytest.fixture(scope="module", params=[PATIENCE])
def client(llava_model, request):
    """A client of a server that waits `request.param` seconds for a batch to fill."""
    metrics = Metrics()
    parser = RequestParser(
        llava_model, "tiny", Defaults(policy=PLAIN), RequestLimits(), engine=False
    )
    backend = LocalBackend(llava_model, metrics, batch_size=4, batch_seconds=request.param)
    app = ChatApp(parser, backend, metrics, 64)
    with run_server(app.app()) as address, openai_client(address) as client:
        yield client


@pytest.mark.supports("llava", "serve")
def test_answers_of_a_batch_equal_those_of_generate(client, llava_model):
    """The answers have different lengths. The program pads the limit to a power of two."""
    questions = [("red dog?", [noise(1)], 5), ("two", [noise(2)], 8), ("no", [noise(3)], 7)]
    questions.append(("dog", [noise(4)], 6))
    start_count = programs.num_compiled()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda question: ask(client, *question), questions))
    num_compiled = programs.num_compiled()
    prompts, images, _ = zip(*questions, strict=True)
    options, pruner = RunOptions(8), build_pruner(policy=PLAIN)
    expected_answers = generate(llava_model, prompts, images, pruner, options=options)
    # At most selection, prefill and decode: an earlier test may have compiled them. `generate` runs
    # the same programs.
    assert num_compiled - start_count <= 3 and programs.num_compiled() == num_compiled
    for (_, _, max_tokens), reply, expected in zip(
        questions, replies, expected_answers, strict=True
    ):
        (choice,), usage, ids = reply.choices, reply.usage, expected.token_ids[:max_tokens]
        assert tuple(choice.token_ids) == ids
        assert choice.message.content == answer_text(llava_model.tokenizer, ids)
        counts = (usage.visual_tokens, usage.visual_tokens_kept, usage.completion_tokens)
        assert counts == (expected.visual_tokens, expected.kept, len(ids))
        stopped = ids[-1] in llava_model.config.eos_token_ids
        assert choice.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("client", [0.0], indirect=True)
def test_the_code_of_the_page_draws_the_kept_tokens_of_a_reply(client, llava_model, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {}
    for block in blocks(ROOT / "docs" / "serving.md"):
        exec(block, namespace)
    fields = {"budget": 4, "return_kept_tokens": True}
    message = user_message("red dog?", noise(1))
    reply = client.chat.completions.create(
        model="tiny", messages=[message], max_tokens=2, extra_body=fields
    )
    pruner = build_pruner(None, 4, policy=PLAIN)
    (answer,) = generate(llava_model, ["red dog?"], [noise(1)], pruner, options=RunOptions(2))
    (kept,) = reply.kept_tokens
    assert (tuple(kept["grid"]), tuple(kept["cells"])) == (answer.grids[0], answer.kept_indices[0])
    picture = namespace["draw_kept"](Image.new("RGB", (9, 9), "red"), kept)
    assert picture.size == (96, 96)
    colors = [picture.getpixel((32 * (cell % 3) + 16, 32 * (cell // 3) + 16)) for cell in range(9)]
    assert [cell for cell in range(9) if colors[cell] == (255, 0, 0)] == sorted(kept["cells"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(tiny_llava_next, marks=pytest.mark.supports("llava_next", "serve")),
        pytest.param(tiny_qwen, marks=pytest.mark.supports("qwen2_5_vl", "serve")),
        pytest.param(tiny_qwen3, marks=pytest.mark.supports("qwen3_vl", "serve")),
    ],
)
def test_a_served_answer_of_other_families_equals_that_of_generate(write, tmp_path):
    model = load_vlm(write(tmp_path), dtype=jnp.float32, progress=False)
    pruner, metrics = build_pruner("divprune", budget="1/2"), Metrics()
    defaults = Defaults(pruner="divprune", budget="1/2")
    parser = RequestParser(model, "tiny", defaults, RequestLimits(), engine=False)
    backend = LocalBackend(model, metrics, batch_size=2, batch_seconds=0.0)
    app = ChatApp(parser, backend, metrics, 4).app()
    with run_server(app) as address, openai_client(address) as client:
        reply = ask(client, "two", [noise(2)], 6)
    (expected,) = generate(model, ["two"], [noise(2)], pruner, options=RunOptions(6))
    assert tuple(reply.choices[0].token_ids) == expected.token_ids
    assert reply.usage.visual_tokens_kept == expected.kept < expected.visual_tokens


def test_broken_logits_of_one_request_do_not_affect_its_batch(llava_model, monkeypatch):
    """Four requests share a batch. Only the one with the broken token gets an error."""
    metrics, model = Metrics(), broken_at(llava_model, "▁dog")
    parser = RequestParser(model, "tiny", Defaults(policy=PLAIN), RequestLimits(), engine=False)
    backend = LocalBackend(model, metrics, batch_size=4, batch_seconds=5.0, max_tokens=200)
    steps, stream = [], Generator.stream

    def recorded_stream(*arguments):
        for event in stream(*arguments):
            steps.append(event)
            yield event

    monkeypatch.setattr(Generator, "stream", recorded_stream)
    questions = [("red?", [noise(1)], 5), ("two", [noise(2)], 8), ("no", [noise(3)], 7)]

    def ask_one(client, question, images, max_tokens):
        try:
            return ask(client, question, images, max_tokens)
        except openai.InternalServerError as error:
            return error

    app = ChatApp(parser, backend, metrics, 64).app()
    threads = concurrent.futures.ThreadPoolExecutor(4)
    with run_server(app) as address, openai_client(address) as client, threads:
        jobs = [*questions, ("red dog", [noise(4)], 6)]
        *answers, error = threads.map(lambda job: ask_one(client, *job), jobs)
    assert metrics.registry.get_sample_value("stepprune_batch_rows_sum") == 4
    assert metrics.registry.get_sample_value("stepprune_batch_rows_count") == 1
    assert len(steps) <= 8 * 4  # The broken row does not run on.
    assert error.status_code == 500 and "the model's logits are not finite. Either" in str(error)
    assert_answers_of_generate(llava_model, questions, answers)


@pytest.mark.parametrize("client", [0.5], indirect=True)
def test_a_stop_text_ends_an_answer_in_any_batch(client, llava_model):
    questions = [("red dog?", [noise(1)], 8), ("two", [noise(2)], 8)]
    full_choices = [ask(client, *question).choices[0] for question in questions]
    stop = full_choices[0].message.content[len(full_choices[0].message.content) // 2 :][:2]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        choices = list(
            threads.map(lambda question: ask(client, *question, stop=stop).choices[0], questions)
        )
    for choice, full_choice in zip(choices, full_choices, strict=True):
        text = full_choice.message.content
        assert choice.message.content == text[: text.find(stop) if stop in text else None].strip()
        assert choice.finish_reason == ("stop" if stop in text else full_choice.finish_reason)
    assert len(choices[0].token_ids) < len(full_choices[0].token_ids)
    chunks = [chunk.choices[0] for chunk in ask(client, *questions[0], stop=stop, stream=True)]
    assert "".join(x.delta.content for x in chunks) == choices[0].message.content
    assert chunks[-1].finish_reason == "stop" and len(chunks) == len(choices[0].token_ids)


@pytest.mark.parametrize("client", [0.0], indirect=True)
def test_requests_with_different_numbers_of_images_do_not_share_a_batch(client, llava_model):
    """Each mixture would need a program."""
    questions = [("two", [], 8), ("no", [noise(2), noise(3)], 7)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda question: ask(client, *question), questions))
    assert_answers_of_generate(llava_model, questions, answers)


@pytest.mark.parametrize("client", [0.0], indirect=True)
def test_a_seed_reproduces_a_sampled_answer(client):
    fields = {"pruner": "sparsevlm", "budget": 3, "temperature": 1.5}
    images = [noise(1)]
    seeded = [ask(client, "two", images, 4, seed=7, **fields).choices[0].token_ids for _ in "ab"]
    assert seeded[0] == seeded[1]
    unseeded = {tuple(ask(client, "two", images, 4, **fields).choices[0].token_ids) for _ in "abc"}
    assert len(unseeded) > 1
    chunks = [*ask(client, "two", images, 4, seed=7, stream=True, **fields)]
    assert [chunk.choices[0].token_ids[0] for chunk in chunks] == seeded[0]
