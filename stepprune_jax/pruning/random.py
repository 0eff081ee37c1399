"""Random tokens, the baseline that any method has to beat."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import by_score


@dataclasses.dataclass(frozen=True)
class Random(Ranker):
    """Keeps tokens drawn without replacement.

    Attributes:
        seed: seed of the draws. A row's draw depends only on the seed, its image and its question:
            neither on other rows nor on padding.
    """

    seed: int = 0

    name = "random"
    label = "random"
    is_random: ClassVar[bool] = True
    version: ClassVar[int] = 3

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row at random."""
        n = view.tokens.shape[1]
        draw = jax.vmap(lambda key: jax.random.uniform(key, (n,), jnp.float32))
        return Ranking(by_score(draw(view.keys(self.seed)), view.valid)[:, :steps])
