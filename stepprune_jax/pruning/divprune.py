"""DivPrune: tokens as far from one another as possible.

Alvar et al. (https://arxiv.org/abs/2503.02175). The distance of two projected tokens is one minus
the cosine between them. The first token chosen is the one whose nearest neighbour is farthest;
each further one is the token whose nearest chosen token is farthest.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import map_tokens, unit_vectors

_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class DivPrune(Ranker):
    """Keeps tokens whose smallest distance is large, chosen greedily.

    Ties go to the earlier token. A token is chosen once, also where others equal it; the authors'
    program may then repeat one.
    """

    name = "divprune"
    label = "DivPrune"
    after_projector: ClassVar[bool] = True
    positions: ClassVar[str] = "compact"

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by farthest-point selection."""
        free = jnp.ones(view.tokens.shape[:2], bool) if view.valid is None else view.valid
        return Ranking(farthest_first(unit_vectors(view.tokens, view.valid), free, steps))


def farthest_first(
    unit: Float[Array, "r n e"],
    free: Bool[Array, "r n"],
    steps: int,
    relevance: Float[Array, "r n"] | None = None,
    diversity: float = 1.0,
) -> Int[Array, "r t"]:
    """Selects tokens one by one, each the farthest from those before it.

    Args:
        unit: tokens of length 1.
        free: True = may be chosen, at least one of each row.
        steps: static number of tokens to select.
        relevance: what counts beside a token's distance from those before it, and alone for the
            first token.
        diversity: weight of the distance, that of the relevance being the rest.

    Returns:
        [r, t] int32 indices in order of choice, undefined where no token is left.
    """
    place, least = jnp.arange(free.shape[1])[None], jnp.finfo(jnp.float32).min

    def farthest(distance, free):
        if relevance is not None:
            distance = diversity * distance + (1 - diversity) * relevance
        return jnp.argmax(jnp.where(free, distance, least), axis=1).astype(jnp.int32)

    def distance_to_others(part, at):
        likeness = jnp.einsum("rqe,rne->rqn", part, unit, precision=_EXACT)
        others = free[:, None] & (at[..., None] != place)
        return jnp.min(jnp.where(others, 1 - likeness, 2), axis=2)

    def step(carry, _):
        free, nearest, pick = carry
        chosen = jnp.take_along_axis(unit, pick[:, None, None], axis=1)[:, 0]
        likeness = jnp.einsum("rne,re->rn", unit, chosen, precision=_EXACT)
        nearest = jnp.minimum(nearest, 1 - likeness)
        free &= place != pick[:, None]
        return (free, nearest, farthest(nearest, free)), pick

    if relevance is None:
        first = farthest(map_tokens(distance_to_others, unit, place), free)
    else:
        first = jnp.argmax(jnp.where(free, relevance, least), axis=1).astype(jnp.int32)
    start = free, jnp.full(free.shape, 2, jnp.float32), first
    _, order = jax.lax.scan(step, start, length=steps)
    return order.T
