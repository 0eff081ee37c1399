"""Length penalty and total loss, Eq. (15)."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax.policy.checks import AnyArray, checked


@checked
def length_penalty(
    count: Int[AnyArray, "b"],
    expected: Float[AnyArray, "b"],
    num_tokens: ArrayLike,
    *,
    price: Float[AnyArray, "b"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of K/N, with the gradient of E[K]/N.

    The hard count has no gradient; the expected one carries it through every stop probability.

    Args:
        count: K, hard.
        expected: E[K] from `expected_count`.
        num_tokens: N, a number or one per row.
        price: factor on each row's share, 1 by default.
    """
    expected = jnp.asarray(expected)
    soft = jnp.asarray(count) + (expected - jax.lax.stop_gradient(expected))
    ratio = soft / jnp.maximum(jnp.asarray(num_tokens, soft.dtype), 1)
    return jnp.mean(ratio if price is None else ratio * jnp.asarray(price))


def total_loss(
    lm_loss: Float[Array, ""], penalty: Float[Array, ""], length_weight: ArrayLike
) -> Float[Array, ""]:
    """L = L_LM + lambda K/N, Eq. (15), in at least float32."""
    wide = jnp.promote_types(jnp.float32, lm_loss.dtype)
    return lm_loss.astype(wide) + length_weight * penalty.astype(wide)
