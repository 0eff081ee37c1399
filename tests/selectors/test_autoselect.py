import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import FeatureStats
from stepprune_jax.policy import Inputs, Progress
from stepprune_jax.pruning import PrunerInputs
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import AutoSelect, autoselect
from stepprune_jax.selectors.autoselect import AutoSelectConfig

CONFIG = AutoSelectConfig(
    feature_width=8,
    text_width=6,
    width=4,
    num_heads=2,
    mlp_ratio=1,
    encoder_layers=1,
    temperature_end=0.1,
    temperature_steps=0.5,
    random_budget=(0.2, 0.6),
    budget_anneal=0.0,
    draw=0.0,
)
B, N, L = 3, 10, 4
STATS = FeatureStats(jnp.arange(8.0), 1 + jnp.arange(8.0), jnp.float32(7))
METHOD = AutoSelect(config=CONFIG)
gate = jax.jit(autoselect.gate, static_argnames="config")
scores = jax.jit(autoselect.scores, static_argnames="config")


@pytest.fixture(scope="module")
def params():
    return METHOD.draw_params(jax.random.key(0))


@pytest.fixture(scope="module")
def inputs():
    image = jax.random.normal(jax.random.key(1), (B, N, 8))
    return image, jax.random.normal(jax.random.key(2), (B, L, 6))


def gated(params, inputs, mask=None, text_gate=1.0, key=3):
    mask = jnp.ones((B, N), bool) if mask is None else mask
    given = Inputs(*inputs, mask, stats=STATS)
    return gate(params, CONFIG, jax.random.key(key), given, Progress(1.0, text_gate))


def test_the_gate_holds_the_drawn_budget(params, inputs):
    mask = jnp.arange(N) < jnp.array([[N], [7], [5]])
    for key in range(5):
        found = gated(params, inputs, mask, key=key)
        np.testing.assert_allclose(found.alpha.sum(1), found.budget, rtol=1e-5)
        assert (found.alpha[~mask] == 0).all() and (found.tokens[~mask] == 0).all()
        real = np.asarray(mask.sum(1))
        assert (found.budget >= np.floor(0.2 * real)).all() and (found.budget >= 1).all()
        assert (found.budget <= np.ceil(0.6 * real)).all()


def test_the_gate_opens_a_draw(params, inputs):
    """The k best of scores plus Gumbel noise, whose softmax has the scores' temperature."""
    config = dataclasses.replace(CONFIG, draw=1.0)
    twins = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (20_000, *x.shape[1:])), inputs)
    given = Inputs(*twins, stats=STATS)
    found = gate(params, config, jax.random.key(0), given, Progress())
    best = np.argmax(np.asarray(found.scores), axis=1)
    assert (found.alpha[np.arange(20_000), best] == found.alpha.max(1)).all()
    still = np.asarray(scores(params, config, Inputs(*inputs, stats=STATS)))[0]
    np.testing.assert_allclose(np.bincount(best) / 20_000, jax.nn.softmax(still), atol=0.02)


def test_diversity_is_an_option_that_changes_nothing_at_zero(params, inputs):
    stats, sizes = jax.tree.map(np.asarray, STATS), [N, 7, 5]
    image = stats.mean + np.sqrt(stats.var) * np.asarray(inputs[0]) + 1
    mask = np.arange(N) < np.array(sizes)[:, None]
    given = Inputs(image, inputs[1], mask, stats=STATS)
    policy = AutoSelect(params=params, config=CONFIG, stats=STATS)
    ordered = jax.jit(lambda method: method.order(given, N).order)

    def order(diversity):
        method = build_pruner(policy=policy, budget=3, options={"diversity": diversity})
        return ordered(method)

    np.testing.assert_array_equal(order("0"), ordered(METHOD.replace(params=params)))
    found, share = order("0.3"), 0.3
    unit = (image - stats.mean) / np.sqrt(stats.var + 1e-6)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    score = np.asarray(scores(params, CONFIG, given))
    for row, size in enumerate(sizes):
        own = score[row, :size]
        left, taken = {*range(size)}, [int(own.argmax())]
        while len(taken) < size:
            left.discard(taken[-1])
            relevance = (own - own.min()) / np.ptp(own)
            nearest = np.max(unit[row] @ unit[row][np.array(taken)].T, axis=1)
            value = np.asarray((1 - share) * relevance - share * nearest[:size])
            taken.append(max(left, key=value.__getitem__))
        assert found[row, :size].tolist() == taken
    with pytest.raises(ValueError, match=r"autoselect: diversity is 1\.5"):
        order("1.5")


