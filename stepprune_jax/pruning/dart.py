"""DART: drops visual tokens that duplicate a few pivots, after a few layers.

Wen et al. (https://arxiv.org/abs/2502.11494). The pivots are the visual tokens and the words after
the image with the largest keys in layer K - 1. The pivots take turns: first the visual pivots, then
the words, by descending size of their keys. In its turn, a pivot takes the visual tokens that
are least similar to it. Similarity is the cosine between states before layer K, normalized by the
model's final norm. The taken tokens and the visual pivots remain from layer K on and keep their
position ids. The turns of the authors' program follow the order of a Python set of the pivots'
positions, so it may keep other tokens.
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

    The budget is the authors' `max_num_trunction`: each of the P pivots takes budget // P tokens,
    and the visual pivots are not counted. For example, a budget of 64 keeps 68 of 576 tokens. If
    the budget is a fraction, each pivot takes the fraction of an image's tokens, divided by P and
    rounded down.

    Attributes:
        layer: K, the number of layers that process all tokens; the authors' `pruned_layer`.
        pivot_image_token: number of pivots among the tokens of an image.
        pivot_text_token: number of pivots among the words after the image.
    """

    layer: int = 2
    pivot_image_token: int = 4
    pivot_text_token: int = 4

    name = "dart"
    label = "DART"
    version: ClassVar[int] = 3

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer that does not exist, and options without any pivot."""
        super().check(config, num_tokens)
        depth = config.text.num_layers
        self.expect("layer", 1 <= self.layer < depth, f"1 to {depth - 1}")
        for option in ("pivot_image_token", "pivot_text_token"):
            is_valid = getattr(self, option) >= 0 and self._pivots > 0
            self.expect(option, is_valid, "0 or more, and at least one pivot of both kinds")

    @property
    def _pivots(self) -> int:
        return self.pivot_image_token + self.pivot_text_token

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut before layer K."""
        return (LayerCut(self.layer, (Tap("keys", self.layer - 1), Tap("normed", self.layer))),)

    @property
    def budget_counts(self) -> str:
        """A description of the budget for messages: it excludes the visual pivots."""
        return "tokens that the pivots select; the image's pivots remain in addition"

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the counts: the taken tokens and the visual pivots remain."""
        if self.budget.exact_count(num_tokens) >= num_tokens:
            return Schedule(num_tokens, num_tokens, (Survivors(num_tokens),))
        # A fraction of the tokens is divided by the number of pivots before it is rounded.
        kind, number = self.budget.kind, Fraction(self.budget.number)
        budget = number * num_tokens if kind == "rate" else number
        num_taken = int(budget // self._pivots) * self._pivots
        num_remaining = max(1, min(num_tokens, num_taken + self.pivot_image_token))
        return Schedule(num_tokens, num_tokens, (Survivors(num_remaining),))

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the visual pivots and the tokens that pivots take.

        If an image keeps more tokens, its earliest remaining tokens fill up the count.

        Args:
            cut: the cut, with its two taps: keys and normalized hidden states.
            sequence: the padded sequences at the cut; a slot is a position in them.
            taps: values of the taps by name.
            count: [b, j] number of tokens to keep of each image, including its pivots.

        Returns:
            The sequences, unchanged, and [b, s] True at the slots that remain.
        """
        keys, features = (taps[f"{tap.kind}.{tap.layer}"] for tap in cut.taps)
        key_norm = jnp.abs(keys.astype(jnp.float32)).sum((1, 3))[:, None]
        slots = jnp.arange(key_norm.shape[2])
        # [b, j, s] masks for each image of a sequence.
        is_in_image = sequence.image[:, None] == jnp.arange(count.shape[1])[:, None]
        last_image_slot = jnp.max(jnp.where(is_in_image, slots, -1), axis=2, keepdims=True)
        is_text = (sequence.image < 0) & (slots < sequence.length[:, None])
        is_text_after_image = is_text[:, None] & (slots > last_image_slot)
        visual_pivots, is_visual_pivot = _find_largest(
            key_norm, is_in_image, self.pivot_image_token
        )
        word_pivots, is_word_pivot = _find_largest(
            key_norm, is_text_after_image, self.pivot_text_token
        )
        pivots = jnp.concatenate([visual_pivots, word_pivots], axis=2)
        pivot_exists = jnp.concatenate([is_visual_pivot, is_word_pivot], axis=2)
        is_pivot = is_in_image & jnp.any(slots[:, None] == visual_pivots[:, :, None], axis=3)
        tokens_per_pivot = jnp.maximum(count - self.pivot_image_token, 0) // self._pivots
        turn = take_in_turn(
            _compute_cosines(features, pivots),
            pivot_exists,
            is_in_image & ~is_pivot,
            tokens_per_pivot,
        )
        # Visual pivots come first, then tokens by the turn in which they were taken. Tokens that no
        # pivot takes come last.
        score = -jnp.where(is_pivot, -1, turn).astype(jnp.float32)
        score = jnp.sum(jnp.where(is_in_image, score, 0), axis=1)
        return sequence, keep_best(score, sequence.image, count)


