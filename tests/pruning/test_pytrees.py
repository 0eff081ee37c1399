"""A pruner is an argument of programs: what it is made of, and when a program is made again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_world import one_shot, stepprune
from views import select, view

from stepprune_jax.pruning import Budget, FastV, Grid
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import AutoSelect

UNTRAINED = [kind for kind in PRUNERS.values() if kind.config_type is None]
TRAINED = {"stepprune": stepprune, "autoselect": one_shot}


@pytest.mark.parametrize("kind", UNTRAINED)
def test_one_without_weights_has_no_leaves_and_is_its_own_key(kind):
    pruner = kind(Budget() if kind.budgets == ("all",) else 4)
    leaves, tree = jax.tree.flatten(pruner)
    assert leaves == [] and jax.tree.unflatten(tree, leaves) == pruner
    assert pruner.without_weights is pruner and {pruner: 1}[jax.tree.unflatten(tree, [])] == 1


@pytest.mark.parametrize("make", TRAINED.values(), ids=TRAINED)
def test_leaves_are_weights_statistics_and_stop_bias(make):
    pruner = make()
    named = jax.tree_util.tree_leaves_with_path(pruner)
    assert {path[0].name for path, _ in named} == {"params", "stats", "stop_bias"}
    parts = (pruner.params, pruner.stats, pruner.stop_bias)
    assert jax.tree.leaves(pruner) == jax.tree.leaves(parts)
    without_weights = pruner.without_weights
    assert jax.tree.leaves(without_weights) == []
    assert {without_weights: 1}[make(3).without_weights] == 1
    assert without_weights != pruner.with_budget(3).without_weights


def test_a_tree_of_anything_but_arrays_is_built_without_checks():
    axes = jax.tree.map(lambda leaf: None, stepprune(), is_leaf=lambda x: x is None)
    assert isinstance(axes, type(stepprune())) and axes.config == stepprune().config
    # A batch of policies, such as those of an ensemble.
    both = jax.tree.map(lambda *leaves: jnp.stack(list(leaves)), stepprune(1), stepprune(2))
    actual = jax.vmap(lambda policy: policy.params["stop"])(both)
    np.testing.assert_array_equal(actual[1], stepprune(2).params["stop"])


def counting():
    """A jitted function of a pruner, and how often it was traced."""
    traced = []

    @jax.jit
    def run(pruner, inputs):
        traced.append(pruner)
        return pruner.keep(inputs, 4).index

    return run, traced


def test_other_leaves_make_no_other_program_and_other_fields_do():
    random, (run, traced) = np.random.default_rng(0), counting()
    tokens, text = (random.normal(size=(3, n, d)).astype(np.float32) for n, d in ((9, 32), (2, 48)))
    inputs = view(tokens, count=3, text=text, text_valid=np.ones((3, 2), bool))
    policy = stepprune(max_steps=9)
    pruners = (policy, policy.replace(stop_bias=-1000.0), stepprune(2, max_steps=9))
    kept = [np.asarray(run(pruner.program(), inputs)) for pruner in pruners]
    assert len(traced) == 1 and not (kept[0] == kept[1]).all() and not (kept[0] == kept[2]).all()
    # Exact counts are read from the view: all of them share a program, beside that of a stop.
    for budget in (3, 2, "1/3"):
        run(policy.with_budget(budget).program(), inputs)
    assert len(traced) == 2
    run(policy.replace(group=2).program(), inputs)
    assert len(traced) == 3


def test_an_untrained_pruner_is_told_apart_by_its_fields():
    inputs, (run, traced) = view(np.ones((1, 9, 4)), count=4, grid=[[3, 3]]), counting()
    for pruner in (Grid(4), Grid(budget="4"), Grid("4/9")):
        index = run(pruner.program(), inputs)
        np.testing.assert_array_equal(index, select(Grid(4), inputs, 4).index)
    assert len(traced) == 1
    first, *changed = map(jax.tree.structure, (FastV(4), FastV("4"), FastV(5), FastV(4, layer=3)))
    assert [first == changed_pruner for changed_pruner in changed] == [True, False, False]


def test_a_policy_is_printed_in_one_line():
    policy = one_shot().replace(diversity=0.5, stop_bias=jnp.float32(1))
    weights = sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    fields = "feature_width=32, text_width=48, width=16, num_heads=2, mlp_ratio=2, encoder_layers=1"
    config = f"config=AutoSelectConfig({fields})"
    expected = f"AutoSelect(budget=1/3, {weights:,} weights, diversity=0.5, {config})"
    assert repr(policy.with_budget("1/3")) == expected
    empty = AutoSelect(config=policy.config)
    assert repr(empty) == f"AutoSelect(budget=unset, no weights, {config})"
    assert len(repr(stepprune())) < 300
