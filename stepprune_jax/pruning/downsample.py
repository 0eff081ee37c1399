"""Downsampling: averages tokens over the cells of a coarser grid.

A baseline for pruning (https://arxiv.org/abs/2510.07143) is an equal number of tokens from a
smaller image. A tower with a fixed image size, such as LLaVA's, cannot read a smaller image, so its
tokens are averaged before the projector instead. A model for images of any size, such as
Qwen2.5-VL, can also be given fewer pixels (`--max_pixels`), which reduces the tower's work as well.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs
from stepprune_jax.pruning.grid import deal_lines
from stepprune_jax.pruning.ordering import require_grid


@dataclasses.dataclass(frozen=True)
class Downsample(Pruner):
    """Averages tokens over a grid with one cell per token of the budget.

    A budget of K tokens need not form a rectangle. The image is divided into about
    sqrt(K height / width) bands of equal height, whose numbers of cells differ by at most one. The
    cells of a band have equal width. A token that overlaps several cells contributes to each in
    proportion to the overlap. A cell takes the position of the token at its centre.
    """

    name = "downsample"
    label = "downsample"
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models that split images into tiles."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns the means of the cells in raster order."""
        n, cell, count = view.tokens.shape[1], jnp.arange(capacity)[None], view.count[:, None]
        height, width = view.grid[:, :1], view.grid[:, 1:]
        tokens = view.whole.astype(jnp.float32)
        if view.valid is not None:
            tokens = jnp.where(view.valid[..., None], tokens, 0)
        line, num_lines, column_in_line, line_length = deal_lines(view.grid, view.count, cell)
        row, column = (
            (2 * line + 1) * height // (2 * num_lines),
            (2 * column_in_line + 1) * width // (2 * line_length),
        )
        patch = jnp.arange(n)[None, None]
        overlap = _overlap(patch // width[..., None], line, num_lines, height)
        overlap *= _overlap(patch % width[..., None], column_in_line, line_length, width)
        weights = overlap / (height * width)[..., None]
        means = jnp.einsum("rkn,rnd->rkd", weights, tokens, precision=jax.lax.Precision.HIGHEST)
        valid = cell < count
        return Kept(
            index=jnp.full_like(row, -1),
            place=jnp.where(valid, row * width + column, 0),
            tokens=jnp.where(valid[..., None], means, 0).astype(view.tokens.dtype),
            valid=valid,
            count=view.count,
        )


def _overlap(
    token: Int[Array, "r 1 n"],
    cell: Int[Array, "r k"],
    num_cells: Int[Array, "r #k"],
    size: Int[Array, "r 1"],
) -> Int[Array, "r k n"]:
    """Returns the overlap of tokens and cells along an axis, in units of 1 / `num_cells` tokens."""
    cell, num_cells, size = (x[..., None] for x in (cell, num_cells, size))
    end = jnp.minimum((token + 1) * num_cells, (cell + 1) * size)
    return jnp.maximum(end - jnp.maximum(token * num_cells, cell * size), 0)
