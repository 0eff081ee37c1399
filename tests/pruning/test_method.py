from fractions import Fraction

import pytest
from small_world import one_shot, stepprune

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.pruning import PRUNERS, Budget, FastV, PyramidDrop, VisionZip, make_method
from stepprune_jax.testing import tiny_hf_config


@pytest.fixture(scope="module")
def config():
    return LlavaConfig.from_hf(tiny_hf_config())


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        ("all", Budget()),
        ("own", Budget("own")),
        ("64", Budget("count", 64)),
        (64, Budget("count", 64)),
        ("1/3", Budget("rate", Fraction(1, 3))),
        ("22.2%", Budget("rate", Fraction(222, 1000))),
        ("100%", Budget("rate", Fraction(1))),
        ("mean:31.5", Budget("mean", 31.5)),
    ],
)
def test_budgets_are_read_and_written(text, budget):
    assert Budget.parse(text) == budget
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-3", "4.5", 0.5, "5/4", "0/3", "1/0", "0%", "101%", "mean:0", "mean:x", "", True),
        "1e999999999%",  # as a fraction it would take forever
        "mean:1e300",
    ],
)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match=r"^budget is .*, expected a count such as 64, .*all$"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("count", 0, "budget is 0, expected an integer from 1"),
        ("count", True, "budget is True, expected an integer from 1"),
        ("rate", 1.5, r"budget is 1.5, expected a share in \(0, 1\]"),
        ("mean", 1e300, r"budget is 1e\+300, expected a positive number"),
        ("mean", -1, "budget is -1, expected a positive number"),
        ("own", 3, "budget is 3, expected no number"),
        ("some", 3, "budget of kind 'some', expected one of all, count, rate, mean, own"),
    ],
)
def test_budgets_check_themselves(kind, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Budget(kind, value)


def test_shares_are_exact_and_rounded_half_up():
    # As decimals these would be 191, 127 and 63 of 576 tokens.
    shares = [Budget.parse(text) for text in ("1/3", "2/9", "1/9")]
    assert [share.count(576) for share in shares] == [192, 128, 64]
    halves = Budget("rate", Fraction(1, 2))
    assert [halves.count(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert Budget("rate", Fraction(1, 100)).count(9) == 1  # one at least
    assert Budget("count", 5).count(3) == 3
    assert Budget("own").count(9) is Budget("mean", 2).count(9) is None


def test_methods_are_made_from_what_a_user_says():
    assert make_method().pruner.name == "all"
    fastv = make_method("fastv", "4", options={"layer": "1", "average": "True"}).pruner
    assert fastv == FastV(budget=Budget("count", 4), layer=1, average=True)
    pyramid = make_method(
        "pyramiddrop", options={"layer_list": "[1, 2]", "image_token_ratio_list": (1, 0.5)}
    ).pruner
    assert pyramid == PyramidDrop(layer_list=(1, 2), image_token_ratio_list=(1.0, 0.5))
    assert make_method("sparsevlm", 4, options={"noise": "0"}).pruner.noise == 0
    zipped = make_method("visionzip", 6, options={"contextual": 2}).pruner
    assert zipped == VisionZip(budget=Budget("count", 6), contextual=2)
    learned = make_method(policy=stepprune())
    assert learned.pruner.name == "stepprune" and learned.pruner.budget == Budget("own")
    assert make_method("stepprune", 3, policy=stepprune(), stop_bias=0.5).params.stop_bias == 0.5
    assert make_method(policy=one_shot(), budget=3).pruner.name == "autoselect"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "fastvv"},
            r"unknown pruner 'fastvv', expected one of all, .*; did you mean 'fastv'\?",
        ),
        ({"name": "xyz"}, f"unknown pruner 'xyz', expected one of {', '.join(PRUNERS)}"),
        (
            {"name": "fastv", "budget": 3, "options": {"layers": 2}},
            "fastv has no option 'layers'; its options: average, layer",
        ),
        (
            {"name": "grid", "budget": 3, "options": {"budget": 2}},
            "grid has no option 'budget'; its options: none",
        ),
        (
            {"name": "stepprune", "policy": stepprune(), "options": {"config": 2}},
            "stepprune has no option 'config'; its options: group",
        ),
        (
            {"name": "stepprune", "policy": stepprune(), "options": {"group": "0"}},
            "stepprune: option group is 0, expected at least 1",
        ),
        (
            {"name": "fastv", "budget": 3, "options": {"layer": "two"}},
            "fastv: option layer is 'two', expected int",
        ),
        (
            {"name": "pyramiddrop", "budget": 3, "options": {"layer_list": "8"}},
            "pyramiddrop: option layer_list is 8, expected a list of int",
        ),
        (
            {"name": "sparsevlm", "options": {"noise": 0}},
            r"the pruner 'sparsevlm' needs a budget \(--budget\)",
        ),
        (
            {"name": "fastv", "budget": 3, "options": {"average": 1}},
            "fastv: option average is 1, expected bool",
        ),
        (
            {"name": "topv", "budget": 3, "options": {"alpha": "1e400"}},
            "topv: option alpha is inf, expected a number that 32 bits hold",
        ),
        (
            {"name": "random", "budget": 3, "options": {"seed": 1 << 31}},
            "random: option seed is 2147483648, expected a number that 32 bits hold",
        ),
        (
            {"name": "all", "budget": 3},
            "budget is 3, but the pruner 'all' keeps every token: choose another one",
        ),
        ({"name": "visionzip"}, r"the pruner 'visionzip' needs a budget \(--budget\)"),
        (
            {"policy": one_shot()},
            r"autoselect has no learned stop: give a budget \(--budget\)",
        ),
        (
            {"name": "random", "budget": "own"},
            "random does not support the budget own, only all, count, rate",
        ),
        (
            {"name": "autoselect", "policy": one_shot(), "budget": "mean:3"},
            "autoselect does not support the budget mean:3, only count, rate",
        ),
        (
            {"name": "random", "budget": 3, "policy": stepprune()},
            "the policy belongs to 'stepprune', not to 'random'",
        ),
        (
            {"name": "stepprune", "policy": one_shot()},
            "the policy belongs to 'autoselect', not to 'stepprune'",
        ),
        (
            {"name": "autoselect", "budget": 3},
            r"the pruner 'autoselect' is trained: it needs a policy \(--policy\)",
        ),
        (
            {"name": "random", "budget": 3, "stop_bias": 0.5},
            r"a stop bias \(--stop_bias\) needs a policy \(--policy\)",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_method(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "grid", "budget": 10}, "budget is 10, expected an integer from 1 to 9, .*grid"),
        (
            {"name": "stepprune", "budget": 5, "policy": stepprune()},
            "budget is 5, expected an integer from 1 to 4, as many as stepprune can keep of 9",
        ),
        (
            {"name": "stepprune", "budget": "2/3", "policy": stepprune()},
            "budget is 2/3, expected a share that is at most 4 of 9 visual tokens",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused_in_one_line(config, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        make_method(**arguments).pruner.check(config, config.max_image_tokens)
    assert "\n" not in str(caught.value)
