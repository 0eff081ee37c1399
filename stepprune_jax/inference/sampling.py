"""From logits to a token: greedy, temperature, nucleus, repetition penalty."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.settings import is_number


def check_sampling(
    temperature: float | int, top_p: float | int, repetition_penalty: float | int = 1.0
) -> None:
    """Checks sampling settings.

    Args:
        temperature: divisor of logits; 0 is greedy.
        top_p: probability mass to sample from.
        repetition_penalty: penalty of `penalise`.

    Raises:
        ValueError: a temperature below 0 or not finite, top_p outside (0, 1], or a penalty that is
            not a positive number.
    """
    if not (is_number(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature!r}, expected a number >= 0 (0 is greedy)")
    if not (is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p is {top_p!r}, expected a number in (0, 1]")
    if not (is_number(repetition_penalty) and repetition_penalty > 0):
        raise ValueError(
            f"repetition_penalty is {repetition_penalty!r}, expected a number > 0 (1 is none)"
        )


def penalise(
    logits: Float[Array, "*b v"], seen: Bool[Array, "*b v"], penalty: ArrayLike
) -> Float[Array, "*b v"]:
    """Penalises tokens that have been read or generated before.

    Keskar et al. (https://arxiv.org/abs/1909.05858), Sec. 4.1, as interpreted by `transformers`:
    positive logits are divided by the penalty, negative ones multiplied.

    Args:
        logits: [..., v] logits of the next token.
        seen: [..., v] True at tokens of the prompt and of the answer so far.
        penalty: a positive number; 1 changes nothing.

    Returns:
        [..., v] float32.
    """
    logits = logits.astype(jnp.float32)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def nucleus(logits: Float[Array, "*b v"], top_p: ArrayLike) -> Bool[Array, "*b v"]:
    """Returns the smallest set of tokens whose probabilities sum to at least `top_p`.

    Holtzman et al. (https://arxiv.org/abs/1904.09751), Sec. 3.1. The most likely token is always in
    the set; of equally likely ones, the one with the lower id comes first.

    Args:
        logits: [..., v] float32, already divided by the temperature.
        top_p: mass in (0, 1].

    Returns:
        [..., v] True = in the set.
    """
    prob = jax.nn.softmax(logits, axis=-1)
    order = jnp.argsort(-prob, axis=-1, stable=True)
    ranked = jnp.take_along_axis(prob, order, axis=-1)
    mass = jnp.cumsum(ranked, axis=-1)
    # A token is needed as long as those before it fall short.
    before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
    kept = (before < top_p).at[..., 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, rank, axis=-1)


def sample(
    key: Array, logits: Float[Array, "*b v"], temperature: ArrayLike, top_p: ArrayLike
) -> Int[Array, "*b"]:
    """Draws one token per row.

    Temperature and `top_p` may be traced: changing them compiles nothing, and computation that a
    setting does not need is skipped.

    Args:
        key: PRNG key; consumed.
        logits: [..., v] logits of the next token; converted to float32.
        temperature: divisor of logits; 0 takes the largest logit, lowest id first.
        top_p: draws come from `nucleus(logits / temperature, top_p)`; 1 keeps all tokens.

    Returns:
        [...] int32 ids.
    """
    logits = logits.astype(jnp.float32)
    temperature, top_p = jnp.float32(temperature), jnp.float32(top_p)

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn():
        # Shifted first: a tiny temperature would overflow otherwise.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        lowest = jnp.finfo(jnp.float32).min
        scaled = jnp.maximum(scaled, lowest)
        kept = jax.lax.cond(
            top_p < 1,
            lambda: jnp.where(nucleus(scaled, top_p), scaled, lowest),
            lambda: scaled,
        )
        return jax.random.categorical(key, kept, axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature > 0, drawn, greedy)
