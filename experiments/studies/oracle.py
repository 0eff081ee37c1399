"""The oracle: tokens that are known to matter, which no method can know. It is not in `PRUNERS`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from stepprune_jax.pruning.base import Ranking, View
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.random import Random


@dataclasses.dataclass(frozen=True)
class Oracle(Random):
    """Keeps the tokens that an answer depends on, in their order, and then random ones.

    Attributes:
        seed: seed of the random tokens.
        known: fingerprint of the known tokens.
        tokens: [q, t] the known tokens of every question, padded with -1; see `make_oracle`.
    """

    known: str = ""
    tokens: Any = None

    name = "oracle"
    label = "oracle"
    version: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("tokens",)

    def rank(self, view: View, steps: int) -> Ranking:
        """Puts the known tokens of each row's question before the others."""
        known, n = jnp.asarray(self.tokens)[view.number], view.tokens.shape[1]
        hit = known[:, :, None] == jnp.arange(n)
        later = known.shape[1] + jnp.argsort(super().rank(view, n).order, axis=1)
        place = jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1), later)
        return Ranking(jnp.argsort(place, axis=1)[:, :steps].astype(jnp.int32))


def make_oracle(
    budget: Budget, relevant: Sequence[Sequence[int]], fingerprint: str, seed: int
) -> Oracle:
    """Builds the oracle of a set of questions from the known tokens of each, in their order."""
    known = np.full((len(relevant), max(1, *map(len, relevant))), -1, np.int32)
    for row, tokens in zip(known, relevant, strict=True):
        row[: len(tokens)] = tokens
    return Oracle(budget=budget, seed=seed, known=fingerprint, tokens=known)
