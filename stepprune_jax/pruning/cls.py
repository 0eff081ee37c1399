"""[CLS] attention: the patches that the tower's class token attends to most."""

import dataclasses

import jax.numpy as jnp

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import by_score, class_token_block, in_turns, tile_taps


@dataclasses.dataclass(frozen=True)
class Cls(Ranker):
    """Keeps the patches that the class token attends to most, averaged over heads.

    The attention is that of the block whose output the model projects. Where images are seen in
    tiles, each is ranked by its own class token, and all have equal shares.
    """

    name = "cls"
    label = "[CLS] top-K"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects models without a class token."""
        super().check(config, num_tokens)
        class_token_block(config, self.name)

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the class token's row of attention."""
        return Tap("attention", class_token_block(config, self.name)), *tile_taps(config)

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders patches by attention."""
        attention, *tile = view.taps
        order = by_score(jnp.mean(attention.astype(jnp.float32), axis=1)[:, 1:], view.valid)
        return Ranking((in_turns(order, *tile) if tile else order)[:, :steps])
