"""PruMerge and PruMerge+: outliers of the class token's attention, merged with similar patches.

Shang et al. (https://arxiv.org/abs/2403.15388). The query of the class token in the tower's last
block is compared with all keys, with heads concatenated. Patches whose attention is an outlier by
the quartiles are kept, the most attended first; PruMerge+ also keeps a grid of patches, the finer
the more outliers there are. The patches with the most similar keys are added to each, weighted by
attention, and one further token is the weighted sum of all patches that were not kept.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, Schedule
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import (
    by_score,
    class_token_block,
    evenly,
    require_grid,
    unit_vectors,
)


@dataclasses.dataclass(frozen=True)
class PruMerge(Pruner):
    """Keeps the patches that the class token attends to most, and merges the others.

    Without a budget an image keeps its outliers. It is not the unpruned model at any budget: the
    last token is always the sum of the others.

    Attributes:
        neighbours: patches added to each kept one.
    """

    neighbours: int = 32

    name = "prumerge"
    label = "PruMerge"
    version: ClassVar[int] = 2
    budgets: ClassVar[tuple[str, ...]] = ("own", *EXACT)
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects models without a class token, and a negative number of neighbours."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        class_token_block(config, self.name)
        self.expect("neighbours", self.neighbours >= 0, "an integer from 0")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the class token's query and all keys of the tower's last block."""
        return Tap("query", -1), Tap("keys", -1)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns the kept patches, most attended first, and the sum of the others."""
        query, keys = (tap.astype(jnp.float32) for tap in view.taps)
        attention = class_attention(query, keys)[:, 1:]
        r, n = attention.shape
        rank = jnp.argsort(by_score(attention, None), axis=1)
        top = rank < self._most_attended(attention, view.count)[:, None]
        grid = self._grid(attention, top, view.count) & ~top
        # The most attended first, then those of the grid, then the others.
        patch = jnp.arange(n)
        order = jnp.argsort(jnp.where(top, rank, patch + jnp.where(grid, n, 2 * n)), axis=1)
        count = (top | grid).sum(1, dtype=jnp.int32)

        def in_order(x: Array) -> Array:
            return jnp.take_along_axis(x, order.reshape(r, n, *[1] * (x.ndim - 2)), axis=1)

        tokens = merge(
            in_order(view.whole.astype(jnp.float32)),
            in_order(keys[:, :, 1:].swapaxes(1, 2).reshape(r, n, -1)),
            in_order(attention),
            count,
            self.neighbours,
            capacity,
        )
        slots = jnp.arange(capacity)
        is_kept, valid = slots < count[:, None], slots <= count[:, None]
        index = jnp.pad(order.astype(jnp.int32), ((0, 0), (0, max(0, capacity - n))))
        index = index[:, :capacity]
        return Kept(
            index=jnp.where(is_kept, index, -1),
            place=jnp.where(is_kept, index, jnp.where(valid, n - 1, 0)),
            tokens=tokens.astype(view.tokens.dtype),
            valid=valid,
            count=count + 1,
        )

    @property
    def _is_adaptive(self) -> bool:
        return self.budget.kind == "own"

    def _most_attended(
        self, attention: Float[Array, "r n"], count: Int[Array, "r"]
    ) -> Int[Array, "r"]:
        """Returns how many patches are kept for their attention."""
        return _by_outliers(attention, kept_outliers) if self._is_adaptive else count - 1

    def _grid(
        self, attention: Float[Array, "r n"], top: Bool[Array, "r n"], count: Int[Array, "r"]
    ) -> Bool[Array, "r n"]:
        """Returns the patches that are kept for their position."""
        return jnp.zeros_like(top)


@dataclasses.dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Also keeps a grid of patches, three for each of the most attended ones.

    Without a budget the most attended patches are the outliers, as in the authors' program. With
    one they are a quarter of it, and the others are spread evenly over the remaining patches; this
    is our extension, as the authors' program supports a single count. It is not the unpruned model
    at any budget.
    """

    name = "prumerge_plus"
    label = "PruMerge+"

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts one more than there are tokens if each image decides: a grid of all."""
        return Schedule(self.budget.count(num_tokens), num_tokens + self._is_adaptive)

    def _most_attended(
        self, attention: Float[Array, "r n"], count: Int[Array, "r"]
    ) -> Int[Array, "r"]:
        """Counts the outliers, or a quarter of the kept tokens."""
        return _by_outliers(attention, kept_outliers) if self._is_adaptive else (count - 1) // 4

    def _grid(
        self, attention: Float[Array, "r n"], top: Bool[Array, "r n"], count: Int[Array, "r"]
    ) -> Bool[Array, "r n"]:
        """Returns a regular grid of patches, or evenly spaced remaining ones."""
        patch = jnp.arange(top.shape[1])
        if self._is_adaptive:
            stride = _by_outliers(attention, grid_stride)[:, None]
            return (patch % stride == 0) & (patch < len(patch) - 1)
        return evenly(~top, count - 1 - top.sum(1))


def class_attention(
    query: Float[Array, "r h c"], keys: Float[Array, "r h m c"]
) -> Float[Array, "r m"]:
    """Computes the class token's attention with all heads concatenated into one."""
    _, h, _, c = keys.shape
    scores = jnp.einsum("rhc,rhmc->rm", query, keys, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(scores * (h * c) ** -0.5, axis=1)


def count_outliers(attention: Float[Array, "r n"]) -> Int[Array, "r"]:
    """Counts values above the upper quartile by more than 1.5 interquartile ranges."""
    lower, upper = jnp.percentile(attention, jnp.array([25, 75]), axis=1)
    bound = upper + 1.5 * (upper - lower)
    return jnp.sum(attention > bound[:, None], axis=1, dtype=jnp.int32)


def kept_outliers(outliers: int, num_patches: int) -> int:
    """Returns how many patches the authors' program keeps for their attention.

    It stores their share in double precision and multiplies it by the number of patches again,
    which loses one for some numbers, such as 1 of 49 or 1 of 196; for 576 patches it never does.
    """
    return int(num_patches * (outliers / num_patches))


def grid_stride(outliers: int, num_patches: int) -> int:
    """Returns the stride of PruMerge+'s grid, from the same share; at least 1."""
    return max(1, int(1 / (max(1, outliers) / num_patches)) // 3)


def _by_outliers(
    attention: Float[Array, "r n"], rule: Callable[[int, int], int]
) -> Int[Array, "r"]:
    """Evaluates a rule, on the host, for each image's number of outliers."""
    n = attention.shape[1]
    return jnp.array([rule(c, n) for c in range(n + 1)], jnp.int32)[count_outliers(attention)]


def merge(
    tokens: Float[Array, "r n d"],
    keys: Float[Array, "r n c"],
    attention: Float[Array, "r n"],
    count: Int[Array, "r"],
    neighbours: int,
    capacity: int,
) -> Float[Array, "r k d"]:
    """Adds the most similar patches to each kept one, and sums up those that are not kept.

    The kept patches are the first `count`; similarity is the cosine of keys, and patches are added
    with their attention as weight. The sum of the others follows the kept ones, then zeros.
    """
    n = tokens.shape[1]
    most, exact = min(capacity, n), jax.lax.Precision.HIGHEST
    unit = unit_vectors(keys, None)
    likeness = jnp.einsum("rkc,rnc->rkn", unit[:, :most], unit, precision=exact)
    likeness = jnp.where(jnp.eye(most, n, dtype=bool), -2, likeness)
    _, nearest = jax.lax.top_k(likeness, min(neighbours, n - 1))
    rows, slots = jnp.arange(len(tokens))[:, None, None], jnp.arange(most)[:, None]
    added = jnp.zeros(likeness.shape, bool).at[rows, slots, nearest].set(True)
    weights = jnp.where(added, attention[:, None], 0) + jnp.eye(most, n)
    weights = jnp.pad(weights, ((0, 0), (0, capacity - most), (0, 0)))
    slots, patches, number = jnp.arange(capacity)[:, None], jnp.arange(n), count[:, None, None]
    others = jnp.where(patches >= number, attention[:, None], 0)
    weights = jnp.where(slots < number, weights, jnp.where(slots == number, others, 0))
    return jnp.einsum("rkn,rnd->rkd", weights, tokens, precision=exact)
