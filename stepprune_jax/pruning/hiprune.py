"""HiPrune: keeps the tokens that a middle block of the tower attends to, and their neighbours.

Liu et al. (https://arxiv.org/abs/2508.00553), following the authors' program. The score of a token
in a block is the attention that it receives, averaged over heads and over all tokens of the image.
*Anchors* are the best tokens of a block in the middle of the tower, which attends to objects.
*Buffers* are the four neighbours of each anchor. *Registers* are the best other tokens of the block
whose output is projected; they fill the budget. If images are split into tiles, every tile keeps
an equal number of tokens.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import by_score, in_turns, ranking_block, tile_taps


@dataclasses.dataclass(frozen=True)
class HiPrune(Pruner):
    """Keeps anchors with their neighbours, and registers.

    As in the authors' program, neighbours outside the sequence are replaced by the first or the
    last token, and a neighbour beyond the left or right border lies on the adjacent row. In tiles,
    a token at a border has no neighbour beyond it, because padding may lie there.

    Attributes:
        object_layer: number of the block that ranks anchors, from 1; None for the authors' choice,
            9 of 24 with a class token and 16 of 32 without one, or the same relative depth.
        alpha: fraction of the budget for anchors and their neighbours, in [0, 1].
    """

    object_layer: int | None = None
    alpha: float = 0.1

    name = "hiprune"
    label = "HiPrune"
    budgets: ClassVar[tuple[str, ...]] = EXACT
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects a block without attention over the entire image, and an invalid alpha."""
        super().check(config, num_tokens)
        ranking_block(config, self.name)
        block_numbers = [block + 1 for block in config.global_blocks]
        is_valid = self.object_layer is None or self.object_layer in block_numbers
        self.expect("object_layer", is_valid, f"one of {', '.join(map(str, block_numbers))}")
        self.expect("alpha", 0 <= self.alpha <= 1, "a share in [0, 1]")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns taps of the attention received in both blocks, and of tiles if there are any."""
        layer = self.object_layer
        if layer is None:
            relative_depth = 9 / 24 if config.received_block is None else 16 / 32
            target_block = round(relative_depth * config.vision.num_layers) - 1
            layer = 1 + min(config.global_blocks, key=lambda block: abs(block - target_block))
        last_block = ranking_block(config, self.name)
        return Tap("received", layer - 1), Tap("received", last_block), *tile_taps(config)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps anchors, their neighbours and registers, in raster order."""
        object_attention, last_attention, *tile = view.taps
        r, n = object_attention.shape
        real = jnp.ones((r, n), bool) if view.valid is None else view.valid
        num_tiles = 1 + tile[0].max(1) if tile else jnp.ones(r, jnp.int32)
        tokens_per_tile = view.count // num_tiles
        # An anchor and its four neighbours take five tokens. `round` rounds halves to even.
        anchors_per_tile = jnp.round(tokens_per_tile * self.alpha / 5).astype(jnp.int32)
        num_anchors = num_tiles * anchors_per_tile
        order = by_score(object_attention, real)
        rank = jnp.argsort(in_turns(order, *tile) if tile else order, axis=1)
        is_anchor, columns = rank < num_anchors[:, None], view.grid[:, 1]
        if tile:
            chosen = with_neighbours_in_tiles(is_anchor, columns, *tile)
        else:
            chosen = with_neighbours(is_anchor, columns, real.sum(1))
        # Attention is at most 1, so adding 2 puts the chosen tokens first.
        order = by_score(last_attention + 2 * chosen, real)
        order = in_turns(order, *tile) if tile else order
        return take(view.whole, order, view.count, capacity)


def with_neighbours(
    anchors: Bool[Array, "r n"], columns: Int[Array, "r"], size: Int[Array, "r"]
) -> Bool[Array, "r n"]:
    """Marks anchors and their left, right, upper and lower neighbours.

    Args:
        anchors: [r, n] True at anchors, among the first `size` tokens of a row.
        columns: [r] number of tokens in a row of the grid.
        size: [r] number of tokens of the image.

    Returns:
        [r, n] True at anchors and neighbours. Neighbours outside the image are replaced by the
        first or the last token.
    """
    token_index, last_token = jnp.arange(anchors.shape[1])[None], size[:, None] - 1
    is_chosen = anchors
    for offset in (1, -1, columns[:, None], -columns[:, None]):
        source = token_index - offset
        is_inside = (source >= 0) & (source <= last_token)
        is_neighbour = (
            jnp.take_along_axis(anchors, jnp.clip(source, 0, last_token), axis=1) & is_inside
        )
        target = token_index + offset
        is_before_first = jnp.any(anchors & (target < 0), axis=1, keepdims=True)
        is_after_last = jnp.any(anchors & (target > last_token), axis=1, keepdims=True)
        is_chosen |= (
            is_neighbour
            | (is_before_first & (token_index == 0))
            | (is_after_last & (token_index == last_token))
        )
    return is_chosen


def with_neighbours_in_tiles(
    anchors: Bool[Array, "r n"], columns: Int[Array, "r"], tile: Int[Array, "r n"]
) -> Bool[Array, "r n"]:
    """Marks anchors and their left, right, upper and lower neighbours in the same tile.

    Args:
        anchors: [r, n] True at anchors.
        columns: [r] number of tokens in a row of all tiles, without the token that ends the row.
        tile: [r, n] tile of each token. Tile 0 is the overview of the image, which is square; -1
            marks ends of rows and padding.

    Returns:
        [r, n] True at anchors and neighbours.
    """
    n = anchors.shape[1]
    token_index, in_overview = jnp.arange(n)[None], tile == 0
    side = jnp.round(jnp.sqrt(in_overview.sum(1, keepdims=True))).astype(jnp.int32)
    row_stride, is_chosen = jnp.where(in_overview, side, columns[:, None] + 1), anchors
    for offset in (1, -1, row_stride, -row_stride):
        source = token_index - offset
        is_inside = (source >= 0) & (source < n)
        source = jnp.clip(source, 0, n - 1)
        same_tile = is_inside & (jnp.take_along_axis(tile, source, axis=1) == tile)
        if isinstance(offset, int):  # rows of the overview have no token between them
            same_tile &= ~in_overview | (source // side == token_index // side)
        is_chosen |= same_tile & jnp.take_along_axis(anchors, source, axis=1)
    return is_chosen & (tile >= 0)
