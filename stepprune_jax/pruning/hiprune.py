"""HiPrune: keeps the tokens that a middle block of the tower attends to, and their neighbors.

Liu et al. (https://arxiv.org/abs/2508.00553), following the authors' program. The score of a token
in a block is the attention that it receives, averaged over heads and over all tokens of the image.
*Anchors* are the best tokens of a block in the middle of the tower, which attends to objects.
*Buffers* are the four neighbors of each anchor. *Registers* are the best other tokens of the block
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
    """Keeps anchors with their neighbors, and registers.

    As in the authors' program, neighbors outside the sequence are replaced by the first or the
    last token, and a neighbor beyond the left or right border lies on the adjacent row. In tiles,
    a token at a border has no neighbor beyond it, because padding may lie there.

    Attributes:
        object_layer: number of the block that ranks anchors, from 1; None for the authors' choice,
            9 of 24 with a class token and 16 of 32 without one, or the same relative depth.
        alpha: fraction of the budget for anchors and their neighbors, in [0, 1].
    """

    object_layer: int | None = None
    alpha: float = 0.1

    name = "hiprune"
    label = "HiPrune"
    reads_videos: ClassVar[bool] = False
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

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps anchors, their neighbors and registers, in raster order.

        Args:
            inputs: inputs of the pruner. The taps are the attention that tokens receive in the
                block that ranks anchors and in the block that ranks registers, and the tile of each
                token if images are split into tiles.
            capacity: static size k of the result.

        Returns:
            The kept tokens.
        """
        object_attention, last_attention, *tile = inputs.taps  # `tile` has one array or none
        is_token = inputs.valid
        num_tiles = 1 + tile[0].max(1) if tile else jnp.ones(len(is_token), jnp.int32)
        tokens_per_tile = inputs.count // num_tiles
        # An anchor and its four neighbors take five tokens. `round` rounds halves to even.
        anchors_per_tile = jnp.round(tokens_per_tile * self.alpha / 5).astype(jnp.int32)
        num_anchors = num_tiles * anchors_per_tile
        anchor_order = by_score(object_attention, is_token)
        if tile:
            anchor_order = in_turns(anchor_order, *tile)
        anchor_rank = jnp.argsort(anchor_order, axis=1)
        is_anchor, columns = anchor_rank < num_anchors[:, None], inputs.grid[:, 1]
        if tile:
            is_near_anchor = with_neighbours_in_tiles(is_anchor, columns, *tile)
        else:
            is_near_anchor = with_neighbours(is_anchor, columns, is_token.sum(1))
        # Attention is at most 1, so adding 2 puts anchors and neighbors before registers.
        order = by_score(last_attention + 2 * is_near_anchor, is_token)
        order = in_turns(order, *tile) if tile else order
        return take(inputs.whole, order, inputs.count, capacity)


def with_neighbours(
    is_anchor: Bool[Array, "r n"], columns: Int[Array, "r"], num_tokens: Int[Array, "r"]
) -> Bool[Array, "r n"]:
    """Marks anchors and their left, right, upper and lower neighbors.

    As in the authors' program, the neighbors of token t are t - 1, t + 1, t - columns and
    t + columns. A neighbor before the first token is replaced by the first token, and a neighbor
    after the last token by the last token.

    Args:
        is_anchor: [r, n] True at the anchors of r images; False at padding.
        columns: [r] number of tokens in a row of each image.
        num_tokens: [r] number of tokens of each image; the remaining slots are padding.

    Returns:
        [r, n] True at anchors and neighbors.
    """
    token_index, last_token = jnp.arange(is_anchor.shape[1])[None], num_tokens[:, None] - 1
    is_marked = is_anchor
    for offset in (1, -1, columns[:, None], -columns[:, None]):
        source = token_index - offset
        is_inside = (source >= 0) & (source <= last_token)
        source = jnp.clip(source, 0, last_token)
        is_neighbour = is_inside & jnp.take_along_axis(is_anchor, source, axis=1)
        target = token_index + offset
        marks_first = jnp.any(is_anchor & (target < 0), axis=1, keepdims=True)
        marks_last = jnp.any(is_anchor & (target > last_token), axis=1, keepdims=True)
        is_marked |= is_neighbour
        is_marked |= marks_first & (token_index == 0)
        is_marked |= marks_last & (token_index == last_token)
    return is_marked


def with_neighbours_in_tiles(
    is_anchor: Bool[Array, "r n"], columns: Int[Array, "r"], tile: Int[Array, "r n"]
) -> Bool[Array, "r n"]:
    """Marks anchors and their left, right, upper and lower neighbors in the same tile.

    The tokens of an image are the tokens of a square overview, followed by the rows of a larger
    version of the image that is split into tiles. Each of these rows ends with a separator token.

    Args:
        is_anchor: [r, n] True at the anchors of r images.
        columns: [r] number of tokens in a row of the larger version, without the separator.
        tile: [r, n] tile of each token: 0 for the overview, -1 for separators and padding.

    Returns:
        [r, n] True at anchors and neighbors.
    """
    n = is_anchor.shape[1]
    token_index, in_overview = jnp.arange(n)[None], tile == 0
    overview_side = jnp.round(jnp.sqrt(in_overview.sum(1, keepdims=True))).astype(jnp.int32)
    row_stride = jnp.where(in_overview, overview_side, columns[:, None] + 1)
    is_marked = is_anchor
    for offset, is_horizontal in ((1, True), (-1, True), (row_stride, False), (-row_stride, False)):
        source = token_index - offset
        is_inside = (source >= 0) & (source < n)
        source = jnp.clip(source, 0, n - 1)
        is_adjacent = is_inside & (jnp.take_along_axis(tile, source, axis=1) == tile)
        if is_horizontal:
            # Rows of the overview have no separator, so the end of a row is checked.
            same_row = source // overview_side == token_index // overview_side
            is_adjacent &= ~in_overview | same_row
        is_marked |= is_adjacent & jnp.take_along_axis(is_anchor, source, axis=1)
    return is_marked & (tile >= 0)
