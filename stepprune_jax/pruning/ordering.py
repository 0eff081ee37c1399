"""Orders, choices and groups of tokens, which several pruners share."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy.layers import map_queries
from stepprune_jax.user_input import UserError, require


def by_score(scores: Float[Array, "r n"], valid: Bool[Array, "r n"] | None) -> Int[Array, "r n"]:
    """Orders tokens by score, best first, ties by position, padding last."""
    scores = scores.astype(jnp.float32)
    if valid is not None:
        scores = jnp.where(valid, scores, jnp.finfo(jnp.float32).min)
    return jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)


def in_turns(order: Int[Array, "r n"], part: Int[Array, "r n"]) -> Int[Array, "r n"]:
    """Takes the tokens of each part in turn, the best of each first; those of part -1 are last."""
    part = jnp.take_along_axis(part, order, axis=1)
    place = jnp.broadcast_to(jnp.arange(order.shape[1]), order.shape)
    by_part = jnp.argsort(part, axis=1, stable=True)
    sorted_part = jnp.take_along_axis(part, by_part, axis=1)
    begins = jnp.diff(sorted_part, axis=1, prepend=-2) > 0
    within = place - lax.cummax(jnp.where(begins, place, 0), axis=1)
    turn = jnp.take_along_axis(within, jnp.argsort(by_part, axis=1), axis=1)
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
    """Keeps text (where `image` is -1), and the `count` best tokens of each image.

    Ties go to the earlier token.
    """
    # Sorted by image, then by score: the rank within an image is the distance from its first.
    order = jnp.lexsort((-scores.astype(jnp.float32), image), axis=1)
    rank = jnp.argsort(order, axis=1)
    of_image = image[..., None] == jnp.arange(count.shape[1])
    earlier = jnp.cumsum(of_image.sum(1, dtype=jnp.int32), axis=1)
    text = jnp.sum(image < 0, axis=1, keepdims=True)
    first = jnp.concatenate([text, text + earlier[:, :-1]], axis=1)
    at = jnp.maximum(image, 0)
    within = rank - jnp.take_along_axis(first, at, axis=1)
    return (image < 0) | (within < jnp.take_along_axis(count, at, axis=1))


def evenly(pool: Bool[Array, "*r n"], wanted: Int[Array, "*r"]) -> Bool[Array, "*r n"]:
    """Picks g `wanted` of the m tokens in a pool: the i-th is the floor(i m / g)-th."""
    number = jnp.cumsum(pool, axis=-1, dtype=jnp.int32)
    wanted, size = wanted[..., None], jnp.maximum(number[..., -1:], 1)
    # How many picks lie before the k-th of the pool: the i with floor(i m / g) < k.
    before, up_to = (-(-k * wanted // size) for k in (number - 1, number))
    return pool & (up_to > before)


def map_tokens(
    function: Callable[..., Array], tokens: Shaped[Array, "r n c"], *by_token: Int[Array, "#r n"]
) -> Array:
    """Compares tokens with all others, some at a time if they are many; see `map_queries`.

    Args:
        function: maps some tokens [r, q, c], and their part of each of `by_token`, to [r, q, ...].
        tokens: [r, n, c] the tokens.
        by_token: [r or 1, n] arrays.

    Returns:
        [r, n, ...] the results.
    """

    def part(part: Array, *own: Array) -> Array:
        return function(part[:, 0], *own)

    return map_queries(part, tokens[:, None], *by_token, axis=1)


def group_means(
    values: Float[Array, "r n c"], group: Int[Array, "r n"], wanted: Int[Array, "#r w"]
) -> Float[Array, "r w c"]:
    """Averages values over each `wanted` group of tokens; 0 for a group without any.

    The sums have a fixed order, unlike a scatter on a GPU.
    """

    def mean(wanted: Int[Array, "r q 1"]) -> Float[Array, "r q c"]:
        member = (wanted == group[:, None]).astype(jnp.float32)
        total = jnp.einsum("rqn,rnc->rqc", member, values, precision=lax.Precision.HIGHEST)
        return total / jnp.maximum(1, member.sum(2, keepdims=True))

    wanted = jnp.broadcast_to(wanted, (len(values), wanted.shape[1]))
    return map_tokens(mean, wanted[..., None])


def tile_taps(config: ModelConfig) -> tuple[Tap, ...]:
    """Returns the tap that tells the tile of each token, where images are seen in tiles."""
    return (Tap("tile", -1),) * config.is_tiled


def require_grid(config: ModelConfig, name: str) -> None:
    """Raises a ValueError that names the pruner if tokens are not the cells of a grid."""
    require(not config.is_tiled, f"{name}: it needs tokens on one grid, and this model has tiles")


def ranking_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block that ranks tokens, with or without a class token."""
    received = config.received_block
    return class_token_block(config, name) if received is None else received


def class_token_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block whose class token ranks the projected patches.

    Raises:
        ValueError: there is none; the message names the pruner.
    """
    block = config.class_token_block
    if block is None:
        raise UserError(f"{name}: the model's tower has no [CLS] attention to rank patches by")
    return block
