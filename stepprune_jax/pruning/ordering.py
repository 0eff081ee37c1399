"""Functions that order, choose and group tokens, for several pruners."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy.layers import map_queries
from stepprune_jax.user_input import UserError


def by_score(scores: Float[Array, "r n"], valid: Bool[Array, "r n"] | None) -> Int[Array, "r n"]:
    """Returns the indices of the tokens by descending score; padding comes last.

    Ties go to the earlier token.
    """
    scores = scores.astype(jnp.float32)
    if valid is not None:
        scores = jnp.where(valid, scores, jnp.finfo(jnp.float32).min)
    return jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)


def in_turns(order: Int[Array, "r n"], part: Int[Array, "r n"]) -> Int[Array, "r n"]:
    """Reorders tokens so that the parts of an image take turns.

    The first tokens are the best token of each part, then the second best of each, and so on.

    Args:
        order: [r, n] indices of the tokens, best first.
        part: [r, n] number of each token's part; tokens of part -1 come last.
    """
    part = jnp.take_along_axis(part, order, axis=1)
    place = jnp.broadcast_to(jnp.arange(order.shape[1]), order.shape)
    part_order = jnp.argsort(part, axis=1, stable=True)
    sorted_part = jnp.take_along_axis(part, part_order, axis=1)
    is_first = jnp.diff(sorted_part, axis=1, prepend=-2) > 0
    rank_in_part = place - lax.cummax(jnp.where(is_first, place, 0), axis=1)
    turn = jnp.take_along_axis(rank_in_part, jnp.argsort(part_order, axis=1), axis=1)
    turn = jnp.where(part < 0, order.shape[1], turn)
    return jnp.take_along_axis(order, jnp.lexsort((part, turn), axis=1), axis=1)


def unit_vectors(
    tokens: Float[Array, "r n d"], valid: Bool[Array, "r n"] | None
) -> Float[Array, "r n d"]:
    """Scales tokens to length 1, in float32; padding and zero vectors become 0."""
    tokens = tokens.astype(jnp.float32)
    if valid is not None:
        tokens = jnp.where(valid[..., None], tokens, 0)
    norm = jnp.linalg.norm(tokens, axis=-1, keepdims=True)
    return tokens / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)


def keep_best(
    scores: Float[Array, "b s"], image: Int[Array, "b s"], count: Int[Array, "b j"]
) -> Bool[Array, "b s"]:
    """Marks the slots to keep: all text, and the best tokens of each image.

    Args:
        scores: [b, s] score of each slot; ties go to the earlier slot.
        image: [b, s] index of each slot's image; -1 for text.
        count: [b, j] number of tokens to keep of each image.

    Returns:
        [b, s] True at slots to keep.
    """
    # Slots are sorted by image, then by score. The rank within an image is the distance from the
    # image's first slot in this order.
    order = jnp.lexsort((-scores.astype(jnp.float32), image), axis=1)
    rank = jnp.argsort(order, axis=1)
    is_in_image = image[..., None] == jnp.arange(count.shape[1])
    num_up_to_image = jnp.cumsum(is_in_image.sum(1, dtype=jnp.int32), axis=1)
    num_text = jnp.sum(image < 0, axis=1, keepdims=True)
    first = jnp.concatenate([num_text, num_text + num_up_to_image[:, :-1]], axis=1)
    image_index = jnp.maximum(image, 0)
    rank_in_image = rank - jnp.take_along_axis(first, image_index, axis=1)
    return (image < 0) | (rank_in_image < jnp.take_along_axis(count, image_index, axis=1))


def evenly(pool: Bool[Array, "*r n"], count: Int[Array, "*r"]) -> Bool[Array, "*r n"]:
    """Marks evenly spaced tokens of a pool.

    Of the m tokens in the pool, g = `count` are marked: the i-th is the token with index
    floor(i m / g) in the pool.
    """
    rank = jnp.cumsum(pool, axis=-1, dtype=jnp.int32)
    count, size = count[..., None], jnp.maximum(rank[..., -1:], 1)
    # Number of marked tokens before the k-th token of the pool: all i with floor(i m / g) < k.
    before, up_to = (-(-k * count // size) for k in (rank - 1, rank))
    return pool & (up_to > before)


def map_tokens(
    function: Callable[..., Array],
    tokens: Shaped[Array, "r n c"],
    *token_arrays: Int[Array, "#r n"],
) -> Array:
    """Applies a function to all tokens, or to chunks of them if there are many.

    See `map_queries`.

    Args:
        function: maps a chunk of tokens [r, q, c], and the matching chunk of each of
            `token_arrays`, to [r, q, ...].
        tokens: [r, n, c] tokens.
        *token_arrays: [r or 1, n] further arrays with a token axis.

    Returns:
        [r, n, ...] the results of all chunks.
    """

    def apply_chunk(chunk: Array, *chunk_arrays: Array) -> Array:
        return function(chunk[:, 0], *chunk_arrays)

    return map_queries(apply_chunk, tokens[:, None], *token_arrays, axis=1)


def group_means(
    values: Float[Array, "r n c"], group: Int[Array, "r n"], groups: Int[Array, "#r w"]
) -> Float[Array, "r w c"]:
    """Returns the mean of the values of each group; 0 for an empty group.

    The sums have a fixed order, unlike a scatter on a GPU.

    Args:
        values: [r, n, c] values of the tokens.
        group: [r, n] group of each token.
        groups: [r or 1, w] groups to average over.
    """

    def mean(groups: Int[Array, "r q 1"]) -> Float[Array, "r q c"]:
        is_member = (groups == group[:, None]).astype(jnp.float32)
        total = jnp.einsum("rqn,rnc->rqc", is_member, values, precision=lax.Precision.HIGHEST)
        return total / jnp.maximum(1, is_member.sum(2, keepdims=True))

    groups = jnp.broadcast_to(groups, (len(values), groups.shape[1]))
    return map_tokens(mean, groups[..., None])


def tile_taps(config: ModelConfig) -> tuple[Tap, ...]:
    """Returns the tap of each token's tile, for models that split images into tiles."""
    return (Tap("tile", -1),) * config.is_tiled


def require_grid(config: ModelConfig, name: str) -> None:
    """Raises a UserError that names the pruner if a model splits images into tiles."""
    if config.is_tiled:
        raise UserError(f"{name}: it needs tokens on one grid, and this model has tiles")


def ranking_block(config: ModelConfig, name: str) -> int:
    """Returns the tower's block whose attention ranks tokens, with or without a class token."""
    block = config.received_block
    return class_token_block(config, name) if block is None else block


def class_token_block(config: ModelConfig, name: str) -> int:
    """Returns the tower's block whose class token ranks the projected patches.

    Raises:
        ValueError: the tower has no class token; the message names the pruner.
    """
    block = config.class_token_block
    if block is None:
        raise UserError(f"{name}: the model's tower has no [CLS] attention to rank patches by")
    return block
