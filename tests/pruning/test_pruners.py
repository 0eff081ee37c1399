from fractions import Fraction

import jax
import pytest
from small_world import one_shot, stepprune
from views import llava

from stepprune_jax.pruning import (
    Budget,
    CDPruner,
    Cls,
    Dart,
    FastV,
    Grid,
    HoloV,
    MMTok,
    PruMerge,
    PyramidDrop,
    SparseVLM,
    SparseVLMv2,
    TopV,
    VisionZip,
)
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import VisionSelector, VisionSelectorConfig
from stepprune_jax.user_input import UserError

LEARNED, SCORER = stepprune(), one_shot()


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("all", Budget()),
        ("adaptive", Budget("adaptive")),
        ("own", Budget("adaptive")),
        (64, Budget("count", 64)),
        ("1/3", Budget("rate", Fraction(1, 3))),
        ("22.2%", Budget("rate", Fraction(222, 1000))),
        ("mean:1234567.25", Budget("mean", 1234567.25)),
    ],
)
def test_budgets_are_read_and_written(text, budget):
    assert Budget.parse(text) == budget
    assert Budget.parse(str(budget)) == budget


# As a fraction the last would take forever.
NO_BUDGETS = ("0", "4.5", 0.5, "5/4", "1/0", "101%", "mean:0", "", "1e999999999%")


@pytest.mark.parametrize("text", NO_BUDGETS)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match=r"^budget is"):
        Budget.parse(text)


@pytest.mark.parametrize(("kind", "value"), [("count", True), ("adaptive", 3), ("some", 3)])
def test_budgets_check_themselves(kind, value):
    with pytest.raises(ValueError, match=r"^budget"):
        Budget(kind, value)


