"""From logits to a token: greedy, temperature, nucleus, repetition penalty."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.jax_settings import THREEFRY, threefry
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import expect

Scalar = float | np.floating[Any] | Array


class Sampling(NamedTuple):
    """Settings of sampling.

    Users write numbers, with None for a default of the model. `resolve` converts the numbers to the
    arrays that programs read; the result is called *resolved*. Different numbers need no
    compilation. Greedy decoding, sampling and a repetition penalty are different programs.

    Attributes:
        key: a seed, or a PRNG key. `decoding.row_keys` derives one key per row of a batch. The same
            key gives the same answer. Resolved: None if greedy.
        temperature: sampling temperature, the divisor of the logits; 0 is greedy. Resolved: None if
            greedy.
        top_p: probability mass to sample from, see `nucleus`. Resolved: None if greedy.
        stop_ids: [t] ids that end a row; None selects the ids of the model's configuration.
        repetition_penalty: penalty of `penalise`; None selects the penalty of the model's folder.
            Resolved: None if there is no penalty.
    """

    key: int | Array | None = 0
    temperature: Scalar | None = 0.0
    top_p: Scalar | None = 1.0
    stop_ids: Sequence[int] | Int[ArrayLike, "t"] | None = None
    repetition_penalty: Scalar | None = None

    def check(self) -> None:
        """Checks the values that a user has written.

        Raises:
            ValueError: a value is out of its range; the message names the value.
        """
        # numpy scalars are checked as Python numbers.
        temperature, top_p, penalty, seed = (
            value.item() if isinstance(value, np.generic) else value
            for value in (self.temperature, self.top_p, self.repetition_penalty, self.key)
        )
        if isinstance(seed, jax.Array | np.ndarray):
            is_seed = not threefry(seed).shape
        else:
            is_seed = is_count(seed, 0) and seed < 1 << 32
        is_temperature = is_number(temperature) and temperature >= 0
        is_penalty = penalty is None or (is_number(penalty) and penalty > 0)
        expect("temperature", temperature, is_temperature, "a number >= 0 (0 is greedy)")
        expect("top_p", top_p, is_number(top_p) and 0 < top_p <= 1, "a number in (0, 1]")
        expect("repetition_penalty", penalty, is_penalty, "a number > 0 (1: none)")
        expect("seed", seed, is_seed, "an integer from 0, below 2**32")

    def resolve(self, stop_ids: Sequence[int], repetition_penalty: float) -> "Sampling":
        """Returns the resolved form, the arrays that programs read.

        Args:
            stop_ids: stop ids of the model, used if `self.stop_ids` is None.
            repetition_penalty: penalty of the model, used if `self.repetition_penalty` is None.
        """
        key, temperature, top_p = None, None, None  # of greedy decoding
        if self.temperature and self.key is not None and self.top_p is not None:
            key = self.key
            if not isinstance(key, jax.Array | np.ndarray):
                key = jax.random.key(key, impl=THREEFRY)
            key = threefry(key)
            temperature, top_p = np.float32(self.temperature), np.float32(self.top_p)
        penalty = self.repetition_penalty
        if penalty is None:
            penalty = repetition_penalty
        return Sampling(
            key=key,
            temperature=temperature,
            top_p=top_p,
            stop_ids=np.array(stop_ids if self.stop_ids is None else self.stop_ids, np.int32),
            repetition_penalty=None if penalty == 1 else np.float32(penalty),
        )


def greedy(stop_ids: Iterable[int]) -> Sampling:
    """Returns resolved greedy sampling without a penalty."""
    return Sampling().resolve([*stop_ids], 1.0)


def penalise(
    logits: Float[Array, "*b v"], seen: Bool[Array, "*b v"], penalty: ArrayLike
) -> Float[Array, "*b v"]:
    """Lowers the logits of tokens that occur in the prompt or in the answer.

    Keskar et al. (https://arxiv.org/abs/1909.05858), Sec. 4.1, as interpreted by `transformers`:
    positive logits are divided by the penalty, negative ones multiplied.

    Args:
        logits: [..., v] logits of the next token.
        seen: [..., v] True at tokens of the prompt and of the answer so far.
        penalty: a positive number; 1 changes nothing.

    Returns:
        [..., v] float32 logits.
    """
    logits = logits.astype(jnp.float32)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def nucleus(logits: Float[Array, "*b v"], top_p: ArrayLike) -> Bool[Array, "*b v"]:
    """Returns the smallest set of tokens whose probabilities sum to at least `top_p`.

    Holtzman et al. (https://arxiv.org/abs/1904.09751), Sec. 3.1. The most likely token is always in
    the set. Of equally likely tokens, the token with the lower id comes first.

    Args:
        logits: [..., v] float32, already divided by the temperature.
        top_p: probability in (0, 1].

    Returns:
        [..., v] True = the token is in the set.
    """
    prob = jax.nn.softmax(logits, axis=-1)
    order = jnp.argsort(-prob, axis=-1, stable=True)
    sorted_prob = jnp.take_along_axis(prob, order, axis=-1)
    cumulative = jnp.cumsum(sorted_prob, axis=-1)
    # A token belongs to the set if the likelier tokens have a total probability below `top_p`.
    prob_before = jnp.pad(cumulative[..., :-1], [(0, 0)] * (cumulative.ndim - 1) + [(1, 0)])
    is_in_set = (prob_before < top_p).at[..., 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(is_in_set, rank, axis=-1)


def sample(
    key: Array | None,
    logits: Float[Array, "*b v"],
    temperature: Scalar | None,
    top_p: Scalar | None,
) -> Int[Array, "*b"]:
    """Samples one token per row.

    Temperature and `top_p` may be traced, so different values need no compilation. `lax.cond` skips
    the computation that a value does not need.

    Args:
        key: PRNG key; consumed. None selects the largest logit, as for `temperature`.
        logits: [..., v] logits of the next token; converted to float32.
        temperature: divisor of the logits. 0 selects the largest logit; of equal logits, the lowest
            id. None does the same and builds a program without sampling.
        top_p: tokens are sampled from `nucleus(logits / temperature, top_p)`; 1 keeps all tokens.

    Returns:
        [...] int32 ids.
    """
    logits = logits.astype(jnp.float32)

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    if key is None or temperature is None or top_p is None:
        return greedy()
    divisor, mass = jnp.float32(temperature), jnp.float32(top_p)

    def sampled():
        # The largest logit becomes 0, so that a tiny temperature does not overflow.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / divisor
        lowest = jnp.finfo(jnp.float32).min
        scaled = jnp.maximum(scaled, lowest)
        nucleus_logits = jax.lax.cond(
            mass < 1,
            lambda: jnp.where(nucleus(scaled, mass), scaled, lowest),
            lambda: scaled,
        )
        return jax.random.categorical(key, nucleus_logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(divisor > 0, sampled, greedy)