def _find_largest(
    values: Float[Array, "b 1 s"], mask: Bool[Array, "b j s"], count: int
) -> tuple[Int[Array, "b j p"], Bool[Array, "b j p"]]:
    """Finds the slots of the p = `count` largest values under each mask.

    Returns:
        The slots by descending value, and whether each slot is under the mask. Masks with fewer
        than p slots are filled up with other slots.
    """
    # Values are at least 0, so -1 marks slots outside the mask.
    largest, slots = jax.lax.top_k(jnp.where(mask, values, -1), min(count, mask.shape[2]))
    return slots, largest >= 0


def _compute_cosines(
    features: Float[Array, "b s e"], pivots: Int[Array, "b j p"]
) -> Float[Array, "b j p s"]:
    """Computes the cosines between the pivots and all features."""
    unit_features = unit_vectors(features, None)
    pivot_vectors = jax.vmap(jnp.take, in_axes=(0, 0, None))(unit_features, pivots, 0)
    return jnp.einsum(
        "bjpe,bse->bjps", pivot_vectors, unit_features, precision=jax.lax.Precision.HIGHEST
    )


def take_in_turn(
    cosine: Float[Array, "b j p s"],
    pivot_exists: Bool[Array, "b j p"],
    is_candidate: Bool[Array, "b j s"],
    tokens_per_pivot: Int[Array, "b j"],
) -> Int[Array, "b j s"]:
    """Lets the pivots of each image take tokens, one pivot after another.

    Each pivot takes the remaining candidates that are least similar to it. Ties go to the earlier
    token.

    Args:
        cosine: [b, j, p, s] cosines between the p pivots of each of the j images of a sequence and
            the tokens in its s slots.
        pivot_exists: [b, j, p] False at a pivot that takes no token.
        is_candidate: [b, j, s] True at tokens that may be taken.
        tokens_per_pivot: [b, j] number of tokens that each pivot takes.

    Returns:
        [b, j, s] index of the pivot that took each token; p for a token that no pivot took.
    """
    num_pivots = cosine.shape[2]

    def take_for_pivot(carry, pivot):
        is_candidate, taker = carry
        pivot_index, pivot_cosine, exists = pivot
        # Cosines are at most 1, so 2 sorts all other tokens last.
        order = jnp.argsort(jnp.where(is_candidate, pivot_cosine, 2), axis=2, stable=True)
        rank = jnp.argsort(order, axis=2)
        is_taken = is_candidate & exists[..., None] & (rank < tokens_per_pivot[..., None])
        return (is_candidate & ~is_taken, jnp.where(is_taken, pivot_index, taker)), None

    pivots = (
        jnp.arange(num_pivots, dtype=jnp.int32),
        jnp.moveaxis(cosine, 2, 0),
        jnp.moveaxis(pivot_exists, 2, 0),
    )
    no_taker = jnp.full(is_candidate.shape, num_pivots, jnp.int32)
    (_, taker), _ = jax.lax.scan(take_for_pivot, (is_candidate, no_taker), pivots)
    return taker