def test_shares_are_exact_and_rounded_half_up():
    # As decimals these would be 191, 127 and 63 of 576 tokens.
    shares = [Budget.parse(text) for text in ("1/3", "2/9", "1/9")]
    assert [share.count(576) for share in shares] == [192, 128, 64]
    halves = Budget("rate", Fraction(1, 2))
    assert [halves.count(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert Budget("rate", Fraction(1, 100)).count(9) == 1  # one at least
    assert Budget("count", 5).count(3) == 3
    assert Budget("adaptive").count(9) is Budget("mean", 2).count(9) is None


@pytest.mark.parametrize("given", [64, "64", "1/9", "22.2%", "all", "adaptive", Budget("count", 3)])
def test_a_budget_is_what_can_be_read_and_the_rest_is_kept(given):
    pruner, expected = FastV(budget=given, layer=3), Budget.parse(given)
    assert pruner == FastV(expected, layer=3) == FastV(layer=3).with_budget(given)
    assert pruner.with_budget(5).with_budget(given) == pruner


@pytest.mark.parametrize("text", NO_BUDGETS)
def test_a_pruner_refuses_what_is_no_budget(text):
    for make in (FastV, FastV().with_budget, LEARNED.with_budget):
        with pytest.raises(ValueError, match=r"^budget is"):
            make(str(text))


def test_a_policy_refuses_budgets_that_it_cannot_keep_at_once():
    assert LEARNED.with_budget("1/3").params is LEARNED.params
    for policy, budget, message in (
        (LEARNED, "all", "stepprune does not support the budget all, only "),
        (LEARNED, "mean:3", "the policy has no calibration, which a mean budget needs"),
        (SCORER, "own", "autoselect does not support the budget adaptive, only count, rate"),
        (SCORER, "mean:3", "autoselect does not support the budget mean:3"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            policy.with_budget(budget)


NEEDS = r"^the pruner '{}' needs a budget \(budget=64 in Python, --budget 64\); see .*pruners.md$"


@pytest.mark.parametrize("name", PRUNERS)
def test_a_method_that_needs_a_budget_is_refused_without_one(name):
    pruner, decides = (
        PRUNERS[name](),
        {"all": "all", "blind": "none", "prumerge": "adaptive", "prumerge_plus": "adaptive"},
    )
    decides |= {"stepprune": "adaptive", "glimpseprune": "adaptive"}
    assert pruner.budget.kind == decides.get(name, "unset")
    policy = pruner if pruner.config_type else None
    if name in decides:
        assert build_pruner(name, policy=policy).budget == pruner.budget
        return
    method = VisionSelector(config=VisionSelectorConfig(32))
    selector = method.replace(params=method.init_params(jax.random.key(0)))
    trained = {"autoselect": SCORER, "visionselector": selector}
    for refuse in (
        lambda: trained.get(name, pruner).check(DEEP, 9),
        lambda: build_pruner(name, policy=policy),
    ):
        with pytest.raises(UserError, match=NEEDS.format(name)):
            refuse()


def test_all_tokens_and_a_schedule_of_numbers_need_no_budget():
    pair = llava(4)
    FastV("all").check(pair, 9)
    SparseVLM(pruning_loc=(1, 2), sparse_token_list=(4, 2)).check(pair, 9)
    PyramidDrop(layer_list=(1, 2), image_token_ratio_list=(0.5, 0.25)).check(pair, 9)
    with pytest.raises(UserError, match=NEEDS.format("pyramiddrop")):
        PyramidDrop(layer_list=(1, 2)).check(pair, 9)


def test_methods_are_made_from_what_a_user_says():
    assert build_pruner().name == "all"
    fastv = build_pruner("fastv", "4", options={"layer": "1", "average": "True"})
    assert fastv == FastV(budget=Budget("count", 4), layer=1, average=True)
    options = {"layer_list": "[1, 2]", "image_token_ratio_list": (1, 0.5)}
    pyramid = build_pruner("pyramiddrop", options=options)
    assert pyramid == PyramidDrop(layer_list=(1, 2), image_token_ratio_list=(1.0, 0.5))
    zipped = build_pruner("visionzip", 6, options={"contextual": 2})
    assert zipped == VisionZip(budget=Budget("count", 6), contextual=2)
    learned = build_pruner(policy=stepprune())
    assert learned.name == "stepprune" and learned.budget == Budget("adaptive")
    assert build_pruner("stepprune", 3, policy=stepprune(), stop_bias=0.5).stop_bias == 0.5
    assert build_pruner(policy=one_shot(), budget=3).name == "autoselect"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "fastvv"}, r"unknown pruner 'fastvv'.* Did you mean fastv\?$"),
        ({"name": "", "policy": LEARNED}, "unknown pruner ''"),
        ({"budget": 3}, "--budget.*--pruner"),
        ({"name": "random", "budget": "own"}, "budget adaptive, only all, count, rate"),
        ({"name": "sparsevlm", "options": {"noise": 0}}, "'sparsevlm' needs a budget"),
        ({"name": "autoselect", "policy": SCORER, "budget": "mean:3"}, "budget mean:3"),
        ({"name": "autoselect", "budget": 3}, "'autoselect' is trained.*--policy"),
        ({"name": "random", "budget": 3, "policy": LEARNED}, "'stepprune', not to 'random'"),
        ({"name": "random", "budget": 3, "stop_bias": 0.5}, "--stop_bias.*--policy"),
        ({"policy": LEARNED, "stop_bias": float("nan")}, "--stop_bias"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_pruner(**arguments)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fastv", {"layers": 2}),
        ("stepprune", {"config": 2}),
        ("stepprune", {"group": "0"}),
        ("fastv", {"layer": "two"}),
        ("fastv", {"average": 1}),
        ("pyramiddrop", {"layer_list": "8"}),
        ("topv", {"alpha": "1e400"}),
        ("random", {"seed": 1 << 31}),
    ],
)
def test_options_are_refused_by_name(name, options):
    policy = LEARNED if name == "stepprune" else None
    message = f"^{name}.* {next(iter(options))}|{next(iter(options))!r}"
    with pytest.raises(ValueError, match=message):
        build_pruner(name, 3, policy=policy, options=options)


DEEP, SMALL, NO_CLASS_TOKEN = llava(), llava(2), llava(2, feature_layer=0)
TEN = Budget("count", 10)


@pytest.mark.parametrize(
    ("pruner", "option"),
    [
        (Grid(TEN), "budget"),
        (LEARNED.with_budget(5), "budget"),
        (FastV(9, layer=32), "layer"),
        (FastV(Budget("count", 1), layer=4, average=True), "budget"),
        (PyramidDrop(Budget("count", 1)), "budget"),
        (PyramidDrop(9, layer_list=(8, 32)), "layer_list"),
        (PyramidDrop(9, layer_list=(8, 8)), "layer_list"),
        (PyramidDrop(layer_list=(8, 16), image_token_ratio_list=(0.5, 0.6)), "image_token_ratio"),
        (PyramidDrop(image_token_ratio_list=(0.5, 0.25)), "image_token_ratio_list"),
        (SparseVLM(Budget("count", 1), pruning_loc=(20,)), "budget"),
        (SparseVLM(Budget("count", 9), pruning_loc=(2, 31)), "pruning_loc"),
        (SparseVLM(sparse_token_list=(9, 8, 0)), "sparse_token_list"),
        (SparseVLM(9, noise=-1.0), "noise"),
        (SparseVLMv2(9, heads=0), "heads"),
        (Dart(9, layer=0), "layer"),
        (Dart(9, pivot_image_token=0, pivot_text_token=0), "pivot_image_token"),
        (Dart(9, pivot_text_token=-1), "pivot_text_token"),
        (TopV(9, layer=31), "layer"),
        (TopV(9, sigma=0.0), "sigma"),
        (TopV(9, beta=-1.0), "beta"),
        (VisionZip(Budget("count", 1)), "budget"),
        (VisionZip(Budget("count", 5), contextual=5), "contextual"),
        (PruMerge(Budget("adaptive"), neighbours=-1), "neighbours"),
        (HoloV(Budget("count", 4), crops=0), "crops"),
        (HoloV(Budget("count", 4), alpha=-1.0), "alpha"),
        (CDPruner(9, theta=1.0), "theta"),
        (CDPruner(9, relevance_weight=1.5), "relevance_weight"),
        (CDPruner(9, split_threshold=-1), "split_threshold"),
        (MMTok(9, alpha=-1.0), "alpha"),
        (MMTok(9, text_temperature=0.0), "text_temperature"),
        (MMTok(9, vision_temperature=0.0), "vision_temperature"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(pruner, option):
    with pytest.raises(ValueError, match=rf"^{pruner.name}: {option}.* is .*, expected "):
        pruner.check(DEEP, 9)


@pytest.mark.parametrize("kind", [Cls, VisionZip, PruMerge, HoloV])
def test_a_tower_without_attention_of_the_class_token_is_refused_by_name(kind):
    kind(Budget("count", 4)).check(SMALL, 9)
    with pytest.raises(ValueError, match=rf"^{kind.name}: .*\[CLS\] attention"):
        kind(Budget("count", 4)).check(NO_CLASS_TOKEN, 9)
