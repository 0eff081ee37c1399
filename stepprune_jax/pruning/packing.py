"""From selected indices to the kept tokens of a pruner."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stepprune_jax.models.sequence import Kept
from stepprune_jax.policy import Picks, gather
from stepprune_jax.policy.selection import first_picks


def take(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """Gathers the first `count` tokens of an order, without the order, for a set-valued method.

    See `take_first` for the arguments. `Kept.order` of the result is None.
    """
    return take_first(tokens, order, count, capacity)._replace(order=None)


def take_first(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """Gathers the first `count` tokens of an order, in raster order.

    Args:
        tokens: [r, n, d] tokens of each row's image.
        order: [r, t] int32 indices of tokens in the order of selection.
        count: [r] int32 number of tokens to keep.
        capacity: static size k of the result; tokens beyond it are dropped.

    Returns:
        The kept tokens.
    """
    return from_picks(tokens, first_picks(order, count, tokens.shape[1]), capacity)


def from_picks(tokens: Float[Array, "r n d"], picks: Picks, capacity: int) -> Kept:
    """Gathers the tokens that a policy selected, in raster order.

    Args:
        tokens: [r, n, d] n tokens of each row's image.
        picks: actions of the policy in the order of selection: token indices, or n for the stop.
        capacity: static size k of the result; tokens beyond it are dropped.

    Returns:
        The kept tokens, with their order of selection.
    """
    order = jnp.where(picks.action < tokens.shape[1], picks.action, -1)[:, :capacity]
    index, tokens, valid, count = gather(picks, tokens, capacity)
    return Kept(index, jnp.maximum(index, 0), tokens, valid, count, order)