def test_the_temperature_is_a_cosine_and_then_constant():
    found = [float(autoselect.temperature(CONFIG, share)) for share in (0.0, 0.125, 0.25, 0.5, 1.0)]
    assert found == pytest.approx([2.0, 1.05 + 0.95 / math.sqrt(2), 1.05, 0.1, 0.1])


def test_metrics_say_how_hard_the_gate_is():
    alpha = jnp.array([[0.9, 0.8, 0.2, 0.1]])
    scores = jnp.array([[3.0, 1.0, 2.0, 0.0]])
    known = autoselect.GatedByScores(jnp.zeros((1, 4, 1)), alpha, jnp.array([2]), scores)
    found = autoselect.metrics(known, alpha > 0)  # the hard set is {0, 2}, the open gate {0, 1}
    expected = {"k_mean": 2.0, "alpha_in": 0.55, "alpha_out": 0.45, "iou": 1 / 3}
    assert {k: pytest.approx(float(v)) for k, v in found.items()} == expected


def test_every_weight_learns_from_the_loss(params, inputs):
    # The denoiser starts as the identity: its inner weights learn once the outer ones are moved.
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)

    def loss(params):
        weights = jax.random.normal(jax.random.key(9), (B, N, 8))
        given = (jax.random.key(3), Inputs(*inputs), lambda x: jnp.sum(jnp.sin(x) * weights))
        return METHOD.replace(params=params).loss(*given, Progress(0.5))

    grads, (metrics, _) = jax.jit(jax.grad(loss, has_aux=True))(moved)
    assert {"lm_loss", "k_mean", "alpha_in", "alpha_out", "iou"} == set(metrics)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def test_a_closed_text_gate_hides_the_question(params, inputs):
    other = (inputs[0], inputs[1] + 1)
    closed = [gated(params, pair, text_gate=0.0).scores for pair in (inputs, other)]
    np.testing.assert_allclose(*closed, atol=1e-6)
    opened = [gated(params, pair).scores for pair in (inputs, other)]
    assert np.abs(opened[0] - opened[1]).max() > 1e-3


def test_the_pruner_keeps_what_is_scored_best_whatever_stands_in_the_padding(params, inputs):
    image, text = inputs
    valid = jnp.arange(N) < jnp.array([[N], [7], [5]])
    words = jnp.arange(L) < jnp.array([[L], [1], [2]])
    spoiled = jnp.where(valid[..., None], image, 1e6)
    counts, grid = jnp.array([3, 1, 5]), jnp.ones((B, 2), jnp.int32)
    seed = jnp.arange(B, dtype=jnp.uint32)
    view = PrunerInputs(spoiled, valid, grid, text, words, jnp.arange(B), seed, counts)
    pruner = AutoSelect(5, params=params, config=CONFIG, stats=STATS)
    kept = jax.jit(AutoSelect.keep, static_argnums=2)(pruner, view, 6)
    scored = scores(params, CONFIG, Inputs(image, text, valid, words, STATS))
    for row, count in enumerate([3, 1, 5]):
        best = np.sort(np.argsort(-np.asarray(scored[row]), kind="stable")[:count])
        np.testing.assert_array_equal(kept.index[row], [*best, *[-1] * (6 - count)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature_end": 0.0}, r"AutoSelectConfig.temperature_end is 0.0, expected a positive"),
        ({"num_heads": 3}, r"AutoSelectConfig.num_heads is 3, expected a divisor"),
        ({"random_budget": (0.5, 0.1)}, "AutoSelectConfig.random_budget"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        AutoSelectConfig(**{"feature_width": 8, "num_heads": 2, **fields})
