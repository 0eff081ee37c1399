"""HiPrune: what a middle block of the tower attends to, its neighbours, and what the last one does.

Liu et al. (https://arxiv.org/abs/2508.00553), following the authors' program. A token's score is
the attention that it receives in a block, averaged over heads and over all tokens of the image.
*Anchors* are the best by a block in the middle of the tower, which looks at objects; *buffers* are
the four neighbours of each; *registers*, the best of the rest by the block whose output is
projected, fill the budget.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, View, take
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import by_score, ranking_block, require_grid


@dataclasses.dataclass(frozen=True)
class HiPrune(Pruner):
    """Keeps anchors with their neighbours, and registers.

    As in the authors' program, the neighbours before the first token and behind the last one are
    these two, and those beside a border are on the next row.

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
        require_grid(config, self.name)
        ranking_block(config, self.name)
        numbers = [block + 1 for block in config.global_blocks]
        fits = self.object_layer is None or self.object_layer in numbers
        self.expect("object_layer", fits, f"one of {', '.join(map(str, numbers))}")
        self.expect("alpha", 0 <= self.alpha <= 1, "a share in [0, 1]")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the attention received in both blocks."""
        layer = self.object_layer
        if layer is None:
            share = 9 / 24 if config.received_block is None else 16 / 32
            wanted = round(share * config.vision.num_layers) - 1
            layer = 1 + min(config.global_blocks, key=lambda block: abs(block - wanted))
        deep = ranking_block(config, self.name)
        return Tap("received", layer - 1), Tap("received", deep)

    def keep(self, view: View, capacity: int) -> Kept:
        """Returns the kept tokens in raster order."""
        shallow, deep = view.taps
        r, n = shallow.shape
        real = jnp.ones((r, n), bool) if view.valid is None else view.valid
        anchors = jnp.round(view.count * self.alpha / 5).astype(jnp.int32)  # halves to even
        rank = jnp.argsort(by_score(shallow, real), axis=1)
        chosen = with_neighbours(rank < anchors[:, None], view.grid[:, 1], real.sum(1))
        # Attention is at most 1, so what has been chosen comes first.
        order = by_score(deep + 2 * chosen, real)
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
