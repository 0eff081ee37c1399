"""DivPrune: keeps tokens that are as far from one another as possible.

Alvar et al. (https://arxiv.org/abs/2503.02175). The distance of two projected tokens is 1 minus
the cosine between them. The first choice is the token with the most distant nearest neighbor.
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

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by farthest-point selection."""
        is_token = inputs.valid
        return Ranking(farthest_first(unit_vectors(inputs.tokens, inputs.valid), is_token, steps))


def farthest_first(
    unit_tokens: Float[Array, "r n e"],
    is_candidate: Bool[Array, "r n"],
    steps: int,
    relevance: Float[Array, "r n"] | None = None,
    diversity: float = 1.0,
) -> Int[Array, "r t"]:
    """Chooses tokens one by one, each the farthest from the tokens chosen before.

    The distance of two tokens is 1 minus their cosine. The distance of a token from a set is the
    distance from the nearest token of the set. The first choice is the token farthest from the set
    of all other tokens. With `relevance`, the first choice maximizes the relevance, and each later
    choice maximizes diversity * distance + (1 - diversity) * relevance.

    Args:
        unit_tokens: [r, n, e] n tokens of each row, normalized to length 1.
        is_candidate: [r, n] True at tokens that may be chosen; at least one in each row.
        steps: number t of tokens to choose; static.
        relevance: [r, n] relevance of each token; None chooses by distance only.
        diversity: weight of the distance, in [0, 1].

    Returns:
        [r, t] int32 indices in order of choice; undefined after a row's last candidate.
    """
    token_index, lowest = jnp.arange(is_candidate.shape[1])[None], jnp.finfo(jnp.float32).min
    max_distance = 2  # distance of opposite vectors

    def argmax_among(scores, is_candidate):
        return jnp.argmax(jnp.where(is_candidate, scores, lowest), axis=1).astype(jnp.int32)

    def distance_to_nearest_other(chunk, chunk_index):
        cosine = jnp.einsum("rqe,rne->rqn", chunk, unit_tokens, precision=_EXACT)
        is_other = is_candidate[:, None] & (chunk_index[..., None] != token_index)
        return jnp.min(jnp.where(is_other, 1 - cosine, max_distance), axis=2)

    def step(carry, _):
        is_remaining, distance, choice = carry
        chosen = jnp.take_along_axis(unit_tokens, choice[:, None, None], axis=1)[:, 0]
        cosine = jnp.einsum("rne,re->rn", unit_tokens, chosen, precision=_EXACT)
        distance = jnp.minimum(distance, 1 - cosine)
        is_remaining &= token_index != choice[:, None]
        scores = distance
        if relevance is not None:
            scores = diversity * distance + (1 - diversity) * relevance
        return (is_remaining, distance, argmax_among(scores, is_remaining)), choice

    first_scores = relevance
    if first_scores is None:
        first_scores = map_tokens(distance_to_nearest_other, unit_tokens, token_index)
    distance = jnp.full(is_candidate.shape, max_distance, jnp.float32)
    start = is_candidate, distance, argmax_among(first_scores, is_candidate)
    _, order = jax.lax.scan(step, start, length=steps)
    return order.T
