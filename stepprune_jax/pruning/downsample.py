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
from stepprune_jax.pruning.grid import arrange_in_lines
from stepprune_jax.pruning.ordering import require_grid


@dataclasses.dataclass(frozen=True)
class Downsample(Pruner):
    """Averages tokens over a grid with one cell per token of the budget.

    A budget of K tokens need not form a rectangle. The image is divided into about
    sqrt(K height / width) bands of equal height, whose numbers of cells differ by at most one. The
    cells of a band have equal width. A token that overlaps several cells contributes to each in
    proportion to the overlap. A cell takes the position of the token at its center.
    """

    name = "downsample"
    label = "downsample"
    reads_videos: ClassVar[bool] = False
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models that split images into tiles."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Returns the mean token of each cell, cells in raster order.

        Args:
            inputs: inputs of the pruner; `inputs.count` is the number of cells of each image.
            capacity: static size k of the result.

        Returns:
            The means as tokens without an index, because no single token of the image is kept.
        """
        height, width = inputs.grid[:, :1], inputs.grid[:, 1:]
        tokens = inputs.whole.astype(jnp.float32)
        tokens = jnp.where(inputs.valid[..., None], tokens, 0)
        cell = jnp.arange(capacity)[None]
        # The line of a cell is the number of its band.
        band, num_bands, cell_in_band, cells_per_band = arrange_in_lines(
            inputs.grid, inputs.count, cell
        )
        token = jnp.arange(tokens.shape[1])[None, None]
        token_row, token_column = token // width[..., None], token % width[..., None]
        # Along each axis, overlaps are integers in units of 1 / (number of cells). A cell covers
        # height / num_bands x width / cells_per_band tokens, so its weights sum to 1.
        overlap = _overlap(token_row, band, num_bands, height)
        overlap *= _overlap(token_column, cell_in_band, cells_per_band, width)
        weights = overlap / (height * width)[..., None]
        means = jnp.einsum("rkn,rnd->rkd", weights, tokens, precision=jax.lax.Precision.HIGHEST)
        # The token at the center of the cell: floor((band + 1/2) * height / num_bands).
        center_row = (2 * band + 1) * height // (2 * num_bands)
        center_column = (2 * cell_in_band + 1) * width // (2 * cells_per_band)
        valid = cell < inputs.count[:, None]
        return Kept(
            index=jnp.full_like(center_row, -1),
            place=jnp.where(valid, center_row * width + center_column, 0),
            tokens=jnp.where(valid[..., None], means, 0).astype(inputs.tokens.dtype),
            valid=valid,
            count=inputs.count,
        )


def _overlap(
    token: Int[Array, "r 1 n"],
    cell: Int[Array, "r k"],
    num_cells: Int[Array, "r #k"],
    size: Int[Array, "r 1"],
) -> Int[Array, "r k n"]:
    """Returns the lengths of the overlaps of tokens and cells along one axis of the image.

    The axis has length `size` in tokens and is divided into `num_cells` equal cells.

    Args:
        token: [r, 1, n] coordinate of each token on the axis, from 0 to `size` - 1.
        cell: [r, k] coordinate of each cell on the axis, from 0 to `num_cells` - 1.
        num_cells: [r, k or 1] number of cells on the axis.
        size: [r, 1] number of tokens on the axis.

    Returns:
        [r, k, n] overlaps in units of 1 / `num_cells` tokens, so they are integers.
    """
    cell, num_cells, size = (x[..., None] for x in (cell, num_cells, size))
    # In this unit, a token spans `num_cells` and a cell spans `size`.
    start = jnp.maximum(token * num_cells, cell * size)
    end = jnp.minimum((token + 1) * num_cells, (cell + 1) * size)
    return jnp.maximum(end - start, 0)
