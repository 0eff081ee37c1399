"""Arguments of an episode, checked and broadcast to full shape."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.checks import (
    AnyArray,
    is_integer,
    is_static,
    require,
    require_count,
    require_finite,
    require_row_numbers,
)
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import Decoder
from stepprune_jax.policy.params import Params
from stepprune_jax.policy.trajectory import Limits


class Bounds(NamedTuple):
    """Bounds of an episode as passed to `select`; None where not given."""

    max_steps: int | None = None
    min_tokens: ArrayLike | None = None
    max_tokens: ArrayLike | None = None
    budget: ArrayLike | None = None
    group: int | None = None

    def steps(self, config: PolicyConfig, num_tokens: int) -> int:
        """Returns T_max, at most N.

        Raises:
            ValueError: T_max is below 1.
        """
        steps = config.steps(num_tokens) if self.max_steps is None else self.max_steps
        good = is_integer(steps) and steps > 0
        require(good, "max_steps (T_max)", repr(steps), "an integer from 1")
        return min(int(steps), num_tokens)

    def read(self, config: PolicyConfig, batch: int, num_tokens: int) -> tuple[int, Limits]:
        """Returns T_max and the limits of each row.

        Raises:
            ValueError: T_max below 1, a count out of range where it can be read, `min_tokens` above
                `max_tokens`, or a budget together with another bound.
        """
        n, budget = num_tokens, self.budget
        steps = self.steps(config, n)
        if budget is not None:
            require(
                self.min_tokens is None and self.max_tokens is None,
                "budget",
                "given with min_tokens or max_tokens",
                "one or the other",
            )
            exact = require_count("budget", budget, 1, steps, batch)
            return steps, Limits(exact, exact)
        low = min(config.min_tokens, steps) if self.min_tokens is None else self.min_tokens
        high = steps if self.max_tokens is None else self.max_tokens
        most = require_count("max_tokens", high, 0, n, batch)
        least = require_count("min_tokens", low, 0, steps, batch)
        given = self.min_tokens is not None and self.max_tokens is not None
        if given and is_static(low) and is_static(high):
            above = bool((np.asarray(low) > np.asarray(high)).any())
            require(not above, "min_tokens", low, f"at most max_tokens ({high})")
        return steps, Limits(least, most)

    def tokens_a_step(self, config: PolicyConfig, num_tokens: int) -> int:
        """Returns the number of tokens taken from one pointer distribution, at most N.

        Raises:
            ValueError: the group is below 1.
        """
        group = config.group if self.group is None else self.group
        require(is_integer(group) and group >= 1, "group", repr(group), "an integer from 1")
        return min(group, num_tokens)


class Episode(NamedTuple):
    """Arguments of an episode, checked and broadcast to full shape.

    Attributes:
        decoder: from `init_fn`.
        slots: M, zero in the padding.
        image_mask: True at real tokens.
        limits: bounds on the count, at most the row's number of tokens.
        stop_bias: added to the stop logits.
        steps: T_max.
        group: tokens taken from one pointer distribution.
    """

    decoder: Decoder
    slots: Float[Array, "b m d"]
    image_mask: Bool[Array, "b n"]
    limits: Limits
    stop_bias: Float[Array, "b"]
    steps: int
    group: int


def prepare(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    image_mask: Bool[AnyArray, "b n"] | None,
    bounds: Bounds,
    stop_bias: ArrayLike,
    init_fn: Callable[..., Decoder],
) -> Episode:
    """Checks the arguments of `select` and prepares its decoder.

    Raises:
        ValueError: as `select`.
    """
    b, n = memory.shape[0], memory.shape[1] - 1
    there = b > 0 and n > 0
    require(there, "memory", f"of shape {memory.shape}", "at least one token and the stop slot")
    if image_mask is None:
        image_mask = jnp.ones((b, n), bool)
    require(image_mask.shape == (b, n), "image_mask", f"of shape {image_mask.shape}", f"[{b}, {n}]")
    image_mask = jnp.asarray(image_mask)
    memory_mask = jnp.concatenate([image_mask, jnp.ones((b, 1), bool)], axis=1)
    require_finite("memory", memory, memory_mask)
    steps, limits = bounds.read(config, b, n)
    group = bounds.tokens_a_step(config, n)
    # A row cannot keep more tokens than it has, whatever the budget.
    most = jnp.minimum(limits.max_tokens, jnp.sum(image_mask, axis=1, dtype=jnp.int32))
    limits = Limits(jnp.minimum(limits.min_tokens, most), most)
    require_row_numbers("stop_bias", stop_bias, b)
    slots = jnp.where(memory_mask[..., None], memory, 0)
    decoder = init_fn(params, config, slots, memory_mask, steps)
    bias = jnp.broadcast_to(jnp.asarray(stop_bias, layers.score_dtype(memory.dtype)), (b,))
    return Episode(decoder, slots, image_mask, limits, bias, steps, group)
