"""Random tokens: a baseline for all methods."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import by_score


@dataclasses.dataclass(frozen=True)
class Random(Ranker):
    """Keeps tokens that are sampled without replacement.

    Attributes:
        seed: seed of the random order. The order of a row depends only on the seed, its image and
            its question, but not on other rows or padding.
    """

    seed: int = 0

    name = "random"
    label = "random"
    is_random: ClassVar[bool] = True
    version: ClassVar[int] = 3

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row at random."""
        n = inputs.tokens.shape[1]
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (n,), jnp.float32))
        return Ranking(by_score(uniform(inputs.keys(self.seed)), inputs.valid)[:, :steps])
