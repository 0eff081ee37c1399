"""PruMerge and PruMerge+: keep outliers of the class token's attention, merged with other patches.

Shang et al. (https://arxiv.org/abs/2403.15388). The query of the class token in the tower's last
block is compared with all keys, with heads concatenated. Patches whose attention is an outlier by
the interquartile range are kept, by descending attention. PruMerge+ also keeps a grid of patches,
which is finer for images with more outliers. The patches with the most similar keys are added to
each kept patch, weighted by attention. One more token is the weighted sum of all dropped patches.
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
    """Keeps the patches with the largest attention of the class token, and merges all others.

    Without a budget an image keeps its outliers. No budget reproduces the unpruned model, because
    the last token is always the sum of the dropped patches.

    Attributes:
        neighbours: number of patches that are added to each kept patch.
    """

    neighbours: int = 32

    name = "prumerge"
    label = "PruMerge"
    reads_videos: ClassVar[bool] = False
    version: ClassVar[int] = 2
    budgets: ClassVar[tuple[str, ...]] = ("adaptive", *EXACT)
    positions: ClassVar[str] = "compact"
    # With a budget, one in this many patches is kept for its attention.
    patches_per_top: ClassVar[int] = 1

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects models without a class token, and a negative number of neighbors."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        class_token_block(config, self.name)
        self.expect("neighbours", self.neighbours >= 0, "an integer from 0")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns taps of the class token's query and of all keys in the tower's last block."""
        return Tap("query", -1), Tap("keys", -1)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps patches by descending attention, followed by the sum of the dropped patches.

        Args:
            inputs: inputs of the pruner. The taps are the class token's query and all keys.
            capacity: static size k of the result.

        Returns:
            The kept patches and the sum, which takes the position of the last patch.
        """
        query, keys = (tap.astype(jnp.float32) for tap in inputs.taps)
        attention = class_attention(query, keys)[:, 1:]
        r, n = attention.shape
        rank = jnp.argsort(by_score(attention, None), axis=1)
        is_top = rank < self._count_top(attention, inputs.count)[:, None]
        in_grid = self._mark_grid(attention, is_top, inputs.count) & ~is_top
        # Patches kept for their attention come first, then the grid, then the dropped patches.
        # Multiples of n keep the sort keys of these groups apart.
        patch_index = jnp.arange(n)
        sort_key = jnp.where(is_top, rank, patch_index + jnp.where(in_grid, n, 2 * n))
        order = jnp.argsort(sort_key, axis=1)
        num_kept = (is_top | in_grid).sum(1, dtype=jnp.int32)

        def reorder(values: Array) -> Array:
            order_index = order.reshape(r, n, *[1] * (values.ndim - 2))
            return jnp.take_along_axis(values, order_index, axis=1)

        tokens = merge(
            reorder(inputs.whole.astype(jnp.float32)),
            reorder(keys[:, :, 1:].swapaxes(1, 2).reshape(r, n, -1)),
            reorder(attention),
            num_kept,
            neighbours=self.neighbours,
            capacity=capacity,
        )
        slots = jnp.arange(capacity)
        is_patch, valid = slots < num_kept[:, None], slots <= num_kept[:, None]
        index = jnp.pad(order.astype(jnp.int32), ((0, 0), (0, max(0, capacity - n))))
        index = index[:, :capacity]
        return Kept(
            index=jnp.where(is_patch, index, -1),
            place=jnp.where(is_patch, index, jnp.where(valid, n - 1, 0)),
            tokens=tokens.astype(inputs.tokens.dtype),
            valid=valid,
            count=num_kept + 1,
        )

    @property
    def _is_adaptive(self) -> bool:
        return self.budget.kind == "adaptive"

    def _count_top(self, attention: Float[Array, "r n"], count: Int[Array, "r"]) -> Int[Array, "r"]:
        """Returns the number of patches that are kept for their attention."""
        if self._is_adaptive:
            return _by_outliers(attention, kept_outliers)
        return (count - 1) // self.patches_per_top

    def _mark_grid(
        self, attention: Float[Array, "r n"], is_top: Bool[Array, "r n"], count: Int[Array, "r"]
    ) -> Bool[Array, "r n"]:
        """Marks the patches that are kept for their position."""
        return jnp.zeros_like(is_top)


@dataclasses.dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Also keeps a grid of patches, three for each patch that is kept for its attention.

    Without a budget the outliers are kept for their attention, as in the authors' program. With a
    budget, a quarter of it is kept for attention, and three quarters are spread evenly over the
    remaining patches. This is our extension: the authors' program supports a single count. No
    budget reproduces the unpruned model.
    """

    name = "prumerge_plus"
    label = "PruMerge+"
    patches_per_top: ClassVar[int] = 4

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the counts; without a budget, a grid may keep all patches and their sum."""
        return Schedule(self.budget.count(num_tokens), num_tokens + self._is_adaptive)

    def _mark_grid(
        self, attention: Float[Array, "r n"], is_top: Bool[Array, "r n"], count: Int[Array, "r"]
    ) -> Bool[Array, "r n"]:
        """Marks a regular grid of patches, or with a budget evenly spaced remaining patches."""
        patch_index = jnp.arange(is_top.shape[1])
        if self._is_adaptive:
            stride = _by_outliers(attention, grid_stride)[:, None]
            return (patch_index % stride == 0) & (patch_index < len(patch_index) - 1)
        return evenly(~is_top, count - 1 - is_top.sum(1))


def class_attention(
    query: Float[Array, "r h c"], keys: Float[Array, "r h m c"]
) -> Float[Array, "r m"]:
    """Computes the class token's attention with all heads concatenated into one."""
    _, h, _, c = keys.shape
    scores = jnp.einsum("rhc,rhmc->rm", query, keys, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(scores * (h * c) ** -0.5, axis=1)


def count_outliers(attention: Float[Array, "r n"]) -> Int[Array, "r"]:
    """Counts the values that exceed the upper quartile by more than 1.5 interquartile ranges."""
    lower, upper = jnp.percentile(attention, jnp.array([25, 75]), axis=1)
    threshold = upper + 1.5 * (upper - lower)
    return jnp.sum(attention > threshold[:, None], axis=1, dtype=jnp.int32)


def kept_outliers(outliers: int, num_patches: int) -> int:
    """Returns the number of patches that the authors' program keeps for their attention.

    The program stores the fraction of outliers in double precision and multiplies it by the number
    of patches again. Rounding loses one patch for some numbers, such as 1 of 49 or 1 of 196, but
    never for 576 patches.
    """
    return int(num_patches * (outliers / num_patches))


def grid_stride(outliers: int, num_patches: int) -> int:
    """Returns the stride of PruMerge+'s grid, such that it has about three patches per outlier."""
    patches_per_outlier = int(1 / (max(1, outliers) / num_patches))  # rounds as the authors do
    return max(1, patches_per_outlier // 3)


def _by_outliers(
    attention: Float[Array, "r n"], rule: Callable[[int, int], int]
) -> Int[Array, "r"]:
    """Applies a rule to the number of outliers of each image.

    Args:
        attention: [r, n] attention of the n patches of each image.
        rule: maps (number of outliers, number of patches) to an integer. The rule runs on the host
            for all possible numbers, because it needs Python's double precision.

    Returns:
        [r] results of the rule.
    """
    n = attention.shape[1]
    table = jnp.array([rule(outliers, n) for outliers in range(n + 1)], jnp.int32)
    return table[count_outliers(attention)]


def merge(
    tokens: Float[Array, "r n d"],
    keys: Float[Array, "r n c"],
    attention: Float[Array, "r n"],
    num_kept: Int[Array, "r"],
    *,
    neighbours: int,
    capacity: int,
) -> Float[Array, "r k d"]:
    """Adds the most similar patches to each kept patch, and sums up the dropped patches.

    Each patch is added with its attention as the weight.

    Args:
        tokens: [r, n, d] n patches of each of r images, the kept patches first.
        keys: [r, n, c] keys of the patches; similarity is the cosine between keys.
        attention: [r, n] attention of the patches.
        num_kept: [r] number of kept patches.
        neighbours: number of patches that are added to each kept patch.
        capacity: static size k of the result.

    Returns:
        [r, k, d] the merged patches, followed by the sum of the dropped patches, then zeros.
    """
    n = tokens.shape[1]
    max_kept, precision = min(capacity, n), jax.lax.Precision.HIGHEST
    unit_keys = unit_vectors(keys, None)
    cosine = jnp.einsum("rkc,rnc->rkn", unit_keys[:, :max_kept], unit_keys, precision=precision)
    # A patch is not its own neighbour: -2 is below all cosines.
    cosine = jnp.where(jnp.eye(max_kept, n, dtype=bool), -2, cosine)
    _, nearest = jax.lax.top_k(cosine, min(neighbours, n - 1))
    row_index, kept_index = jnp.arange(len(tokens))[:, None, None], jnp.arange(max_kept)[:, None]
    is_neighbour = jnp.zeros(cosine.shape, bool).at[row_index, kept_index, nearest].set(True)
    # Each slot of the result is a weighted sum of all patches.
    patch_weights = jnp.where(is_neighbour, attention[:, None], 0) + jnp.eye(max_kept, n)
    patch_weights = jnp.pad(patch_weights, ((0, 0), (0, capacity - max_kept), (0, 0)))
    slot, patch_index = jnp.arange(capacity)[:, None], jnp.arange(n)
    num_kept = num_kept[:, None, None]
    dropped_weights = jnp.where(patch_index >= num_kept, attention[:, None], 0)
    sum_weights = jnp.where(slot == num_kept, dropped_weights, 0)
    weights = jnp.where(slot < num_kept, patch_weights, sum_weights)
    return jnp.einsum("rkn,rnd->rkd", weights, tokens, precision=precision)
