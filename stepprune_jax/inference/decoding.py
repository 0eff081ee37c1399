"""Prefill, one decode step, and the loop over it, as pure functions.

A whole answer (`decode`) and a loop on the host that looks at each token (`decode` with a limit one
higher each time) run the same step in the same program, so both give the same tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from stepprune_jax.inference.sampling import sample
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.parallel.placement import constrain_rows, jit_for_weights


class Settings(NamedTuple):
    """What may change from call to call without a compilation.

    Attributes:
        temperature: 0 for greedy.
        top_p: mass to sample from.
        stop_ids: [t] ids that end a row.
    """

    temperature: ArrayLike
    top_p: ArrayLike
    stop_ids: Int[ArrayLike, "t"]


class Decoding(NamedTuple):
    """A batch in the middle of its answers.

    Attributes:
        cache: keys and values of everything but the last token.
        token: [b] last token; not in the cache yet.
        finished: [b] True = a stop id has come. What follows it is not recorded.
        count: [b] tokens generated, the stop id included.
        key: [b] PRNG keys, one per row, so that draws do not depend on the rest of the batch.
        step: number of the next step; the prefill was step 0.
        tokens: [b, max_tokens] int32 the answers, -1 behind them.
    """

    cache: Any
    token: Int[Array, "b"]
    finished: Bool[Array, "b"]
    count: Int[Array, "b"]
    key: Array
    step: Int[Array, ""]
    tokens: Int[Array, "b max_tokens"]


def row_keys(key: Array, rows: int) -> Array:
    """A PRNG key per row; that of a row does not depend on how many there are."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def _record(state: Decoding, logits: Array, settings: Settings) -> Decoding:
    """Draws every row's next token and notes it, unless the row is finished."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, state.step)
    draw = jax.vmap(sample, in_axes=(0, 0, None, None))
    token = draw(keys, logits, settings.temperature, settings.top_p)
    token = jnp.where(state.finished, state.token, token)
    noted = jnp.where(state.finished, -1, token)
    return state._replace(
        token=token,
        finished=state.finished | jnp.isin(token, jnp.asarray(settings.stop_ids)),
        count=state.count + ~state.finished,
        step=state.step + 1,
        tokens=jax.lax.dynamic_update_slice(state.tokens, noted[:, None], (0, state.step)),
    )


def start(
    params: dict[str, Any],
    config: LlavaConfig,
    sequence: vlm.Sequence,
    keys: Array,
    settings: Settings,
    max_tokens: int,
    attention: str = "matmul",
    mesh: Mesh | None = None,
) -> Decoding:
    """Runs the prefill and draws the first tokens.

    Args:
        params: the model's weights.
        config: the model's shape.
        sequence: from `vlm.assemble`.
        keys: [b] from `row_keys`.
        settings: sampling and stop ids.
        max_tokens: longest answer.
        attention: "matmul", "xla" or "cudnn".
        mesh: of the weights, to lay the cache out on.

    Returns:
        The state after the first token.
    """
    b = sequence.hidden.shape[0]
    # The last token is never read, so it needs no slot.
    result = vlm.prefill(params, config, sequence, max_tokens - 1, attention=attention)
    zeros = jnp.zeros(b, jnp.int32)
    state = Decoding(
        result.cache, zeros, zeros > 0, zeros, keys, jnp.int32(0),
        jnp.full((b, max_tokens), -1, jnp.int32),
    )  # fmt: skip
    return constrain_rows(mesh, _record(state, result.logits, settings))


def advance(
    params: dict[str, Any],
    config: LlavaConfig,
    state: Decoding,
    settings: Settings,
    mesh: Mesh | None = None,
) -> Decoding:
    """Reads the last tokens and draws the next ones.

    Args:
        params: the model's weights.
        config: the model's shape.
        state: before; donate it under jit.
        settings: sampling and stop ids.
        mesh: of the weights.

    Returns:
        The state after the step.
    """
    logits, cache = vlm.decode_step(params, config, state.token, state.cache)
    return constrain_rows(mesh, _record(state._replace(cache=cache), logits, settings))


def decode(
    params: dict[str, Any],
    config: LlavaConfig,
    state: Decoding,
    settings: Settings,
    limit: ArrayLike,
    mesh: Mesh | None = None,
) -> Decoding:
    """Repeats `advance` until all rows are finished or as long as `limit` allows.

    Args:
        params: the model's weights.
        config: the model's shape.
        state: before; donate it under jit.
        settings: sampling and stop ids.
        limit: most tokens per row, at most the `max_tokens` of the state.
        mesh: of the weights.

    Returns:
        The state at the end.
    """

    def going(state):
        return (state.step < limit) & ~jnp.all(state.finished)

    def body(state):
        return advance(params, config, state, settings, mesh)

    return jax.lax.while_loop(going, body, state)


run_start = jit_for_weights(start, ("config", "max_tokens", "attention", "mesh"))
run_decode = jit_for_weights(decode, ("config", "mesh"), ("state",))
