"""A uniform grid: tokens spread evenly over the image."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.ordering import require_grid


@dataclasses.dataclass(frozen=True)
class Grid(Pruner):
    """Keeps tokens spread evenly over rows and columns."""

    name = "grid"
    label = "grid"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models whose tokens are not on one grid."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps `view.count` tokens of each row."""
        order = grid_indices(view.grid, view.count, capacity)
        return take(view.whole, order, view.count, capacity)


def grid_indices(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], capacity: int
) -> Int[Array, "r k"]:
    """Spreads exactly `count` tokens evenly over each grid, in raster order.

    Lines are spread evenly over the height, and the tokens of each evenly over the width; where two
    columns are equally near, every other line takes the left one. Undefined past the count.
    """
    height, width = grid[:, :1], grid[:, 1:]
    line, lines, number, held = deal_lines(grid, count, jnp.arange(capacity)[None])
    row = (2 * line + 1) * height // (2 * lines)
    places = (2 * number + 1) * width
    # The nearest column, halves up or down: floor(x) and ceil(x) - 1 of x = place + 1/2.
    column = jnp.where(line % 2 == 0, places // (2 * held), -(-places // (2 * held)) - 1)
    return (row * width + column).astype(jnp.int32)


def deal_lines(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], slot: Int[Array, "#r k"]
) -> tuple[Int[Array, "r k"], Int[Array, "r 1"], Int[Array, "r k"], Int[Array, "r k"]]:
    """Deals `count` tokens to about sqrt(count height / width) lines, in shares as equal as can be.

    Returns the line of each slot, the number of lines, the slot's number in its line, and the
    number of tokens in its line.
    """
    height, width, count = (x[:, None] for x in (grid[:, 0], grid[:, 1], count))
    fewest = -(-count // width)
    wanted = jnp.round(jnp.sqrt(count * height / width)).astype(jnp.int32)
    lines = jnp.minimum(jnp.maximum(wanted, jnp.maximum(fewest, 1)), jnp.minimum(height, count))
    line = -(-(slot + 1) * lines // count) - 1
    first = count * line // lines
    held = jnp.maximum(count * (line + 1) // lines - first, 1)
    return line, lines, slot - first, held
