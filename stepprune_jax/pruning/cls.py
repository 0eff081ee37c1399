"""[CLS] attention: keeps the patches with the largest attention of the tower's class token."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import by_score, class_token_block, in_turns, tile_taps


@dataclasses.dataclass(frozen=True)
class Cls(Ranker):
    """Keeps the patches with the largest attention of the class token, averaged over heads.

    The attention is taken from the block whose output the model projects. If images are split into
    tiles, each tile is ranked by its class token, and all tiles keep equally many tokens.
    """

    name = "cls"
    label = "[CLS] top-K"
    reads_videos: ClassVar[bool] = False

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models without a class token."""
        super().check(config, num_tokens)
        class_token_block(config, self.name)

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the tap of the class token's attention, and of the tiles if there are any."""
        return Tap("attention", class_token_block(config, self.name)), *tile_taps(config)

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders patches by attention."""
        attention, *tile = inputs.taps
        order = by_score(jnp.mean(attention.astype(jnp.float32), axis=1)[:, 1:], inputs.valid)
        return Ranking((in_turns(order, *tile) if tile else order)[:, :steps])
