"""Without an engine: the library's own answers, through OpenAI's client."""

import concurrent.futures

import openai
import pytest
from servers import noise, serving, user
from small_world import stepprune

from stepprune_jax.inference import RunOptions, generate, programs
from stepprune_jax.pruning import make_method
from stepprune_jax.serving.app import Front
from stepprune_jax.serving.images import Limits
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import Defaults, Reader
from stepprune_jax.serving.metrics import Metrics


@pytest.fixture(scope="module")
def client(llava_model):
    metrics = Metrics()
    reader = Reader(llava_model, "tiny", Defaults(policy=stepprune()), Limits(), engine=False)
    local = Local(llava_model, metrics, batch_size=4, batch_seconds=0.3)
    with serving(Front(reader, local, metrics, 64).app()) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            yield client


def ask(client, question, images, most, **fields):
    extra = {"return_token_ids": True} | {
        name: fields.pop(name) for name in ("pruner", "budget") if name in fields
    }
    messages = [user(question, *images)]
    how = {"model": "tiny", "messages": messages, "max_tokens": most, "extra_body": extra}
    return client.chat.completions.create(**how, **fields)


def test_answers_of_a_batch_are_those_of_generate(client, llava_model):
    """Lengths of the answers differ; a program's is a power of two."""
    asked = [("red dog?", [noise(1)], 5), ("two", [], 8), ("no", [noise(2), noise(3)], 7)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        before = programs.num_compiled()
        found = list(threads.map(lambda one: ask(client, *one), asked))
        assert programs.num_compiled() - before <= 3  # choice, prefill, decoding
    for (question, images, most), answer in zip(asked, found, strict=True):
        options = RunOptions(most, warm_up=False)
        method = make_method(policy=stepprune())
        (expected,) = generate(llava_model, [question], [images], method, options=options)
        (choice,) = answer.choices
        assert tuple(choice.token_ids) == expected.token_ids
        assert choice.message.content == expected.text
        usage = answer.usage
        assert usage.visual_tokens == expected.visual_tokens
        assert usage.visual_tokens_kept == expected.kept
        stopped = expected.token_ids[-1] in llava_model.config.eos_token_ids
        assert choice.finish_reason == ("stop" if stopped else "length")


def test_a_method_that_cuts_inside_and_a_seed(client, llava_model):
    images, sampled = [noise(1)], {"temperature": 1.5, "seed": 7}
    found = [ask(client, "two", images, 4, **sampled).choices[0].token_ids for _ in range(2)]
    assert found[0] == found[1]
    others = {
        tuple(ask(client, "two", images, 4, temperature=1.5).choices[0].token_ids) for _ in "abc"
    }
    assert len(others) > 1
    chunks = [*ask(client, "two", images, 4, pruner="sparsevlm", budget=3, stream=True)]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_the_models_and_an_unknown_one(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="model is 'gpt', expected 'tiny'"):
        client.chat.completions.create(model="gpt", messages=[user("?")])
