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
    return METHOD.init_params(jax.random.key(0))


@pytest.fixture(scope="module")
def inputs():
    image = jax.random.normal(jax.random.key(1), (B, N, 8))
    return image, jax.random.normal(jax.random.key(2), (B, L, 6))


def gated(params, inputs, mask=None, text_gate=1.0, key=3):
    mask = jnp.ones((B, N), bool) if mask is None else mask
    gate_inputs = Inputs(*inputs, mask, stats=STATS)
    return gate(params, CONFIG, jax.random.key(key), gate_inputs, Progress(1.0, text_gate))


def test_the_gates_sum_to_the_random_budget(params, inputs):
    mask = jnp.arange(N) < jnp.array([[N], [7], [5]])
    for key in range(5):
        result = gated(params, inputs, mask, key=key)
        np.testing.assert_allclose(result.alpha.sum(1), result.budget, rtol=1e-5)
        assert (result.alpha[~mask] == 0).all() and (result.tokens[~mask] == 0).all()
        real = np.asarray(mask.sum(1))
        assert (result.budget >= np.floor(0.2 * real)).all() and (result.budget >= 1).all()
        assert (result.budget <= np.ceil(0.6 * real)).all()


def test_the_gate_opens_a_sample_of_the_softmax(params, inputs):
    """The best noisy score is distributed like the softmax of the scores."""
    config = dataclasses.replace(CONFIG, draw=1.0)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (20_000, *x.shape[1:])), inputs)
    gate_inputs = Inputs(*copies, stats=STATS)
    result = gate(params, config, jax.random.key(0), gate_inputs, Progress())
    best = np.argmax(np.asarray(result.scores), axis=1)
    assert (result.alpha[np.arange(20_000), best] == result.alpha.max(1)).all()
    logits = np.asarray(scores(params, config, Inputs(*inputs, stats=STATS)))[0]
    np.testing.assert_allclose(np.bincount(best) / 20_000, jax.nn.softmax(logits), atol=0.02)


def test_diversity_changes_the_order_unless_it_is_zero(params, inputs):
    stats, sizes = jax.tree.map(np.asarray, STATS), [N, 7, 5]
    image = stats.mean + np.sqrt(stats.var) * np.asarray(inputs[0]) + 1
    mask = np.arange(N) < np.array(sizes)[:, None]
    order_inputs = Inputs(image, inputs[1], mask, stats=STATS)
    policy = AutoSelect(params=params, config=CONFIG, stats=STATS)
    ordered = jax.jit(lambda method: method.order(order_inputs, N).order)

    def order(diversity):
        method = build_pruner(policy=policy, budget=3, options={"diversity": diversity})
        return ordered(method)

    np.testing.assert_array_equal(order("0"), ordered(METHOD.replace(params=params)))
    order_with_diversity, share = order("0.3"), 0.3
    unit = (image - stats.mean) / np.sqrt(stats.var + 1e-6)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    score = np.asarray(scores(params, CONFIG, order_inputs))
    for row, size in enumerate(sizes):
        row_score = score[row, :size]
        remaining, chosen = {*range(size)}, [int(row_score.argmax())]
        while len(chosen) < size:
            remaining.discard(chosen[-1])
            relevance = (row_score - row_score.min()) / np.ptp(row_score)
            max_cosine = np.max(unit[row] @ unit[row][np.array(chosen)].T, axis=1)
            value = np.asarray((1 - share) * relevance - share * max_cosine[:size])
            chosen.append(max(remaining, key=value.__getitem__))
        assert order_with_diversity[row, :size].tolist() == chosen
    with pytest.raises(ValueError, match=r"autoselect: diversity is 1\.5"):
        order("1.5")


def test_the_temperature_is_a_cosine_and_then_constant():
    temperatures = [
        float(autoselect.temperature(CONFIG, share)) for share in (0.0, 0.125, 0.25, 0.5, 1.0)
    ]
    assert temperatures == pytest.approx([2.0, 1.05 + 0.95 / math.sqrt(2), 1.05, 0.1, 0.1])


def test_metrics_compare_the_gate_with_the_top_k():
    alpha = jnp.array([[0.9, 0.8, 0.2, 0.1]])
    scores = jnp.array([[3.0, 1.0, 2.0, 0.0]])
    gated_scores = autoselect.GatedByScores(jnp.zeros((1, 4, 1)), alpha, jnp.array([2]), scores)
    metrics = autoselect.metrics(
        gated_scores, alpha > 0
    )  # the hard set is {0, 2}, the open gate {0, 1}
    expected = {"k_mean": 2.0, "alpha_in": 0.55, "alpha_out": 0.45, "iou": 1 / 3}
    assert {k: pytest.approx(float(v)) for k, v in metrics.items()} == expected


def test_every_weight_learns_from_the_loss(params, inputs):
    # The denoiser starts as the identity: its inner weights need nonzero outer weights to learn.
    perturbed = jax.tree.map(lambda leaf: leaf + 0.1, params)

    def loss(params):
        weights = jax.random.normal(jax.random.key(9), (B, N, 8))
        arguments = (jax.random.key(3), Inputs(*inputs), lambda x: jnp.sum(jnp.sin(x) * weights))
        return METHOD.replace(params=params).loss(*arguments, Progress(0.5))

    grads, (metrics, _) = jax.jit(jax.grad(loss, has_aux=True))(perturbed)
    assert {"lm_loss", "k_mean", "alpha_in", "alpha_out", "iou"} == set(metrics)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def test_a_closed_text_gate_hides_the_question(params, inputs):
    other_question = (inputs[0], inputs[1] + 1)
    closed = [gated(params, pair, text_gate=0.0).scores for pair in (inputs, other_question)]
    np.testing.assert_allclose(*closed, atol=1e-6)
    opened = [gated(params, pair).scores for pair in (inputs, other_question)]
    assert np.abs(opened[0] - opened[1]).max() > 1e-3


def test_the_pruner_keeps_the_best_scores_with_any_padding(params, inputs):
    image, text = inputs
    valid = jnp.arange(N) < jnp.array([[N], [7], [5]])
    words = jnp.arange(L) < jnp.array([[L], [1], [2]])
    spoiled = jnp.where(valid[..., None], image, 1e6)
    counts, grid = jnp.array([3, 1, 5]), jnp.ones((B, 2), jnp.int32)
    seed = jnp.arange(B, dtype=jnp.uint32)
    view = PrunerInputs(spoiled, valid, grid, text, words, jnp.arange(B), seed, counts)
    pruner = AutoSelect(5, params=params, config=CONFIG, stats=STATS)
    kept = jax.jit(AutoSelect.keep, static_argnums=2)(pruner, view, 6)
    token_scores = scores(params, CONFIG, Inputs(image, text, valid, words, STATS))
    for row, count in enumerate([3, 1, 5]):
        best = np.sort(np.argsort(-np.asarray(token_scores[row]), kind="stable")[:count])
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
