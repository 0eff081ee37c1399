"""VisionZip: patches that the class token attends to, with the others merged into a few tokens.

Yang et al. (https://arxiv.org/abs/2412.04467). Some of the K tokens are *dominant*: the class token
itself and the patches that it attends to most, summed over heads. The others are *contextual*:
evenly spaced remaining patches are targets, and each of the rest is added to the target whose key
is most similar to its own. Both signals are those of the block whose output is projected.

In a model without a class token, whose tower merges patches, the dominant tokens are those that
receive most attention from the image; contextual ones take the places of their targets, and all are
in raster order. Both are tokens as the language model reads them.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Params, Pruner, View, take
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import by_score, group_means, map_tokens, ranking_block


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
    exact_when_full: ClassVar[bool] = False
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects models that do not rank patches, and budgets without room for both kinds."""
        super().check(config, num_tokens)
        ranking_block(config, self.name)
        dominant, contextual = self.split(self.budget.exact_count(num_tokens))
        known = dominant >= 1 and 1 <= contextual <= num_tokens - dominant
        option = "budget" if self.contextual is None else "contextual"
        self.require(option, known, "one that leaves a dominant and a contextual token")

    def split(self, count: int) -> tuple[int, int]:
        """Splits a count into numbers of dominant and contextual tokens."""
        contextual = self.contextual
        if contextual is None:
            contextual = max(1, round(5 * count / 32))
        return count - contextual, contextual

    def program(self) -> Pruner:
        """Returns the pruner itself, as its count determines the shapes of both kinds."""
        return self

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the ranking attention, the keys, and with a class token the block's output."""
        block = ranking_block(config, self.name)
        if config.received_block is not None:
            return Tap("received", block), Tap("keys", block)
        return Tap("attention", block), Tap("keys", block), Tap("hidden", block + 1)

    def select(self, params: Params, view: View, capacity: int) -> Kept:
        """Returns dominant tokens in raster order, the class token first; then the merged ones.

        Without a class token, all in raster order.
        """
        if len(view.taps) == 2:
            return self._select_received(view, capacity)
        attention, keys, hidden = view.taps
        r, n = view.tokens.shape[:2]
        dominant, contextual = self.split(self.budget.exact_count(n))
        tokens, source = merge(
            attention.astype(jnp.float32).sum(1),
            keys.astype(jnp.float32).mean(1),
            hidden,
            dominant,
            contextual,
        )
        # The class token is no patch: its index is -1, and its place that of the first one.
        index = jnp.where(jnp.arange(dominant + contextual) < dominant, source - 1, -1)
        place = jnp.maximum(source - 1, 0)
        missing = capacity - dominant - contextual

        def padded(x: Array, value: int) -> Array:
            widths = ((0, 0), (0, missing), (0, 0))[: x.ndim]
            return jnp.pad(x, widths, constant_values=value)

        valid = jnp.broadcast_to(jnp.arange(capacity) < dominant + contextual, (r, capacity))
        count = jnp.full(r, dominant + contextual, jnp.int32)
        tokens = padded(tokens.astype(view.tokens.dtype), 0)
        return Kept(padded(index, -1), padded(place, 0), tokens, valid, count)

    def _select_received(self, view: View, capacity: int) -> Kept:
        """Chooses and merges in a model without a class token; images may differ in size."""
        received, keys = view.taps
        real = jnp.ones(received.shape, bool) if view.valid is None else view.valid
        contextual = self._contextual(view.count)
        dominant, target, tokens = merge_received(
            received, keys, view.tokens, real, view.count - contextual, contextual
        )
        order = jnp.argsort(~(dominant | target), axis=1, stable=True).astype(jnp.int32)
        kept = take(tokens.astype(view.tokens.dtype), order, view.count, capacity)
        merged = jnp.take_along_axis(target, kept.place, axis=1) & kept.valid
        return kept._replace(index=jnp.where(merged, -1, kept.index))

    def _contextual(self, count: Int[Array, "r"]) -> Int[Array, "r"]:
        """Returns how many of `count` tokens are contextual, as in `split`."""
        if self.contextual is not None:
            return jnp.minimum(self.contextual, count - 1)
        # Halves to even, as Python rounds.
        return jnp.maximum(1, jnp.round(5 * count / 32).astype(jnp.int32))


