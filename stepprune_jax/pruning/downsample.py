"""Downsampling: a coarser grid of tokens, each the mean of an area of the image.

The baseline that pruning has to beat (https://arxiv.org/abs/2510.07143): as many tokens of a
smaller image. A tower for one image size, such as LLaVA's, takes no smaller image; here its tokens
are averaged instead, before the projector. A model for any size, such as Qwen2.5-VL, can also be
given fewer pixels (`--max_pixels`), which spares its tower work too.
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
    """Averages tokens over a grid of as many cells as the budget says.

    K cells need not be a rectangle: about sqrt(K height / width) bands of equal height hold them,
    in shares that differ by at most one, and the cells of a band are of equal width. A token that a
    border cuts through counts in proportion to its area in the cell. A cell has the position of the
    token at its centre.
    """

    name = "downsample"
    label = "downsample"
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models whose tokens are not on one grid."""
        super().check(config, num_tokens)
        require_grid(config, self.name)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns the means of the cells in raster order."""
        n, slot, count = view.tokens.shape[1], jnp.arange(capacity)[None], view.count[:, None]
        height, width = view.grid[:, :1], view.grid[:, 1:]
        tokens = view.whole.astype(jnp.float32)
        if view.valid is not None:
            tokens = jnp.where(view.valid[..., None], tokens, 0)
        line, lines, number, held = deal_lines(view.grid, view.count, slot)
        row, column = (2 * line + 1) * height // (2 * lines), (2 * number + 1) * width // (2 * held)
        patch = jnp.arange(n)[None, None]
        area = _overlap(patch // width[..., None], line, lines, height)
        area *= _overlap(patch % width[..., None], number, held, width)
        weights = area / (height * width)[..., None]
        means = jnp.einsum("rkn,rnd->rkd", weights, tokens, precision=jax.lax.Precision.HIGHEST)
        valid = slot < count
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
    cells: Int[Array, "r #k"],
    size: Int[Array, "r 1"],
) -> Int[Array, "r k n"]:
    """Returns the part of each token in a cell of so many along an axis, times their number."""
    cell, cells, size = (x[..., None] for x in (cell, cells, size))
    end = jnp.minimum((token + 1) * cells, (cell + 1) * size)
    return jnp.maximum(end - jnp.maximum(token * cells, cell * size), 0)
