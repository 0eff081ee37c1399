"""No visual tokens: the model answers from the question only."""

from typing import ClassVar

import jax.numpy as jnp

from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs


class Blind(Pruner):
    """Keeps no token.

    Its answers show how much of a benchmark the image decides. A table compares methods by the
    share of the image's gain that they keep.
    """

    name = "blind"
    label = "no image"
    budgets: ClassVar[tuple[str, ...]] = ("none",)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps no token: all slots are padding. The capacity may be 0."""
        r, _, width = inputs.whole.shape
        index = jnp.full((r, capacity), -1, jnp.int32)
        return Kept(
            index=index,
            place=jnp.zeros_like(index),
            tokens=jnp.zeros((r, capacity, width), inputs.tokens.dtype),
            valid=jnp.zeros((r, capacity), bool),
            count=jnp.zeros(r, jnp.int32),
        )
