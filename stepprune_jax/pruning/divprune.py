"""DivPrune: keeps tokens that are as far from one another as possible.

Alvar et al. (https://arxiv.org/abs/2503.02175). The distance of two projected tokens is 1 minus
the cosine between them. The first choice is the token with the most distant nearest neighbour.
Every further choice is the token whose nearest chosen token is most distant.
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

    Ties go to the earlier token. Every token is chosen at most once. The authors' program may
    choose a token repeatedly if tokens are equal.
    """

    name = "divprune"
    label = "DivPrune"
    after_projector: ClassVar[bool] = True
    positions: ClassVar[str] = "compact"

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by farthest-point selection."""
        available = jnp.ones(view.tokens.shape[:2], bool) if view.valid is None else view.valid
        return Ranking(farthest_first(unit_vectors(view.tokens, view.valid), available, steps))


def farthest_first(
    unit: Float[Array, "r n e"],
    available: Bool[Array, "r n"],
    steps: int,
    relevance: Float[Array, "r n"] | None = None,
    diversity: float = 1.0,
) -> Int[Array, "r t"]:
    """Chooses tokens one by one, each the farthest from the earlier choices.

    With `relevance`, each choice maximizes diversity * distance + (1 - diversity) * relevance, and
    the first choice maximizes relevance.

    Args:
        unit: [r, n, e] tokens, normalised to length 1.
        available: [r, n] True at tokens that may be chosen; at least one in each row.
        steps: number of tokens to choose; static.
        relevance: [r, n] relevance of each token, or None.
        diversity: weight of the distance, in [0, 1].

    Returns:
        [r, t] int32 indices in order of choice; undefined after a row's last available token.
    """
    token_index, lowest = jnp.arange(available.shape[1])[None], jnp.finfo(jnp.float32).min

    def farthest(distance, available):
        if relevance is not None:
            distance = diversity * distance + (1 - diversity) * relevance
        return jnp.argmax(jnp.where(available, distance, lowest), axis=1).astype(jnp.int32)

    def distance_to_others(chunk, chunk_index):
        cosine = jnp.einsum("rqe,rne->rqn", chunk, unit, precision=_EXACT)
        is_other = available[:, None] & (chunk_index[..., None] != token_index)
        return jnp.min(jnp.where(is_other, 1 - cosine, 2), axis=2)

    def step(carry, _):
        available, nearest_distance, choice = carry
        chosen = jnp.take_along_axis(unit, choice[:, None, None], axis=1)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit, chosen, precision=_EXACT)
        nearest_distance = jnp.minimum(nearest_distance, 1 - cosine)
        available &= token_index != choice[:, None]
        return (available, nearest_distance, farthest(nearest_distance, available)), choice

    if relevance is None:
        first = farthest(map_tokens(distance_to_others, unit, token_index), available)
    else:
        first = jnp.argmax(jnp.where(available, relevance, lowest), axis=1).astype(jnp.int32)
    start = available, jnp.full(available.shape, 2, jnp.float32), first
    _, order = jax.lax.scan(step, start, length=steps)
    return order.T
