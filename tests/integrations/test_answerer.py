"""Answers to another program's questions, without that program."""

import numpy as np
import pytest
from PIL import Image

from stepprune_jax import testing
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.policy import Policy, save_policy
from stepprune_jax.inference import generate
from stepprune_jax.integrations import answerer as module
from stepprune_jax.integrations.answerer import Wanted, answer_all, cut_at, load_answerer
from stepprune_jax.policy import PolicyConfig, init_policy
from stepprune_jax.pruning import grid_order

QUESTIONS = ("What is this?", "two dog", "is the picture red", "yes or no")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WIDTHS", (192,))
        patch.setattr(module, "CHUNK", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a policy beside it."""
    import jax

    folder = testing.tiny_llava(tmp_path_factory.mktemp("model"))
    config = PolicyConfig(
        feature_width=32, text_width=48, width=16, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    params = init_policy(jax.random.key(1), config)
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    save_policy(Policy(params, config, stop_bias=0.25), folder / "policy.bin")
    return folder


def pictures():
    random = np.random.default_rng(4)
    drawn = [Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(2)]
    return [drawn[0], None, drawn[1], drawn[0]]


@pytest.mark.parametrize(
    ("options", "longest"), [({}, (2, 2)), ({"budget": 2}, (2, 2)), ({"method": "all"}, (3, 2))]
)
def test_answers_are_those_of_generate(folder, options, longest):
    policy = {} if "method" in options else {"policy": folder / "policy.bin"}
    answerer = load_answerer(folder, dtype="float32", batch_size=2, **policy, **options)
    most, done = [longest[0], *[longest[1]] * 3], []
    asked = zip(QUESTIONS, pictures(), most, strict=True)
    found = answer_all(answerer, [Wanted(*one) for one in asked], done.append)
    # Chunks of two; those with another longest answer are apart.
    assert done == ([2, 4] if longest[0] == longest[1] else [2, 3, 4])
    said = generate(
        answerer.model, QUESTIONS, pictures(), policy=answerer.policy, max_tokens=max(longest),
        budget=options.get("budget"), warm_up=False,
    )  # fmt: skip
    decode = answerer.model.tokenizer.decode
    for text, answer, count in zip(found, said, most, strict=True):
        ids = [token for token in answer.token_ids[:count] if token != 2]
        assert text == decode(ids).strip()


def test_heuristics_keep_what_they_are_named_after(folder):
    pixels = [Wanted("?", picture, 1) for picture in pictures() if picture is not None]
    kept = {}
    for method in ("random", "grid", "cls"):
        answerer = load_answerer(folder, method=method, budget=3, dtype="float32", seed=5)
        assert answerer.policy is None and answerer.method.mode == "exact"
        asked = [module._asked(number, wanted) for number, wanted in enumerate(pixels)]
        seen = module.encode_split(
            answerer.model, asked, batch_size=2, with_attention=method == "cls", sizes=(192,)
        )
        kept[method] = module._choose(answerer, seen, [0, 1, 2])
        assert kept[method].count.tolist() == [3, 3, 3]
        if method == "cls":
            expected = seen.by_attention[seen.image_of][:, :3]
            np.testing.assert_array_equal(kept["cls"].order[:, :3], expected)
    np.testing.assert_array_equal(kept["grid"].order[:, :3], grid_order(3, 3, 3, 3)[:, :3])
    drawn = np.random.default_rng((5, 1)).permutation(9)[:3]
    np.testing.assert_array_equal(kept["random"].order[1, :3], drawn)


def test_answers_end_where_they_are_told_to():
    assert cut_at("yes\n\nno", ("\n\n",)) == "yes"
    assert cut_at("a stop b, c", (",", "stop")) == "a "
    assert cut_at("whole", ("", "x")) == "whole" and cut_at("whole", ()) == "whole"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fastv"}, "method is 'fastv', expected policy or one of all, random, grid"),
        ({"method": "policy"}, "method 'policy' and policy None do not go together"),
        ({"method": "grid", "policy": "p"}, "method 'grid' and policy 'p' do not go together"),
        ({"method": "grid"}, "budget is None, expected a count"),
        ({"method": "grid", "budget": 10}, "budget is 10, expected 1 to 9"),
        ({"budget": 3}, "budget is 3, expected none"),
        ({"stop_bias": 0.5}, "a stop bias needs a policy"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of bfloat16, float32"),
        ({"batch_size": 0}, "batch_size is 0, expected an integer from 1"),
        ({"positions": "none"}, "positions is 'none'"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(folder, options, message, monkeypatch):
    monkeypatch.setattr(module, "load_vlm", None)
    with pytest.raises(ValueError, match=message):
        load_answerer(folder, **options)


def test_a_budget_beyond_the_policy_and_an_empty_answer_are_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match="budget"):
        load_answerer(folder, policy=folder / "policy.bin", budget=9)
    model = load_vlm(folder, progress=False)
    answerer = module.Answerer(model, module.Method("all tokens", "exact", None), None, 1,
                               "original", "matmul", 0)  # fmt: skip
    with pytest.raises(ValueError, match="max_new_tokens is 0, expected an integer from 1"):
        answer_all(answerer, [Wanted("?", None, 0)])
