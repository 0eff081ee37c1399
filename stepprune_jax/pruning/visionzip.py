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
    reads_videos: ClassVar[bool] = False
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

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps the class token, dominant tokens in raster order, and then the merged tokens.

        Without a class token, all tokens are in raster order.

        Args:
            inputs: inputs of the pruner, with the taps of `taps`.
            capacity: static size k of the result.

        Returns:
            The kept tokens. The class token and merged tokens have the index -1.
        """
        has_class_token = len(inputs.taps) > 2
        tile = ()  # if images are split into tiles, a list with the tile of each patch
        if has_class_token:
            attention, keys, tokens, *tile = inputs.taps
            score = attention.astype(jnp.float32).sum(1)
            # The class token is always dominant, and comes first.
            score = score.at[:, 0].set(jnp.finfo(jnp.float32).max)
            keys = keys.astype(jnp.float32).mean(1)
        else:
            (score, keys), tokens = inputs.taps, inputs.whole
        if tile:
            part = jnp.pad(tile[0], ((0, 0), (1, 0)))  # the class token belongs to tile 0
            is_token = part >= 0
            order = in_turns(by_score(score, is_token), part)
            # The rank in turns replaces the score, so all tiles have equally many dominant tokens.
            score = -jnp.argsort(order, axis=1).astype(jnp.float32)
        else:
            is_token = jnp.ones(score.shape, bool) if has_class_token else inputs.valid
        num_dominant, num_contextual = self.split(inputs.count)
        is_dominant, is_target, tokens = merge(
            score,
            keys,
            tokens,
            is_token,
            num_dominant=num_dominant,
            num_targets=num_contextual,
            max_targets=capacity,
        )
        # Targets follow the dominant tokens, or share their raster order without a class token.
        target_key = 1 if has_class_token else 0
        sort_key = jnp.where(is_dominant, 0, jnp.where(is_target, target_key, 2))
        source = jnp.argsort(sort_key, axis=1, stable=True)[:, :capacity].astype(jnp.int32)
        valid = jnp.arange(capacity) < inputs.count[:, None]
        is_merged = jnp.take_along_axis(is_target, source, axis=1)
        tokens = jnp.take_along_axis(tokens, source[..., None], axis=1).astype(inputs.tokens.dtype)
        patch_index = source - int(has_class_token)  # patches are counted without the class token
        return Kept(
            index=jnp.where(valid & ~is_merged, patch_index, -1),
            place=jnp.where(valid, jnp.maximum(patch_index, 0), 0),
            tokens=jnp.where(valid[..., None], tokens, 0),
            valid=valid,
            count=inputs.count,
        )


def merge(
    score: Float[Array, "r n"],
    keys: Float[Array, "r n c"],
    tokens: Float[Array, "r n d"],
    is_token: Bool[Array, "r n"],
    *,
    num_dominant: Int[Array, "r"],
    num_targets: Int[Array, "r"],
    max_targets: int,
) -> tuple[Bool[Array, "r n"], Bool[Array, "r n"], Float[Array, "r n d"]]:
    """Keeps the tokens with the highest scores, and merges the remaining tokens into targets.

    Targets are evenly spaced among the remaining tokens. Each other remaining token joins the
    target whose key is most similar, and the mean of the joining tokens is added to the target.

    Args:
        score: [r, n] score of each token of r images.
        keys: [r, n, c] keys of the tokens; similarity is the cosine between keys.
        tokens: [r, n, d] features of the tokens.
        is_token: [r, n] False at padding.
        num_dominant: [r] number of tokens to keep for their scores.
        num_targets: [r] number of targets.
        max_targets: static bound on the number of targets.

    Returns:
        [r, n] mask of the kept tokens, [r, n] mask of the targets, and [r, n, d] float32 tokens, in
        which targets are merged.
    """
    rank = jnp.argsort(by_score(score, is_token), axis=1)
    is_dominant = is_token & (rank < num_dominant[:, None])
    is_remaining = is_token & ~is_dominant
    remaining_index = jnp.cumsum(is_remaining, axis=1) - 1
    num_remaining = jnp.sum(is_token, axis=1) - num_dominant
    stride = jnp.maximum(1, num_remaining // jnp.maximum(num_targets, 1))[:, None]
    is_target = (
        is_remaining
        & (remaining_index % stride == 0)
        & (remaining_index // stride < num_targets[:, None])
    )
    unit_keys = unit_vectors(keys, None)
    # Token index of each target, followed by other tokens up to the static bound.
    target_tokens = jnp.argsort(~is_target, axis=1, stable=True)[:, :max_targets]
    is_valid_target = jnp.take_along_axis(is_target, target_tokens, axis=1)
    target_keys = jnp.take_along_axis(unit_keys, target_tokens[..., None], axis=1)

    def nearest_target(chunk: Float[Array, "r q c"]) -> Int[Array, "r q"]:
        precision = jax.lax.Precision.HIGHEST
        cosine = jnp.einsum("rqc,rtc->rqt", chunk, target_keys, precision=precision)
        return jnp.argmax(jnp.where(is_valid_target[:, None], cosine, -2), axis=2)

    joins_target = is_remaining & ~is_target
    target_index = jnp.where(joins_target, map_tokens(nearest_target, unit_keys), -1)
    features = tokens.astype(jnp.float32)
    target_means = group_means(features, target_index, jnp.arange(target_tokens.shape[1])[None])
    target_means = jnp.where(is_valid_target[..., None], target_means, 0)
    row_index = jnp.arange(len(features))[:, None]
    return is_dominant, is_target, features.at[row_index, target_tokens].add(target_means)
