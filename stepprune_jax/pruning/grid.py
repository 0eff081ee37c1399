"""A uniform grid: keeps tokens that are spread evenly over the image."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.ordering import require_grid


@dataclasses.dataclass(frozen=True)
class Grid(Pruner):
    """Keeps tokens that are spread evenly over rows and columns."""

    name = "grid"
    label = "grid"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models that split images into tiles."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps `view.count` tokens of each row."""
        order = grid_indices(view.grid, view.count, capacity)
        return take(view.whole, order, view.count, capacity)


def grid_indices(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], capacity: int
) -> Int[Array, "r k"]:
    """Returns `count` tokens that are spread evenly over each grid, in raster order.

    Lines are spread evenly over the height, and the tokens of each line evenly over the width. If
    two columns are equally near, odd lines take the left column.

    Args:
        grid: [r, 2] rows and columns of each image.
        count: [r] number of tokens.
        capacity: k, the static size of the result.

    Returns:
        [r, k] int32 indices; undefined after the first `count` entries.
    """
    height, width = grid[:, :1], grid[:, 1:]
    line, num_lines, index_in_line, line_length = deal_lines(
        grid, count, jnp.arange(capacity)[None]
    )
    row = (2 * line + 1) * height // (2 * num_lines)
    numerator = (2 * index_in_line + 1) * width
    # The nearest column, rounding halves up or down: floor(x) or ceil(x) - 1 of x = position + 1/2.
    column = jnp.where(
        line % 2 == 0, numerator // (2 * line_length), -(-numerator // (2 * line_length)) - 1
    )
    return (row * width + column).astype(jnp.int32)


def deal_lines(
    grid: Int[Array, "r 2"], count: Int[Array, "r"], slot: Int[Array, "#r k"]
) -> tuple[Int[Array, "r k"], Int[Array, "r 1"], Int[Array, "r k"], Int[Array, "r k"]]:
    """Divides `count` tokens among about sqrt(count height / width) lines.

    The lengths of the lines differ by at most one.

    Args:
        grid: [r, 2] rows and columns of each image.
        count: [r] number of tokens.
        slot: [r or 1, k] indices of tokens, from 0.

    Returns:
        The line of each slot, the number of lines, the slot's index in its line, and the number of
        tokens in its line.
    """
    height, width, count = (x[:, None] for x in (grid[:, 0], grid[:, 1], count))
    min_lines = -(-count // width)
    ideal_lines = jnp.round(jnp.sqrt(count * height / width)).astype(jnp.int32)
    num_lines = jnp.minimum(
        jnp.maximum(ideal_lines, jnp.maximum(min_lines, 1)), jnp.minimum(height, count)
    )
    line = -(-(slot + 1) * num_lines // count) - 1
    first = count * line // num_lines
    line_length = jnp.maximum(count * (line + 1) // num_lines - first, 1)
    return line, num_lines, slot - first, line_length
