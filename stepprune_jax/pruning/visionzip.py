"""VisionZip: keeps patches that the class token attends to, and merges the remaining patches.

Yang et al. (https://arxiv.org/abs/2412.04467). *Dominant* tokens are the class token and the
patches with the largest attention of the class token, summed over heads. *Contextual* tokens are
merged from the remaining patches: evenly spaced patches are targets, and each other patch is added
to the target with the most similar key. Attention and keys are taken from the block whose output is
projected.

If images are split into tiles, every tile has an equal number of dominant tokens, and the class
token is taken from the overview of the image.

In a model without a class token, whose tower merges patches, the dominant tokens are the tokens
that receive the most attention. Contextual tokens take the positions of their targets, and all
tokens are in raster order. Both kinds are tokens as the language model reads them.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import (
    by_score,
    group_means,
    in_turns,
    map_tokens,
    ranking_block,
    tile_taps,
    unit_vectors,
)


@dataclasses.dataclass(frozen=True)
class VisionZip(Pruner):
    """Keeps dominant tokens and merges the remaining tokens.

    No budget reproduces the unpruned model: the class token, if there is one, is always kept, and
    the contextual tokens are always merged.

    Attributes:
        contextual: number of merged tokens; None for 5 in 32, as in the authors' program: 10 of 64,
            20 of 128, 30 of 192.
    """

    contextual: int | None = None

    name = "visionzip"
    label = "VisionZip"
    budgets: ClassVar[tuple[str, ...]] = EXACT
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects models whose tower does not rank patches, and too small budgets."""
        super().check(config, num_tokens)
        ranking_block(config, self.name)
        count = self.budget.exact_count(num_tokens)
        option = "budget" if self.contextual is None else "contextual"
        contextual = 1 if self.contextual is None else self.contextual
        self.expect(
            option, 1 <= contextual < count, "one that leaves a dominant and a contextual token"
        )

    def split(self, count: Int[ArrayLike, "*r"]) -> tuple[Int[Array, "*r"], Int[Array, "*r"]]:
        """Returns the numbers of dominant and contextual tokens, given the budget."""
        count = jnp.asarray(count)
        if self.contextual is None:
            # `round` rounds halves to even, as in the authors' program.
            contextual = jnp.maximum(1, jnp.round(5 * count / 32).astype(jnp.int32))
        else:
            contextual = jnp.minimum(self.contextual, count - 1)
        return count - contextual, contextual

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns taps of attention and keys, and with a class token of the block's output."""
        block = ranking_block(config, self.name)
        if config.received_block is not None:
            return Tap("received", block), Tap("keys", block)
        tile = tile_taps(config)
        return Tap("attention", block), Tap("keys", block), Tap("hidden", block + 1), *tile

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps the class token, dominant tokens in raster order, and then the merged tokens.

        Without a class token, all tokens are in raster order.
        """
        has_class_token = len(view.taps) > 2
        tile = ()
        if has_class_token:  # the class token is dominant and comes first
            attention, keys, tokens, *tile = view.taps
            score = attention.astype(jnp.float32).sum(1)
            score = score.at[:, 0].set(jnp.finfo(jnp.float32).max)
            keys = keys.astype(jnp.float32).mean(1)
        else:
            (score, keys), tokens = view.taps, view.whole
        real = jnp.ones(score.shape, bool) if tile or view.valid is None else view.valid
        if tile:
            part = jnp.pad(tile[0], ((0, 0), (1, 0)))
            real = part >= 0
            order = in_turns(by_score(score, real), part)
            score = -jnp.argsort(order, axis=1).astype(jnp.float32)
        num_dominant, num_contextual = self.split(view.count)
        dominant, target, tokens = merge(
            score,
            keys,
            tokens,
            real,
            dominant=num_dominant,
            contextual=num_contextual,
            max_targets=capacity,
        )
        sort_key = jnp.where(dominant, 0, jnp.where(target, int(has_class_token), 2))
        source = jnp.argsort(sort_key, axis=1, stable=True)[:, :capacity].astype(jnp.int32)
        valid = jnp.arange(capacity) < view.count[:, None]
        merged = jnp.take_along_axis(target, source, axis=1)
        kept = jnp.take_along_axis(tokens, source[..., None], axis=1).astype(view.tokens.dtype)
        patch_index = source - int(has_class_token)  # patches are counted without the class token
        return Kept(
            index=jnp.where(valid & ~merged, patch_index, -1),
            place=jnp.where(valid, jnp.maximum(patch_index, 0), 0),
            tokens=jnp.where(valid[..., None], kept, 0),
            valid=valid,
            count=view.count,
        )


def merge(
    score: Float[Array, "r n"],
    keys: Float[Array, "r n c"],
    tokens: Float[Array, "r n d"],
    real: Bool[Array, "r n"],
    *,
    dominant: Int[Array, "r"],
    contextual: Int[Array, "r"],
    max_targets: int,
) -> tuple[Bool[Array, "r n"], Bool[Array, "r n"], Float[Array, "r n d"]]:
    """Keeps the tokens with the highest scores, and merges the remaining tokens into targets.

    Args:
        score: [r, n] score of each token.
        keys: [r, n, c] keys of the tokens; each token joins the target with the largest cosine.
        tokens: [r, n, d] the tokens.
        real: [r, n] True at real tokens.
        dominant: [r] number of dominant tokens.
        contextual: [r] number of targets.
        max_targets: static bound on the number of targets.

    Returns:
        Masks of the dominant tokens and of the targets, and the tokens in float32; the mean of the
        tokens that join a target is added to it.
    """
    rank = jnp.argsort(by_score(score, real), axis=1)
    is_dominant = real & (rank < dominant[:, None])
    is_remaining = real & ~is_dominant
    remaining_index = jnp.cumsum(is_remaining, axis=1) - 1
    num_remaining = jnp.sum(real, axis=1) - dominant
    stride = jnp.maximum(1, num_remaining // jnp.maximum(contextual, 1))[:, None]
    is_target = (
        is_remaining
        & (remaining_index % stride == 0)
        & (remaining_index // stride < contextual[:, None])
    )
    unit_keys = unit_vectors(keys, None)
    target_slots = jnp.argsort(~is_target, axis=1, stable=True)[:, :max_targets]  # targets first
    is_real_target = jnp.take_along_axis(is_target, target_slots, axis=1)
    target_keys = jnp.take_along_axis(unit_keys, target_slots[..., None], axis=1)

    def nearest_target(chunk: Float[Array, "r q c"]) -> Int[Array, "r q"]:
        precision = jax.lax.Precision.HIGHEST
        cosine = jnp.einsum("rqc,rtc->rqt", chunk, target_keys, precision=precision)
        return jnp.argmax(jnp.where(is_real_target[:, None], cosine, -2), axis=2)

    target_index = jnp.where(is_remaining & ~is_target, map_tokens(nearest_target, unit_keys), -1)
    features = tokens.astype(jnp.float32)
    group_mean = group_means(features, target_index, jnp.arange(target_slots.shape[1])[None])
    added = jnp.where(is_real_target[..., None], group_mean, 0)
    return (
        is_dominant,
        is_target,
        features.at[jnp.arange(len(features))[:, None], target_slots].add(added),
    )
