"""HiPrune: what a middle block of the tower attends to, its neighbours, and what the last one does.

Liu et al. (https://arxiv.org/abs/2508.00553), following the authors' program. A token's score is
the attention that it receives in a block, averaged over heads and over all tokens of the image.
*Anchors* are the best by a block in the middle of the tower, which looks at objects; *buffers* are
the four neighbours of each; *registers*, the best of the rest by the block whose output is
projected, fill the budget. Where images are seen in tiles, this is done in each of them, with equal
shares.
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

    As in the authors' program, the neighbours before the first token and behind the last one are
    these two, and those beside a border are on the next row. In tiles there are none beyond a
    border, as padding may lie there.

    Attributes:
        object_layer: number of the block that finds anchors, from 1; None for the authors' choice,
            9 of 24 with a class token and 16 of 32 without one, or that share of another depth.
        alpha: share of the budget for anchors and their neighbours, in [0, 1].
    """

    object_layer: int | None = None
    alpha: float = 0.1

    name = "hiprune"
    label = "HiPrune"
    budgets: ClassVar[tuple[str, ...]] = EXACT
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects a block that does not attend to the whole image, and no share."""
        super().check(config, num_tokens)
        ranking_block(config, self.name)
        numbers = [block + 1 for block in config.global_blocks]
        fits = self.object_layer is None or self.object_layer in numbers
        self.expect("object_layer", fits, f"one of {', '.join(map(str, numbers))}")
        self.expect("alpha", 0 <= self.alpha <= 1, "a share in [0, 1]")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the attention received in both blocks, and the tiles of tokens, if any."""
        layer = self.object_layer
        if layer is None:
            share = 9 / 24 if config.received_block is None else 16 / 32
            wanted = round(share * config.vision.num_layers) - 1
            layer = 1 + min(config.global_blocks, key=lambda block: abs(block - wanted))
        deep = ranking_block(config, self.name)
        return Tap("received", layer - 1), Tap("received", deep), *tile_taps(config)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns the kept tokens in raster order."""
        shallow, deep, *tile = view.taps
        r, n = shallow.shape
        real = jnp.ones((r, n), bool) if view.valid is None else view.valid
        tiles = 1 + tile[0].max(1) if tile else jnp.ones(r, jnp.int32)
        share = view.count // tiles
        anchors = tiles * jnp.round(share * self.alpha / 5).astype(jnp.int32)  # halves to even
        order = by_score(shallow, real)
        rank = jnp.argsort(in_turns(order, *tile) if tile else order, axis=1)
        first, columns = rank < anchors[:, None], view.grid[:, 1]
        if tile:
            chosen = with_neighbours_in_tiles(first, columns, *tile)
        else:
            chosen = with_neighbours(first, columns, real.sum(1))
        # Attention is at most 1, so what has been chosen comes first.
        order = by_score(deep + 2 * chosen, real)
        order = in_turns(order, *tile) if tile else order
        return take(view.whole, order, view.count, capacity)


def with_neighbours(
    anchors: Bool[Array, "r n"], columns: Int[Array, "r"], size: Int[Array, "r"]
) -> Bool[Array, "r n"]:
    """Adds to some tokens of an image those left, right, above and below, within the image.

    Args:
        anchors: True = a token, among the first `size` of its row.
        columns: tokens in a row of its grid.
        size: tokens of its image.

    Returns:
        True = one of them or a neighbour; the first and the last token stand for those outside.
    """
    place, last = jnp.arange(anchors.shape[1])[None], size[:, None] - 1
    chosen = anchors
    for step in (1, -1, columns[:, None], -columns[:, None]):
        source = place - step
        inside = (source >= 0) & (source <= last)
        of_anchor = jnp.take_along_axis(anchors, jnp.clip(source, 0, last), axis=1) & inside
        target = place + step
        before = jnp.any(anchors & (target < 0), axis=1, keepdims=True)
        behind = jnp.any(anchors & (target > last), axis=1, keepdims=True)
        chosen |= of_anchor | (before & (place == 0)) | (behind & (place == last))
    return chosen


def with_neighbours_in_tiles(
    anchors: Bool[Array, "r n"], columns: Int[Array, "r"], tile: Int[Array, "r n"]
) -> Bool[Array, "r n"]:
    """Adds to some tokens those left, right, above and below that are of the same tile.

    Args:
        anchors: True = a token.
        columns: tokens in a row of all tiles, without its end.
        tile: tile of each token, 0 for the whole image, which is square; -1 for ends of rows and
            padding.

    Returns:
        True = one of them or a neighbour.
    """
    n = anchors.shape[1]
    place, whole = jnp.arange(n)[None], tile == 0
    side = jnp.round(jnp.sqrt(whole.sum(1, keepdims=True))).astype(jnp.int32)
    below, chosen = jnp.where(whole, side, columns[:, None] + 1), anchors
    for step in (1, -1, below, -below):
        source = place - step
        inside = (source >= 0) & (source < n)
        source = jnp.clip(source, 0, n - 1)
        same = inside & (jnp.take_along_axis(tile, source, axis=1) == tile)
        if isinstance(step, int):  # rows of the whole image have no end between them
            same &= ~whole | (source // side == place // side)
        chosen |= same & jnp.take_along_axis(anchors, source, axis=1)
    return chosen & (tile >= 0)
