"""Random weights and batches for the tests of the policy."""

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.policy import POINTER, Limits, PolicyConfig, Progress, gate, scores, selection
from stepprune_jax.policy.objective import total_loss
from stepprune_jax.policy.params import ParamSpec, param_specs
from stepprune_jax.policy.rollout import start_episode

# Without draws, annealing, probes and prices, each of which has tests of its own.
_PLAIN = dict(
    encoder_layers=1,
    draw=0.0,
    polarisation_temperature=0.3,
    polarisation_share=0.0,
    batch_budget="own",
    length_weight=0.3,
    price_range=0.0,
    price_growth=0.0,
)


def plain_config(**fields):
    """A policy with the readings that change nothing over the course of training."""
    return PolicyConfig(**(_PLAIN | fields))


def small_config(**fields):
    """A float64 policy of width 8, whose stop is differentiated all the way."""
    base = dict(
        feature_width=8, text_width=5, num_heads=2, mlp_ratio=2, dtype="float64", stop="aligned"
    )
    return plain_config(**(base | fields))


def small_literal(**fields):
    """The literal preset at the same size."""
    base = dict(feature_width=8, text_width=5, num_heads=2, mlp_ratio=2, dtype="float64")
    return PolicyConfig.literal(**(base | dict(encoder_layers=1) | fields))


def random_weights(rng, config, scale=0.5):
    """Every leaf random, also those that start at zero or one, as float64 numpy arrays."""

    def draw(spec):
        return (spec.init == "ones") + scale * rng.standard_normal(spec.shape)

    specs = param_specs(config)
    return jax.tree.map(draw, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def episode(
    params, config, memory, *, mask=None, stop_bias=0.0, decoder=POINTER, asked=0.0, **limits
):
    """An episode over a memory, rather than over inputs; `asked` is added to the first query."""
    run = start_episode(params, config, memory, mask, Limits(**limits), stop_bias, decoder)
    return run._replace(query=run.query + asked)


def select(params, config, memory, *, decoder=POINTER, loop=None, **given):
    """`select` over a memory; `loop` holds options of its loop."""
    run = episode(params, config, memory, decoder=decoder, **given)
    return selection.select_loop(params, config, run, decoder, **(loop or {}))


def select_parallel(params, config, memory, *, decoder=POINTER, **given):
    run = episode(params, config, memory, decoder=decoder, **given)
    return selection.select_parallel(params, config, run, decoder)


def pick(params, config, memory, *, decoder=POINTER, **given):
    run = episode(params, config, memory, decoder=decoder, **given)
    return selection.pick(params, config, run, decoder)


def rank(params, config, memory, *, decoder=POINTER, **given):
    run = episode(params, config, memory, decoder=decoder, **given)
    return selection.order(params, config, run, decoder)


def train_loss(params, config, key, inputs, lm_loss_fn, progress=Progress(), stop_bias=0.0):
    """`train_loss` at a stop bias."""
    gated = gate(params, config, key, inputs, progress, stop_bias=stop_bias)
    return total_loss(config, gated, lm_loss_fn(gated.tokens), config.length_weight), gated


def log_scores(prob, stop_prob, **options):
    """`scores.log_scores` of probabilities rather than of their logarithms."""
    some, sure = prob > 0, stop_prob >= 1
    log_prob = jnp.where(some, jnp.log(jnp.where(some, prob, 1)), -1e9)
    log_continue = jnp.where(sure, -1e9, jnp.log1p(-jnp.where(sure, 0, stop_prob)))
    return scores.log_scores(log_prob, log_continue, **options)


def random_mask(rng, b, size, share=0.7):
    return rng.random((b, size)) < share


def poison(rng, x, mask):
    """NaN, infinity or a huge value at padded positions."""
    trash = rng.choice([np.nan, np.inf, 1e30], size=x.shape)
    return np.where(mask[..., None], x, trash)


def weighted_sum(rng, tree):
    """A fixed random linear functional of all floating leaves of trees shaped like `tree`."""
    weights = [rng.standard_normal(np.shape(leaf)) for leaf in jax.tree.leaves(tree)]

    def functional(other):
        leaves = jax.tree.leaves(other)
        return sum(
            jnp.sum(w.astype(leaf.dtype) * leaf)
            for w, leaf in zip(weights, leaves, strict=True)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        )

    return functional


def assert_finite_differences(function, x, rng, *, gradient_of=None, rtol=1e-5, size=1e-5):
    """The gradient of `gradient_of` (default `function`) is the slope of `function` at `x`.

    Along three random directions, by central differences.
    """
    gradient = jax.jit(jax.grad(gradient_of or function))(x)
    function = jax.jit(function)
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), x)
        ahead, behind = (
            function(jax.tree.map(lambda leaf, step, s=s: leaf + s * size * step, x, direction))
            for s in (1, -1)
        )
        along = jax.tree.map(lambda g, step: np.sum(np.asarray(g) * step), gradient, direction)
        slope = (ahead - behind) / (2 * size)
        np.testing.assert_allclose(sum(jax.tree.leaves(along)), slope, rtol=rtol, atol=1e-7)


def assert_trees_close(actual, expected, relative):
    """Each leaf agrees to `relative` times the largest entry of that leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for mine, (path, theirs) in zip(jax.tree.leaves(actual), flat, strict=True):
        scale = np.max(np.abs(theirs), initial=0.0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=relative * scale + 1e-30, err_msg=name
        )
