"""Answers to another program's questions, without that program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stepprune_jax import testing
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.policy import Policy, save_policy
from stepprune_jax.evaluation import encode
from stepprune_jax.inference import generate, pipeline
from stepprune_jax.inference.pipeline import Images, Vision
from stepprune_jax.inference.sets import Answers
from stepprune_jax.integrations import answerer as module
from stepprune_jax.integrations.answerer import Wanted, answer_questions, cut_at, load_answerer
from stepprune_jax.policy import PolicyConfig, init_policy
from stepprune_jax.pruning.grid import grid_indices
from stepprune_jax.pruning.method import NO_PRUNING

QUESTIONS = ("What is this?", "two dog", "is the picture red", "yes or no")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WIDTHS", (192,))
        patch.setattr(encode, "WIDTHS", (192,))
        patch.setattr(encode, "CHUNK", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a policy beside it."""
    folder = testing.tiny_llava(tmp_path_factory.mktemp("model"))
    config = PolicyConfig(
        feature_width=32, text_width=48, width=16, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    params = init_policy(jax.random.key(1), config)
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    save_policy(Policy(params, config, None, stop_bias=0.25), folder / "policy.bin")
    return folder


def images():
    random = np.random.default_rng(4)
    drawn = [Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(2)]
    return [drawn[0], None, drawn[1], drawn[0]]


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"budget": 2}, (2, 2)),
        pytest.param({"method": "all"}, (3, 2), marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_generate(folder, options, longest):
    policy = {} if "method" in options else {"policy": folder / "policy.bin"}
    answerer = load_answerer(folder, dtype="float32", batch_size=2, **policy, **options)
    most, done = [longest[0], *[longest[1]] * 3], []
    asked = zip(QUESTIONS, images(), most, strict=True)
    texts = answer_questions(answerer, [Wanted(*one) for one in asked], done.append)
    # Chunks of two; those with another longest answer are apart.
    assert done == ([2, 4] if longest[0] == longest[1] else [2, 3, 4])
    said = generate(
        answerer.model,
        QUESTIONS,
        images(),
        pruner=answerer.method,
        max_tokens=max(longest),
        warm_up=False,
    )
    decode = answerer.model.tokenizer.decode
    for text, answer, count in zip(texts, said, most, strict=True):
        ids = [token for token in answer.token_ids[:count] if token != 2]
        assert text == decode(ids).strip()


@pytest.mark.slow
def test_heuristics_keep_what_they_are_named_after(folder, monkeypatch):
    asked = [Wanted("?", image, 1) for image in images() if image is not None]
    answers, kept, answer_all = [], {}, module.answer_all

    def watch(model, method, prompts, images, *arguments):
        answers.append((images, prompts, answer_all(model, method, prompts, images, *arguments)))
        return answers[-1][2]

    monkeypatch.setattr(module, "answer_all", watch)
    for method in ("random", "grid", "cls"):
        answers.clear()
        answerer = load_answerer(folder, method=method, budget="1/3", dtype="float32", seed=5)
        answer_questions(answerer, asked)
        assert len(answers) == 2  # chunks of two
        kept[method] = [order.tolist() for _, _, part in answers for order in part.order]
        assert [count for _, _, part in answers for count in part.kept] == [3, 3, 3]
    (tap,) = taps = answerer.method.pruner.taps(answerer.model.config)
    of_image = np.concatenate(
        [
            pipeline.encode(answerer.model, images, taps).taps[tap][prompts.image_of[:, 0]]
            for images, prompts, _ in answers
        ]
    )
    by_attention = np.argsort(-of_image.mean(1)[:, 1:], axis=1, kind="stable")[:, :3]
    assert kept["cls"] == np.sort(by_attention).tolist()
    assert kept["cls"][0] == kept["cls"][2]
    (expected,) = grid_indices(jnp.array([[3, 3]]), jnp.array([3]), 3)
    assert kept["grid"] == [expected.tolist()] * 3
    # A question's draw depends on its number alone, whatever chunk it is in.
    drawn = jax.random.uniform(jax.random.key(5), (3, 9))
    assert kept["random"] == np.sort(np.argsort(drawn)[:, :3]).tolist()


def test_an_image_that_two_ask_about_goes_through_the_tower_once(folder, monkeypatch):
    answerer, seen = load_answerer(folder, dtype="float32"), []

    def note(model, method, prompts, images, *arguments):
        seen.append(images)
        count = len(prompts.length)
        return Answers([""] * count, np.zeros(count, np.int32), [], np.zeros(count))

    monkeypatch.setattr(module, "answer_all", note)
    first, _, second, _ = images()
    answer_questions(answerer, [Wanted("?", image, 1) for image in (first, first, first, second)])
    shared, apart = seen
    assert isinstance(shared, Vision) and len(shared.sizes) == 1
    assert isinstance(apart, Images) and len(apart.sizes) == 2


def test_answers_end_where_they_are_told_to():
    assert cut_at("yes\n\nno", ("\n\n",)) == "yes"
    assert cut_at("a stop b, c", (",", "stop")) == "a "
    assert cut_at("whole", ("", "x")) == "whole" and cut_at("whole", ()) == "whole"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fastw"}, "unknown pruner 'fastw', expected one of all, random, grid.*fastv"),
        ({"method": "policy"}, "method 'policy' needs a policy"),
        ({"method": "stepprune"}, "the pruner 'stepprune' is trained: it needs a policy"),
        (
            {"method": "grid", "policy": "policy.bin", "budget": 3},
            "the policy belongs to 'stepprune', not to 'grid'",
        ),
        ({"method": "grid"}, "the pruner 'grid' needs a budget"),
        ({"method": "grid", "budget": 10}, "budget is 10, expected at most 9"),
        ({"budget": 3}, "a budget .* needs a pruner .* or a policy"),
        ({"stop_bias": 0.5}, "a stop bias .* needs a policy"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of bfloat16, float32"),
        ({"batch_size": 0}, "batch_size is 0, expected an integer from 1"),
        ({"positions": "none"}, "positions is 'none'"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(folder, options, message, monkeypatch):
    monkeypatch.setattr(module, "load_vlm", None)
    if "policy" in options:
        options = options | {"policy": folder / options["policy"]}
    with pytest.raises(ValueError, match=message):
        load_answerer(folder, **options)


def test_a_budget_beyond_the_policy_and_an_empty_answer_are_refused(folder):
    with pytest.raises(ValueError, match="budget"):
        load_answerer(folder, policy=folder / "policy.bin", budget=9)
    model = load_vlm(folder, progress=False)
    answerer = module.Answerer(model, NO_PRUNING, 1, module.RunOptions())
    with pytest.raises(ValueError, match="max_new_tokens is 0, expected an integer from 1"):
        answer_questions(answerer, [Wanted("?", None, 0)])
