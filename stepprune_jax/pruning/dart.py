"""DART: visual tokens that duplicate a few pivots are dropped after a few layers.

Wen et al. (https://arxiv.org/abs/2502.11494). The pivots are the visual tokens, and the words after
the image, whose keys in layer K - 1 are largest. The pivots take turns, those of the image first,
each kind by descending size of its keys: each takes the visual tokens least similar to it, by the
cosine between states before layer K, normalised by the model's final norm. The taken tokens and the
visual pivots remain from layer K on, at their position ids. The authors' program takes turns in the
order of a Python set of the pivots' places instead, which changes which tokens remain.
"""

import dataclasses
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Schedule, Survivors
from stepprune_jax.pruning.ordering import keep_best, unit_vectors


@dataclasses.dataclass(frozen=True)
class Dart(LayerPruner):
    """Keeps the visual tokens that are least similar to a few pivots.

    A budget is the authors' `max_num_trunction`: with P pivots of both kinds, each takes
    budget // P tokens, and the visual pivots are not counted. So a budget of 64 keeps 68 of 576.
    With a share as the budget, each takes that share of an image's tokens, divided by P, rounded
    down.

    Attributes:
        layer: K, layers that see all tokens; the authors' `pruned_layer`.
        pivot_image_token: pivots among the tokens of an image.
        pivot_text_token: pivots among the words after it.
    """

    layer: int = 2
    pivot_image_token: int = 4
    pivot_text_token: int = 4

    name = "dart"
    label = "DART"
    version: ClassVar[int] = 3

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer that does not exist and an absence of pivots."""
        super().check(config, num_tokens)
        depth = config.text.num_layers
        self.expect("layer", 1 <= self.layer < depth, f"1 to {depth - 1}")
        for pivots in ("pivot_image_token", "pivot_text_token"):
            known = getattr(self, pivots) >= 0 and self._pivots > 0
            self.expect(pivots, known, "0 or more, and at least one pivot of both kinds")

    @property
    def _pivots(self) -> int:
        return self.pivot_image_token + self.pivot_text_token

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut before layer K."""
        return (LayerCut(self.layer, (Tap("keys", self.layer - 1), Tap("normed", self.layer))),)

    @property
    def budget_counts(self) -> str:
        """The image's pivots are not among them."""
        return "tokens that the pivots select; the image's pivots remain in addition"

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the tokens taken, plus the visual pivots."""
        if self.budget.exact_count(num_tokens) >= num_tokens:
            return Schedule(num_tokens, num_tokens, (Survivors(num_tokens),))
        # A share is not rounded before it is divided.
        kind, number = self.budget.kind, Fraction(self.budget.number)
        budget = number * num_tokens if kind == "rate" else number
        taken = int(budget // self._pivots) * self._pivots
        left = max(1, min(num_tokens, taken + self.pivot_image_token))
        return Schedule(num_tokens, num_tokens, (Survivors(left),))

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the visual pivots and the taken tokens; if too few, also the first others."""
        keys, features = (taps[f"{tap.kind}.{tap.layer}"] for tap in cut.taps)
        size = jnp.abs(keys.astype(jnp.float32)).sum((1, 3))[:, None]
        slots = jnp.arange(size.shape[2])
        of_image = sequence.image[:, None] == jnp.arange(count.shape[1])[:, None]
        end = jnp.max(jnp.where(of_image, slots, -1), axis=2, keepdims=True)
        text = (sequence.image < 0) & (slots < sequence.length[:, None])
        visual, has_visual = _largest(size, of_image, self.pivot_image_token)
        words, has_words = _largest(size, text[:, None] & (slots > end), self.pivot_text_token)
        pivots = jnp.concatenate([visual, words], axis=2)
        present = jnp.concatenate([has_visual, has_words], axis=2)
        is_pivot = of_image & jnp.any(slots[:, None] == visual[:, :, None], axis=3)
        share = jnp.maximum(count - self.pivot_image_token, 0) // self._pivots
        turn = take_in_turn(_cosines(features, pivots), present, of_image & ~is_pivot, share)
        # The visual pivots first, then tokens by turn; those never taken come last.
        score = -jnp.where(is_pivot, -1, turn).astype(jnp.float32)
        score = jnp.sum(jnp.where(of_image, score, 0), axis=1)
        return sequence, keep_best(score, sequence.image, count)


def _largest(
    size: Float[Array, "b 1 s"], mask: Bool[Array, "b j s"], number: int
) -> tuple[Int[Array, "b j p"], Bool[Array, "b j p"]]:
    """Returns the slots of the largest values under a mask, in order, and which are real."""
    best, slots = jax.lax.top_k(jnp.where(mask, size, -1), min(number, mask.shape[2]))
    return slots, best >= 0


def _cosines(
    features: Float[Array, "b s e"], pivots: Int[Array, "b j p"]
) -> Float[Array, "b j p s"]:
    """Computes the cosines of all features with those of the pivots."""
    unit = unit_vectors(features, None)
    at = jax.vmap(jnp.take, in_axes=(0, 0, None))(unit, pivots, 0)
    return jnp.einsum("bjpe,bse->bjps", at, unit, precision=jax.lax.Precision.HIGHEST)


def take_in_turn(
    likeness: Float[Array, "b j p s"],
    present: Bool[Array, "b j p"],
    pool: Bool[Array, "b j s"],
    share: Int[Array, "b j"],
) -> Int[Array, "b j s"]:
    """Returns the turn, of p, in which each token was taken; p if in none.

    Each `present` pivot in turn takes its `share` of the tokens in the pool that are least similar
    to it. Ties go to the earlier token.
    """
    p = likeness.shape[2]

    def one_turn(carry, pivot):
        pool, turn = carry
        number, likeness, present = pivot
        order = jnp.argsort(jnp.where(pool, likeness, 2), axis=2, stable=True)
        rank = jnp.argsort(order, axis=2)
        taken = pool & present[..., None] & (rank < share[..., None])
        return (pool & ~taken, jnp.where(taken, number, turn)), None

    turns = (jnp.arange(p, dtype=jnp.int32), *(jnp.moveaxis(x, 2, 0) for x in (likeness, present)))
    start = (pool, jnp.full(pool.shape, p, jnp.int32))
    return jax.lax.scan(one_turn, start, turns)[0][1]
