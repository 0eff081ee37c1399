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
    """Reorders the tokens of an image so that its parts, such as tiles, take turns.

    The result begins with the best token of each part, in ascending order of the parts. Then come
    the second best tokens of the parts, and so on.

    Args:
        order: [r, n] indices of the n tokens of each row, best first.
        part: [r, n] part of each token, indexed like the tokens. Tokens of part -1 come last.

    Returns:
        [r, n] reordered indices.
    """
    n = order.shape[1]
    part = jnp.take_along_axis(part, order, axis=1)  # from here on, the best token comes first
    # After sorting by part, the rank of a token in its part is the distance from the part's first
    # token. The sort is stable, so a part's tokens remain ordered from best to worst.
    by_part = jnp.argsort(part, axis=1, stable=True)
    sorted_part = jnp.take_along_axis(part, by_part, axis=1)
    is_first_of_part = jnp.diff(sorted_part, axis=1, prepend=-2) > 0
    position = jnp.broadcast_to(jnp.arange(n), order.shape)
    first_position = lax.cummax(jnp.where(is_first_of_part, position, 0), axis=1)
    inverse_by_part = jnp.argsort(by_part, axis=1)
    turn = jnp.take_along_axis(position - first_position, inverse_by_part, axis=1)
    turn = jnp.where(part < 0, n, turn)
    return jnp.take_along_axis(order, jnp.lexsort((part, turn), axis=1), axis=1)


def start_turns(is_token: Bool[Array, "r n"], part: Int[Array, "r n"]) -> Int[Array, "r n"]:
    """Returns the turn of each token before the first choice, if parts of an image take turns.

    A greedy method chooses among the tokens with the smallest turn, and then calls `advance_turns`.

    Args:
        is_token: [r, n] False at padding.
        part: [r, n] part of the image to which each token belongs, from 0. The parts take turns in
            ascending order. Tokens of part -1 are chosen last.

    Returns:
        [r, n] int32 turns. The parts begin with turns 0, 1, ... and use at most n turns each, so
        their turns are below n * n, which is the turn of part -1. The turn of padding is 2 n * n.
    """
    n = part.shape[1]
    return jnp.where(is_token, jnp.where(part < 0, n * n, part), 2 * n * n).astype(jnp.int32)


def advance_turns(
    turn: Int[Array, "r n"], part: Int[Array, "r n"], choice: Int[Array, "r 1"]
) -> Int[Array, "r n"]:
    """Returns the turn of each token after a choice; see `start_turns`.

    The next turn of the chosen token's part comes after the turns of all other parts, of which
    there are at most n. The chosen token gets the turn of padding.
    """
    n = part.shape[1]
    same_part = part == jnp.take_along_axis(part, choice, axis=1)
    turn = turn + jnp.where(same_part & (turn < n * n), n, 0)
    return jnp.where(jnp.arange(n) == choice, 2 * n * n, turn)


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
    """Marks the slots of a sequence to keep: all text, and the best tokens of each image.

    A slot is a position of a padded sequence. It holds a text token, a visual token or padding.

    Args:
        scores: [b, s] score of each of the s slots of b sequences; ties go to the earlier slot.
        image: [b, s] image of each slot, from 0 to j - 1; -1 for text and padding.
        count: [b, j] number of tokens to keep of each of the sequence's j images.

    Returns:
        [b, s] True at slots to keep, which include all slots with image -1.
    """
    # Slots are sorted by image, then by score. The rank within an image is the distance from the
    # image's first slot in this order, which begins with all slots of image -1.
    order = jnp.lexsort((-scores.astype(jnp.float32), image), axis=1)
    rank = jnp.argsort(order, axis=1)
    image_sizes = jnp.sum(image[..., None] == jnp.arange(count.shape[1]), axis=1, dtype=jnp.int32)
    num_text = jnp.sum(image < 0, axis=1, keepdims=True)
    num_visual_before = jnp.cumsum(image_sizes, axis=1) - image_sizes
    first_rank = num_text + num_visual_before  # [b, j] rank of each image's best slot
    image_index = jnp.maximum(image, 0)  # avoids an invalid index for text
    rank_in_image = rank - jnp.take_along_axis(first_rank, image_index, axis=1)
    return (image < 0) | (rank_in_image < jnp.take_along_axis(count, image_index, axis=1))


def evenly(pool: Bool[Array, "*r n"], count: Int[Array, "*r"]) -> Bool[Array, "*r n"]:
    """Marks evenly spaced tokens among candidates.

    With m candidates and a count of c, the i-th marked token is the candidate with index
    floor(i m / c), for i from 0 to c - 1.

    Args:
        pool: [..., n] True at the candidates among n tokens.
        count: [...] number of candidates to mark.

    Returns:
        [..., n] True at the marked tokens. All candidates are marked if `count` exceeds their
        number.
    """
    num_candidates_up_to = jnp.cumsum(pool, axis=-1, dtype=jnp.int32)
    num_candidates = jnp.maximum(num_candidates_up_to[..., -1:], 1)

    def count_marked(num_first_candidates: Int[Array, "*r n"]) -> Int[Array, "*r n"]:
        # The number of i with floor(i m / c) < q is ceil(q c / m).
        return -(-num_first_candidates * count[..., None] // num_candidates)

    return pool & (count_marked(num_candidates_up_to) > count_marked(num_candidates_up_to - 1))


def map_tokens(
    function: Callable[..., Array],
    tokens: Shaped[Array, "r n c"],
    *token_arrays: Int[Array, "#r n"],
) -> Array:
    """Applies a function to chunks of tokens, which limits the memory for intermediates.

    If there are few tokens, there is a single chunk; see `map_queries` for the size of a chunk.

    Args:
        function: maps a chunk of q tokens [r, q, c], and the matching chunk [r or 1, q] of each of
            `token_arrays`, to [r, q, ...].
        tokens: [r, n, c] n tokens of each row, with c channels.
        *token_arrays: [r or 1, n] further inputs of the function, one number per token.

    Returns:
        [r, n, ...] the results of all chunks, concatenated along the tokens.
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
        values: [r, n, c] values of the n tokens of each row, with c channels.
        group: [r, n] number of each token's group.
        groups: [r or 1, w] numbers of the w groups whose means are returned.

    Returns:
        [r, w, c] means.
    """

    def average_chunk(chunk_groups: Int[Array, "r q 1"]) -> Float[Array, "r q c"]:
        is_member = (chunk_groups == group[:, None]).astype(jnp.float32)
        total = jnp.einsum("rqn,rnc->rqc", is_member, values, precision=lax.Precision.HIGHEST)
        return total / jnp.maximum(1, is_member.sum(2, keepdims=True))

    groups = jnp.broadcast_to(groups, (len(values), groups.shape[1]))
    return map_tokens(average_chunk, groups[..., None])  # chunks of groups, not of tokens


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
