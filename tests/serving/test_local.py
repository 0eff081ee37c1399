"""Without an engine: the library's own answers, through OpenAI's client."""

import concurrent.futures

import openai
import pytest
from servers import PATIENCE, ask, opened, serving
from small_world import broken_at, stepprune
from visual import noise

from stepprune_jax.inference import Generator, RunOptions, answer_text, generate, programs
from stepprune_jax.registry import build_pruner
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import Defaults, RequestParser
from stepprune_jax.serving.metrics import Metrics

PLAIN = stepprune(draw=0.0)  # a row then has the same answer wherever it stands in a batch


@pytest.fixture(scope="module", params=[PATIENCE])
def client(llava_model, request):
    """A server that waits for a batch, unless it is full, for so many seconds."""
    metrics = Metrics()
    reader = RequestParser(
        llava_model, "tiny", Defaults(policy=PLAIN), RequestLimits(), engine=False
    )
    local = Local(llava_model, metrics, batch_size=4, batch_seconds=request.param)
    front = ChatApp(reader, local, metrics, 64)
    with serving(front.app()) as address, opened(address) as client:
        yield client


def test_answers_of_a_batch_are_those_of_generate(client, llava_model):
    """Lengths of the answers differ; that of their program is a power of two."""
    asked = [("red dog?", [noise(1)], 5), ("two", [noise(2)], 8), ("no", [noise(3)], 7)]
    asked.append(("dog", [noise(4)], 6))
    before = programs.num_compiled()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda one: ask(client, *one), asked))
    compiled = programs.num_compiled()
    prompts, images, _ = zip(*asked, strict=True)
    options, method = RunOptions(8), build_pruner(policy=PLAIN)
    expected = generate(llava_model, prompts, images, method, options=options)
    # Choice, prefill and decoding, or fewer if an earlier test had the same; generate's are these.
    assert compiled - before <= 3 and programs.num_compiled() == compiled
    for (_, _, most), answer, own in zip(asked, found, expected, strict=True):
        (choice,), usage, ids = answer.choices, answer.usage, own.token_ids[:most]
        assert tuple(choice.token_ids) == ids
        assert choice.message.content == answer_text(llava_model.tokenizer, ids)
        counts = (usage.visual_tokens, usage.visual_tokens_kept, usage.completion_tokens)
        assert counts == (own.visual_tokens, own.kept, len(ids))
        stopped = ids[-1] in llava_model.config.eos_token_ids
        assert choice.finish_reason == ("stop" if stopped else "length")


def test_a_request_with_broken_logits_costs_no_other_its_answer(llava_model, monkeypatch):
    """Four requests share a batch; one reads the broken token, with its status and its line."""
    metrics, model = Metrics(), broken_at(llava_model, "▁dog")
    read = RequestParser(model, "tiny", Defaults(policy=PLAIN), RequestLimits(), engine=False)
    local, steps = Local(model, metrics, batch_size=4, batch_seconds=5.0, max_tokens=200), []
    stream = Generator.stream

    def watched(*given):
        for event in stream(*given):
            steps.append(event)
            yield event

    monkeypatch.setattr(Generator, "stream", watched)
    questions = [("red?", [noise(1)], 5), ("two", [noise(2)], 8), ("no", [noise(3)], 7)]

    def ask_one(client, question, images, longest):
        try:
            return ask(client, question, images, longest)
        except openai.InternalServerError as error:
            return error

    app, threads = ChatApp(read, local, metrics, 64).app(), concurrent.futures.ThreadPoolExecutor(4)
    with serving(app) as address, opened(address) as client, threads:
        jobs = [*questions, ("red dog", [noise(4)], 6)]
        *answers, error = threads.map(lambda job: ask_one(client, *job), jobs)
    assert metrics.registry.get_sample_value("stepprune_batch_rows_sum") == 4
    assert metrics.registry.get_sample_value("stepprune_batch_rows_count") == 1
    assert len(steps) <= 8 * 4  # nobody waits for the broken row
    assert error.status_code == 500 and "the model's logits are not finite. Either" in str(error)
    prompts, images, _ = zip(*questions, strict=True)
    pruner = build_pruner(policy=PLAIN)
    expected = generate(llava_model, prompts, images, pruner, options=RunOptions(8))
    for (*_, longest), answer, alone in zip(questions, answers, expected, strict=True):
        assert tuple(answer.choices[0].token_ids) == alone.token_ids[:longest]


@pytest.mark.parametrize("client", [0.5], indirect=True)
def test_a_stop_ends_an_answer_alone_and_in_a_batch(client, llava_model):
    asked = [("red dog?", [noise(1)], 8), ("two", [noise(2)], 8)]
    whole = [ask(client, *one).choices[0] for one in asked]
    stop = whole[0].message.content[len(whole[0].message.content) // 2 :][:2]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda one: ask(client, *one, stop=stop).choices[0], asked))
    for choice, full in zip(found, whole, strict=True):
        said = full.message.content
        assert choice.message.content == said[: said.find(stop) if stop in said else None].strip()
        assert choice.finish_reason == ("stop" if stop in said else full.finish_reason)
    assert len(found[0].token_ids) < len(whole[0].token_ids)
    chunks = [chunk.choices[0] for chunk in ask(client, *asked[0], stop=stop, stream=True)]
    assert "".join(x.delta.content for x in chunks) == found[0].message.content
    assert chunks[-1].finish_reason == "stop" and len(chunks) == len(found[0].token_ids)


@pytest.mark.parametrize("client", [0.0], indirect=True)
def test_requests_with_other_numbers_of_images_run_in_batches_of_their_own(client, llava_model):
    """Otherwise each mixture would be one more program."""
    asked = [("two", [], 8), ("no", [noise(2), noise(3)], 7)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda one: ask(client, *one), asked))
    prompts, images, _ = zip(*asked, strict=True)
    pruner = build_pruner(policy=PLAIN)
    expected = generate(llava_model, prompts, images, pruner, options=RunOptions(8))
    for (*_, longest), answer, alone in zip(asked, answers, expected, strict=True):
        assert tuple(answer.choices[0].token_ids) == alone.token_ids[:longest]


@pytest.mark.parametrize("client", [0.0], indirect=True)
def test_a_method_that_cuts_inside_and_a_seed(client):
    how = {"pruner": "sparsevlm", "budget": 3, "temperature": 1.5}
    images = [noise(1)]
    found = [ask(client, "two", images, 4, seed=7, **how).choices[0].token_ids for _ in "ab"]
    assert found[0] == found[1]
    others = {tuple(ask(client, "two", images, 4, **how).choices[0].token_ids) for _ in "abc"}
    assert len(others) > 1
    chunks = [*ask(client, "two", images, 4, seed=7, stream=True, **how)]
    assert [chunk.choices[0].token_ids[0] for chunk in chunks] == found[0]
