"""A uniform grid: tokens spread evenly over the image."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from stepprune_jax.pruning.base import Kept, Params, Pruner, View, take


@dataclasses.dataclass(frozen=True)
class Grid(Pruner):
    """Keeps tokens spread evenly over rows and columns."""

    name = "grid"
    label = "grid"

    def select(self, params: Params, view: View, capacity: int) -> Kept:
        """Keeps `view.count` tokens of each row."""
        patches = view.grid[:, 0] * view.grid[:, 1]
        # A class token among the features comes first, and is the last to be kept.
        n = view.tokens.shape[1] if view.valid is None else view.valid.sum(1)
        extra = n - patches
        count = jnp.minimum(view.count, patches)
        order = extra[:, None] + grid_indices(view.grid, count, capacity)
        behind = jnp.arange(capacity) - count[:, None]
        order = jnp.where(behind < 0, order, behind)
        return take(view.tokens, order, view.count, capacity)


def grid_indices(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], capacity: int
) -> Int[Array, "r k"]:
    """Spreads exactly `count` tokens evenly over each grid, in raster order.

    About sqrt(k height / width) rows are used, spread evenly over the height. Each holds its share
    of the tokens (shares differ by at most one), spread evenly over the width; where two columns
    are equally near, every other row takes the left one. Undefined past the count.
    """
    height, width, count = (x[:, None] for x in (grid[:, 0], grid[:, 1], count))
    slot = jnp.arange(capacity)
    fewest = -(-count // width)
    wanted = jnp.round(jnp.sqrt(count * height / width)).astype(jnp.int32)
    lines = jnp.minimum(jnp.maximum(wanted, jnp.maximum(fewest, 1)), jnp.minimum(height, count))
    line = -(-(slot + 1) * lines // count) - 1
    first = count * line // lines
    held = jnp.maximum(count * (line + 1) // lines - first, 1)
    row = (2 * line + 1) * height // (2 * lines)
    places = (2 * (slot - first) + 1) * width
    # The nearest column, halves up or down: floor(x) and ceil(x) - 1 of x = place + 1/2.
    column = jnp.where(line % 2 == 0, places // (2 * held), -(-places // (2 * held)) - 1)
    return (row * width + column).astype(jnp.int32)
