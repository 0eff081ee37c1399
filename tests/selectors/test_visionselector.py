import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from visual import noise

from stepprune_jax import load_policy, save_policy
from stepprune_jax.inference import RunOptions, generate, pipeline, read_request, trace_arrays
from stepprune_jax.policy import FeatureStats, Inputs, Progress
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import VisionSelector, VisionSelectorConfig
from stepprune_jax.selectors.visionselector import scores, soft_logits


def random_weights(d=6, h=3):
    random = np.random.default_rng(0)
    shapes = {"kernel": (d, h), "bias": (h,)}
    return {
        layer: {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        for layer in ("query", "key")
    }


def reference_scores(weights, tokens):
    """Computes scores from all pairs of query and key, like the authors' program, in float64."""
    tokens = np.float64(tokens)
    query, key = (tokens @ weights[x]["kernel"] + weights[x]["bias"] for x in ("query", "key"))
    return (query @ key.T / query.shape[1] ** 0.5).mean(1)


def test_scores_equal_the_reference_for_any_image_size():
    weights, sizes = random_weights(), (12, 1, 7)
    tokens = np.random.default_rng(1).standard_normal((3, 12, 6), np.float32)
    mask = np.arange(12) < np.array(sizes)[:, None]
    inputs = Inputs(np.where(mask[..., None], tokens, np.nan), image_mask=mask)
    actual = scores(weights, inputs)
    for row, size in enumerate(sizes):
        np.testing.assert_allclose(
            actual[row, :size], reference_scores(weights, tokens[row, :size]), atol=1e-5
        )
    # Statistics standardize the inputs of the scorer.
    stats = FeatureStats(jnp.full(6, 2.0), jnp.full(6, 4.0), jnp.float32(1))
    actual = scores(weights, Inputs(2 * tokens + 2, stats=stats))
    np.testing.assert_allclose(actual, scores(weights, Inputs(tokens)), rtol=1e-4, atol=1e-5)


def test_two_gates_equal_values_computed_by_hand():
    # sigmoid(a + t) + sigmoid(b + t) = 1 at t = -(a + b) / 2; with a - b = 2 ln 3 they are 3/4 and
    # 1/4, both of slope v = 3/16, so that d gate_a / d a = v - v^2 / 2v = 3/32.
    real, count = jnp.array([[True, True, False]]), jnp.array([1])

    def gates(score):
        return jax.nn.sigmoid(soft_logits(score, real, count))[0, :2]

    score = jnp.array([[5 + math.log(3), 5 - math.log(3), 99]])
    np.testing.assert_allclose(gates(score), [0.75, 0.25], atol=1e-6)
    slopes = jax.jit(jax.jacobian(gates))(score)[:, 0]
    expected = np.array([[1, -1, 0], [-1, 1, 0]]) * 3 / 32
    np.testing.assert_allclose(slopes, expected, atol=1e-6)


def test_gates_sum_to_the_count_with_finite_gradients():
    equal_scores, spread_scores = [0.0] * 5, [1e4, -1e4, 0, 1, 2]
    score, count = jnp.array([equal_scores, spread_scores] * 3), jnp.array([1, 1, 4, 4, 5, 5])

    def total(score):
        return jnp.sum(jax.nn.sigmoid(soft_logits(score, jnp.ones((6, 5), bool), count)), axis=1)

    slope = jax.jit(jax.jacobian(total))(score)
    np.testing.assert_allclose(total(score), count, atol=0.01)
    np.testing.assert_allclose(slope, 0, atol=1e-4)


def test_training_weighs_the_distance_of_gates_from_the_best():
    weights = random_weights()
    tokens = np.random.default_rng(2).standard_normal((2, 10, 6), np.float32)
    method = VisionSelector(config=VisionSelectorConfig(6, budget=0.25, reg_weight_end=3.1))

    def loss(weights, share):
        arguments = (Inputs(tokens), lambda gated: jnp.mean(gated**2), Progress(share))
        return method.replace(params=weights).loss(jax.random.key(0), *arguments)

    loss_and_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))

    gates, distance = [], 0
    for row in tokens:
        score = reference_scores(weights, row)
        low, high = -score.max() - 10, -score.min() + 10
        for _ in range(60):
            t = (low + high) / 2
            is_below = (1 / (1 + np.exp(-score - t))).sum() < 2  # a quarter of ten
            low, high = (t, high) if is_below else (low, t)
        gates.append(1 / (1 + np.exp(-score - t)))
        best = score >= np.sort(score)[-2]
        distance -= np.log(np.where(best, gates[-1], 1 - gates[-1])).mean() / 2
    lm_loss = np.mean((np.array(gates)[..., None] * tokens) ** 2)
    for share, weight in ((0.0, 0.1), (0.5, 1.6), (1.0, 3.1)):
        (value, (scalars, _)), grads = loss_and_grads(weights, share)
        assert float(scalars["lm_loss"]) == pytest.approx(lm_loss, rel=1e-4)
        assert float(value) == pytest.approx(lm_loss + weight * distance, rel=1e-4)
        assert scalars["k_mean"] == 2
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_width": 8}, "text_width is 8, expected 0"),
        ({"feature_width": 1}, "hidden_dim is None, expected a width"),
        ({"budget": 0}, "budget is 0, expected a share"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=f"VisionSelectorConfig.{message}"):
        VisionSelectorConfig(**fields)


def test_the_best_tokens_of_a_qwen_model_are_kept(qwen_model, tmp_path):
    image = noise(3, (60, 80))
    policy = VisionSelector(params=random_weights(48, 24), config=VisionSelectorConfig(48))
    policy = load_policy(save_policy(policy, tmp_path / "p"))
    images = pipeline.encode(qwen_model, read_request(qwen_model, ["two?"], [[image]]).images)
    size = int(images.sizes[0])
    score = reference_scores(policy.params, np.asarray(images.features)[0, :size])
    best = np.sort(np.argsort(-score, kind="stable")[: (size + 2) // 4])
    traces = []
    method = build_pruner("visionselector", "1/4", policy=policy)
    options = {"options": RunOptions(2), "trace": traces.append}
    (answer,) = generate(qwen_model, ["two?"], [[image]], method, **options)
    assert answer.kept == len(best)
    np.testing.assert_array_equal(trace_arrays(traces[0], 0)["kept_0"], best)
