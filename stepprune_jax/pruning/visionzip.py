"""VisionZip: patches that the class token attends to, with the others merged into a few tokens.

Yang et al. (https://arxiv.org/abs/2412.04467). Some of the K tokens are *dominant*: the class token
itself and the patches that it attends to most, summed over heads. The others are *contextual*:
evenly spaced remaining patches are targets, and each of the rest is added to the target whose key
is most similar to its own. Both signals are those of the block whose output is projected.

Where images are seen in tiles, each tile has an equal share of the dominant tokens, and the class
token is that of the whole image.

In a model without a class token, whose tower merges patches, the dominant tokens are those that
receive most attention from the image; contextual ones take the places of their targets, and all are
in raster order. Both are tokens as the language model reads them.
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
    """Keeps dominant tokens and merges the rest.

    It is not the unpruned model at any budget: the class token, where there is one, is always among
    its tokens, and the last ones are always merged.

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
        """Rejects models that do not rank patches, and budgets without room for both kinds."""
        super().check(config, num_tokens)
        ranking_block(config, self.name)
        count = self.budget.exact_count(num_tokens)
        option = "budget" if self.contextual is None else "contextual"
        contextual = 1 if self.contextual is None else self.contextual
        self.expect(
            option, 1 <= contextual < count, "one that leaves a dominant and a contextual token"
        )

    def split(self, count: Int[ArrayLike, "*r"]) -> tuple[Int[Array, "*r"], Int[Array, "*r"]]:
        """Splits counts into numbers of dominant and contextual tokens."""
        count = jnp.asarray(count)
        if self.contextual is None:
            # Halves to even, as in the authors' program.
            contextual = jnp.maximum(1, jnp.round(5 * count / 32).astype(jnp.int32))
        else:
            contextual = jnp.minimum(self.contextual, count - 1)
        return count - contextual, contextual

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the ranking attention, the keys, and with a class token the block's output."""
        block = ranking_block(config, self.name)
        if config.received_block is not None:
            return Tap("received", block), Tap("keys", block)
        tile = tile_taps(config)
        return Tap("attention", block), Tap("keys", block), Tap("hidden", block + 1), *tile

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns dominant tokens in raster order, the class token first; then the merged ones.

        Without a class token, all in raster order.
        """
        has_class_token = len(view.taps) > 2
        tile = ()
        if has_class_token:  # it is dominant, and the first
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
        counts = self.split(view.count)
        dominant, target, tokens = merge(score, keys, tokens, real, *counts, capacity)
        group = jnp.where(dominant, 0, jnp.where(target, int(has_class_token), 2))
        source = jnp.argsort(group, axis=1, stable=True)[:, :capacity].astype(jnp.int32)
        valid = jnp.arange(capacity) < view.count[:, None]
        merged = jnp.take_along_axis(target, source, axis=1)
        kept = jnp.take_along_axis(tokens, source[..., None], axis=1).astype(view.tokens.dtype)
        place = source - int(has_class_token)  # which is no patch
        return Kept(
            index=jnp.where(valid & ~merged, place, -1),
            place=jnp.where(valid, jnp.maximum(place, 0), 0),
            tokens=jnp.where(valid[..., None], kept, 0),
            valid=valid,
            count=view.count,
        )


def merge(
    score: Float[Array, "r n"],
    keys: Float[Array, "r n c"],
    tokens: Float[Array, "r n d"],
    real: Bool[Array, "r n"],
    dominant: Int[Array, "r"],
    contextual: Int[Array, "r"],
    most: int,
) -> tuple[Bool[Array, "r n"], Bool[Array, "r n"], Float[Array, "r n d"]]:
    """Keeps the tokens with the highest scores, and merges the others into at most `most` targets.

    Returns which tokens are dominant, which are targets, and the tokens in float32: a target plus
    the mean of those assigned to it by the cosine of keys.
    """
    rank = jnp.argsort(by_score(score, real), axis=1)
    chosen = real & (rank < dominant[:, None])
    rest = real & ~chosen
    number = jnp.cumsum(rest, axis=1) - 1
    size = jnp.sum(real, axis=1) - dominant
    step = jnp.maximum(1, size // jnp.maximum(contextual, 1))[:, None]
    target = rest & (number % step == 0) & (number // step < contextual[:, None])
    metric = unit_vectors(keys, None)
    slot = jnp.argsort(~target, axis=1, stable=True)[:, :most]  # targets first
    is_target = jnp.take_along_axis(target, slot, axis=1)
    goal = jnp.take_along_axis(metric, slot[..., None], axis=1)

    def nearest_target(part: Float[Array, "r q c"]) -> Int[Array, "r q"]:
        exact = jax.lax.Precision.HIGHEST
        likeness = jnp.einsum("rqc,rtc->rqt", part, goal, precision=exact)
        return jnp.argmax(jnp.where(is_target[:, None], likeness, -2), axis=2)

    into = jnp.where(rest & ~target, map_tokens(nearest_target, metric), -1)
    wide = tokens.astype(jnp.float32)
    mean = group_means(wide, into, jnp.arange(slot.shape[1])[None])
    added = jnp.where(is_target[..., None], mean, 0)
    return chosen, target, wide.at[jnp.arange(len(wide))[:, None], slot].add(added)
