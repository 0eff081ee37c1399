"""Random weights and batches for the tests of the policy."""

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.policy import POINTER, Limits, PolicyConfig, Progress, gate, scores, selection
from stepprune_jax.policy.objective import total_loss
from stepprune_jax.policy.params import ParamSpec, param_specs
from stepprune_jax.policy.rollout import start_episode

# No sampling, annealing, probes or random prices: other tests cover these.
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
    """Returns a configuration whose behavior does not depend on training progress."""
    return PolicyConfig(**(_PLAIN | fields))


def small_config(**fields):
    """Returns a float64 configuration of width 8, whose stop has gradients to all weights."""
    base = dict(
        feature_width=8, text_width=5, num_heads=2, mlp_ratio=2, dtype="float64", stop="aligned"
    )
    return plain_config(**(base | fields))


def small_literal(**fields):
    """Returns the literal configuration at the same size."""
    base = dict(feature_width=8, text_width=5, num_heads=2, mlp_ratio=2, dtype="float64")
    return PolicyConfig.literal(**(base | dict(encoder_layers=1) | fields))


def random_weights(rng, config, scale=0.5):
    """Returns random float64 weights, also for leaves that are initialized to zero or one."""

    def random_leaf(spec):
        return (spec.init == "ones") + scale * rng.standard_normal(spec.shape)

    specs = param_specs(config)
    return jax.tree.map(random_leaf, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def episode(
    params, config, memory, *, mask=None, stop_bias=0.0, decoder=POINTER, question=0.0, **limits
):
    """Prepares an episode over a memory; `question` is added to the first query."""
    prepared = start_episode(
        params, config, memory, mask, Limits(**limits), stop_bias=stop_bias, decoder=decoder
    )
    return prepared._replace(query=prepared.query + question)


def select(params, config, memory, *, decoder=POINTER, loop=None, **options):
    """Runs `select_loop` over a memory; `loop` holds options of the loop."""
    prepared = episode(params, config, memory, decoder=decoder, **options)
    return selection.select_loop(params, config, prepared, decoder, **(loop or {}))


def select_parallel(params, config, memory, *, decoder=POINTER, **options):
    prepared = episode(params, config, memory, decoder=decoder, **options)
    return selection.select_parallel(params, config, prepared, decoder)


def pick(params, config, memory, *, decoder=POINTER, **options):
    prepared = episode(params, config, memory, decoder=decoder, **options)
    return selection.choose_tokens(params, config, prepared, decoder)


def rank(params, config, memory, *, decoder=POINTER, **options):
    prepared = episode(params, config, memory, decoder=decoder, **options)
    return selection.rank_tokens(params, config, prepared, decoder)


def train_loss(params, config, key, inputs, lm_loss_fn, progress=Progress(), stop_bias=0.0):
    """Computes `train_loss` with a stop bias."""
    gated = gate(params, config, key, inputs, progress, stop_bias=stop_bias)
    return total_loss(config, gated, lm_loss_fn(gated.tokens), config.length_weight), gated


def log_scores(prob, stop_prob, **options):
    """Computes `scores.log_scores` from probabilities."""
    is_possible, is_certain_stop = prob > 0, stop_prob >= 1
    log_prob = jnp.where(is_possible, jnp.log(jnp.where(is_possible, prob, 1)), -1e9)
    log_continue = jnp.where(
        is_certain_stop, -1e9, jnp.log1p(-jnp.where(is_certain_stop, 0, stop_prob))
    )
    return scores.log_scores(log_prob, log_continue, **options)


def random_mask(rng, b, size, share=0.7):
    return rng.random((b, size)) < share


def poison(rng, x, mask):
    """Replaces padded positions by NaN, infinity or huge values."""
    garbage = rng.choice([np.nan, np.inf, 1e30], size=x.shape)
    return np.where(mask[..., None], x, garbage)


def weighted_sum(rng, tree):
    """Returns a random linear functional of the floating leaves of trees shaped like `tree`."""
    weights = [rng.standard_normal(np.shape(leaf)) for leaf in jax.tree.leaves(tree)]

    def functional(values):
        leaves = jax.tree.leaves(values)
        return sum(
            jnp.sum(w.astype(leaf.dtype) * leaf)
            for w, leaf in zip(weights, leaves, strict=True)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        )

    return functional


def assert_finite_differences(function, x, rng, *, gradient_of=None, rtol=1e-5, size=1e-5):
    """Asserts that a gradient equals central differences along three random directions.

    The gradient of `gradient_of` (default `function`) is compared with `function` at `x`.
    """
    gradient = jax.jit(jax.grad(gradient_of or function))(x)
    function = jax.jit(function)
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), x)
        ahead, behind = (
            function(jax.tree.map(lambda leaf, step, s=s: leaf + s * size * step, x, direction))
            for s in (1, -1)
        )
        directional = jax.tree.map(
            lambda g, step: np.sum(np.asarray(g) * step), gradient, direction
        )
        slope = (ahead - behind) / (2 * size)
        np.testing.assert_allclose(sum(jax.tree.leaves(directional)), slope, rtol=rtol, atol=1e-7)


def assert_trees_close(actual, expected, relative):
    """Asserts that leaves agree within `relative` times the largest entry of the leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for leaf, (path, expected_leaf) in zip(jax.tree.leaves(actual), flat, strict=True):
        scale = np.max(np.abs(expected_leaf), initial=0.0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            leaf, expected_leaf, rtol=0, atol=relative * scale + 1e-30, err_msg=name
        )
