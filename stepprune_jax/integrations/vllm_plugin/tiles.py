"""Order of the visual tokens of LLaVA-NeXT: patches of tiles, with a newline after each row."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.models.llava_next import LlavaNext
from stepprune_jax.models.llava_next.images import Tiles, best_size, unpadded_grid


class TileLayout(NamedTuple):
    """The tokens of an image of LLaVA-NeXT.

    Attributes:
        patch: [n] index of each token's patch, counted over all tiles of the image.
        is_patch: [n] False for newlines.
        grid: rows and columns of the patches of all tiles, without padding.
        num_patches: number of patches of a tile.
    """

    patch: Int[np.ndarray, "n"]
    is_patch: Bool[np.ndarray, "n"]
    grid: tuple[int, int]
    num_patches: int


def lay_out_tiles(backbone: LlavaNext, height: int, width: int) -> TileLayout:
    """Returns the tokens of an image with this height and width in pixels."""
    config = backbone.config
    side, patches_per_side = config.vision.image_size, config.grid[0]
    tile_rows, tile_columns = (length // side for length in best_size(height, width, config.sizes))
    grid = unpadded_grid(
        height, width, tile_rows * patches_per_side, tile_columns * patches_per_side
    )
    num_tokens = int(backbone.num_tokens(np.array(grid)))
    shape = 1, 1 + tile_rows * tile_columns, 3, side, side
    pixels = Tiles(
        jax.ShapeDtypeStruct(shape, np.uint8),  # only the number of tiles is read
        np.array([grid], np.int32),
        np.array([[tile_rows, tile_columns]], np.int32),
    )
    patch, is_patch = map(np.asarray, backbone.source_patches(pixels))
    return TileLayout(
        patch[0, :num_tokens], is_patch[0, :num_tokens], grid, config.vision.num_patches
    )