def merge_received(
    received: Float[Array, "r n"],
    keys: Float[Array, "r n c"],
    tokens: Float[Array, "r n d"],
    real: Bool[Array, "r n"],
    dominant: Int[Array, "r"],
    contextual: Int[Array, "r"],
) -> tuple[Bool[Array, "r n"], Bool[Array, "r n"], Float[Array, "r n d"]]:
    """Keeps the tokens that receive most attention, and merges the others.

    Returns which tokens are dominant, which are targets, and the tokens in float32: a target plus
    the mean of those assigned to it by the cosine of keys.
    """
    rank = jnp.argsort(by_score(received, real), axis=1)
    chosen = real & (rank < dominant[:, None])
    rest = real & ~chosen
    number = jnp.cumsum(rest, axis=1) - 1
    size = jnp.sum(real, axis=1) - dominant
    step = jnp.maximum(1, size // jnp.maximum(contextual, 1))[:, None]
    target = rest & (number % step == 0) & (number // step < contextual[:, None])
    keys = keys.astype(jnp.float32)
    norm = jnp.linalg.norm(keys, axis=-1, keepdims=True)
    metric = keys / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)

    def nearest_target(part: Float[Array, "r q c"]) -> Int[Array, "r q"]:
        exact = jax.lax.Precision.HIGHEST
        likeness = jnp.einsum("rqc,rtc->rqt", part, metric, precision=exact)
        return jnp.argmax(jnp.where(target[:, None], likeness, -2), axis=2)

    into = jnp.where(rest & ~target, map_tokens(nearest_target, metric), tokens.shape[1])
    wide = tokens.astype(jnp.float32)
    mean = group_means(wide, into, jnp.arange(tokens.shape[1])[None])
    return chosen, target, jnp.where(target[..., None], wide + mean, wide)


def merge(
    attention: Float[Array, "r m"],
    keys: Float[Array, "r m c"],
    hidden: Float[Array, "r m d"],
    dominant: int,
    contextual: int,
) -> tuple[Float[Array, "r k d"], Int[Array, "r k"]]:
    """Chooses dominant tokens, the class token among them, and merges the others.

    A merged token is its target plus the mean of those assigned to it by the cosine of keys.
    Returns the tokens, and the index of each, or of its target, among the m.
    """
    m = attention.shape[1]
    best = by_score(attention[:, 1:], None)[:, : dominant - 1] + 1
    chosen = jnp.sort(jnp.pad(best, ((0, 0), (1, 0))), axis=1)
    is_chosen = jnp.any(chosen[..., None] == jnp.arange(m), axis=1)
    rest = jnp.sort(jnp.where(is_chosen, m, jnp.arange(m)), axis=1)[:, : m - dominant]
    step = max(1, (m - dominant) // contextual)
    at = jnp.arange(contextual) * step
    targets = rest[:, at]

    def gathered(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index[..., None], axis=1)

    norm = jnp.linalg.norm(keys, axis=-1, keepdims=True)
    metric = keys / jnp.maximum(norm, jnp.finfo(keys.dtype).tiny)
    exact = jax.lax.Precision.HIGHEST
    likeness = jnp.einsum(
        "rxc,rtc->rxt", gathered(metric, rest), gathered(metric, targets), precision=exact
    )
    nearest = jax.nn.one_hot(jnp.argmax(likeness, axis=2), contextual)
    is_target = jnp.zeros(rest.shape[1], bool).at[at].set(True)
    share = jnp.where(is_target[:, None], 0, nearest)
    total = jnp.einsum(
        "rxt,rxd->rtd", share, gathered(hidden, rest).astype(jnp.float32), precision=exact
    )
    mean = total / jnp.maximum(1, share.sum(1))[..., None]
    merged = gathered(hidden, targets).astype(jnp.float32) + mean
    tokens = jnp.concatenate([gathered(hidden, chosen).astype(jnp.float32), merged], axis=1)
    return tokens, jnp.concatenate([chosen, targets], axis=1).astype(jnp.int32)
