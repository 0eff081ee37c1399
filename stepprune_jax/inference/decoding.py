"""Prefill, one decode step, and the loop over it, as pure functions.

A whole answer (`decode`) and a loop on the host that reads each token (`decode` with a limit one
higher each time) run the same step in the same program, so both give the same tokens.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference.sampling import penalise, sample
from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import constrain_rows, jit_for_weights
from stepprune_jax.pruning import LayerCut, LayerPruner
from stepprune_jax.user_input import user_input


class Sampling(NamedTuple):
    """Sampling parameters, which may change from call to call without a compilation.

    Attributes:
        key: PRNG key; each row of a batch draws from its own, see `row_keys`.
        temperature: sampling temperature; 0 is greedy.
        top_p: probability mass to sample from.
        stop_ids: [t] ids that end a row.
        repetition_penalty: penalty of `sampling.penalise`; None for none, which is another program.
    """

    key: Array
    temperature: ArrayLike
    top_p: ArrayLike
    stop_ids: Int[ArrayLike, "t"]
    repetition_penalty: ArrayLike | None = None


class RunOptions(NamedTuple):
    """How the model is run; static.

    Attributes:
        positions: position ids of kept tokens, "original" or "compact", see `vlm.assemble`, or
            "own" for those of the method's authors. "compact" renumbers the remaining tokens after
            each cut between layers.
        execution: how the layers of tower and language model are run.
        context_limit: longest row after expansion; longer ones are truncated at the right end. None
            for that of the model's family.
        max_tokens: longest answer, in tokens.
    """

    positions: str = "original"
    execution: Execution = Execution()
    context_limit: int | None = None
    max_tokens: int = 128


class Decoding(NamedTuple):
    """Decoding state of a batch.

    Attributes:
        cache: keys and values of everything but the last token.
        token: [b] last token; not in the cache yet.
        finished: [b] True = a stop id was generated; later tokens are not recorded.
        finite: [b] False = the logits of a token were not finite, which also finishes the row.
        count: [b] tokens generated, including the stop id.
        key: [b] PRNG keys, one per row, so that draws do not depend on the rest of the batch.
        step: number of the next step; the prefill was step 0.
        tokens: [b, max_tokens] int32 the answers, padded with -1.
        seen: [b, v] True at tokens of prompt and answer; None without a repetition penalty.
    """

    cache: Any
    token: Int[Array, "b"]
    finished: Bool[Array, "b"]
    finite: Bool[Array, "b"]
    count: Int[Array, "b"]
    key: Array
    step: Int[Array, ""]
    tokens: Int[Array, "b max_tokens"]
    seen: Bool[Array, "b v"] | None = None


class Stages(NamedTuple):
    """Static sizes of a batch, and the stages between which visual tokens are dropped.

    Attributes:
        slots: length of the rows of each stage.
        cuts: the cuts between the stages.
        pruner: the pruner that drops tokens there; None without cuts.
        text: text tokens of the longest prompt, padded to a bucket, for cuts that read all of them.
        renumber: whether tokens remaining after a cut get the position ids 0, 1, 2, ...
        projected: whether the kept tokens are already projected.
    """

    slots: tuple[int, ...]
    cuts: tuple[LayerCut, ...] = ()
    pruner: LayerPruner | None = None
    text: int = 0
    renumber: bool = False
    projected: bool = False


class Places(NamedTuple):
    """The tokens in the rows of a stage; the fields are those of `vlm.Sequence`."""

    image: Int[Array, "b s"]
    index: Int[Array, "b s"]
    position: Int[Array, "b p s"]
    length: Int[Array, "b"]


class Trace(NamedTuple):
    """Record of a prefill.

    Attributes:
        logits: [b, v] float32 at each prompt's last token.
        stages: the rows that enter the language model, then those after each cut.
        order: [b, j, t] int32 tokens of each image kept before the language model, in order of
            choice, -1 in the padding; None for a method that chooses a set.
    """

    logits: Float[Array, "b v"]
    stages: tuple[Places, ...]
    order: Int[Array, "b j t"] | None = None


def greedy(stop_ids: Iterable[int]) -> Sampling:
    """Returns greedy sampling, whose key is never used."""
    stops = np.array([*stop_ids], np.int32)
    return Sampling(jax.random.key(0), np.float32(0), np.float32(1), stops)


def row_keys(key: Array, rows: int) -> Array:
    """Returns one PRNG key per row, independent of the number of rows."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def seen_ids(
    config: ModelConfig, ids: Int[Array, "b l"], length: Int[Array, "b"]
) -> Bool[Array, "b v"]:
    """Marks the tokens of prompts; an image counts as the model's own id for images.

    Args:
        config: the model's shape.
        ids: right-padded ids, with `IMAGE_TOKEN` in place of an image.
        length: number of ids of each row.

    Returns:
        [b, v] True at tokens that occur.
    """
    vocabulary = config.text.vocab_size
    image = vocabulary if config.image_token_id is None else config.image_token_id
    ids = jnp.where(ids == IMAGE_TOKEN, image, ids)
    # Ids beyond the vocabulary are dropped.
    ids = jnp.where(jnp.arange(ids.shape[1]) < length[:, None], ids, vocabulary)
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocabulary), bool).at[rows, ids].set(True, mode="drop")


def _record(state: Decoding, logits: Array, sampling: Sampling) -> Decoding:
    """Draws every row's next token and records it, unless the row is finished."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, state.step)
    draw = jax.vmap(sample, in_axes=(0, 0, None, None))
    seen, drawn_from = state.seen, logits
    if seen is not None:
        drawn_from = penalise(logits, seen, sampling.repetition_penalty)
    token = draw(keys, drawn_from, sampling.temperature, sampling.top_p)
    token = jnp.where(state.finished, state.token, token)
    if seen is not None:
        seen = seen.at[jnp.arange(token.size), token].set(True)
    noted = jnp.where(state.finished, -1, token)
    # The maximum is NaN if any value is.
    finite = state.finite & (state.finished | jnp.isfinite(logits.max(axis=-1)))
    return state._replace(
        token=token,
        finished=state.finished | ~finite | jnp.isin(token, jnp.asarray(sampling.stop_ids)),
        finite=finite,
        count=state.count + ~state.finished,
        step=state.step + 1,
        tokens=jax.lax.dynamic_update_slice(state.tokens, noted[:, None], (0, state.step)),
        seen=seen,
    )


def start(
    params: dict[str, Any],
    config: ModelConfig,
    learned: Any,
    sequence: vlm.Sequence,
    counts: tuple[Int[Array, "b j"], ...],
    sampling: Sampling,
    *,
    stages: Stages,
    options: RunOptions,
    seen: Bool[Array, "b v"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Decoding, Trace]:
    """Runs the prefill and draws the first tokens.

    Args:
        params: the model's weights.
        config: the model's shape.
        learned: trained parameters of the pruner, for its cuts.
        sequence: result of `vlm.assemble`.
        counts: for each cut, [b, j] tokens of each image that remain after it.
        sampling: how tokens are drawn.
        stages: cuts between layers, and row lengths of the stages.
        options: how the model is run.
        seen: [b, v] tokens of the prompts, if the sampling has a penalty.
        mesh: mesh of the weights, over which the cache is sharded.

    Returns:
        The state after the first token, and the record of the prefill.
    """
    b, max_tokens = sequence.hidden.shape[0], options.max_tokens
    rows = {"last": 1, "text": stages.text}

    def drop(cut, count):
        return lambda rows, taps: stages.pruner.drop(learned, cut, rows, taps, count)

    cuts = [
        vlm.Cut(cut.layer, slots, drop(cut, count), cut.taps, rows[cut.rows], stages.renumber)
        for cut, slots, count in zip(stages.cuts, stages.slots[1:], counts, strict=True)
    ]
    # The last token is never read, so it needs no slot.
    result = vlm.prefill(
        params, config, sequence, max_tokens - 1, cuts=cuts, execution=options.execution
    )
    zeros = jnp.zeros(b, jnp.int32)
    state = Decoding(
        cache=result.cache,
        token=zeros,
        finished=zeros > 0,
        finite=zeros == 0,
        count=zeros,
        key=row_keys(sampling.key, b),
        step=jnp.int32(0),
        tokens=jnp.full((b, max_tokens), -1, jnp.int32),
        seen=seen,
    )
    rows = (sequence, *result.cuts)
    trace = Trace(
        result.logits,
        tuple(Places(*(getattr(row, name) for name in Places._fields)) for row in rows),
    )
    return constrain_rows(mesh, (_record(state, result.logits, sampling), trace))


def advance(
    params: dict[str, Any],
    config: ModelConfig,
    state: Decoding,
    sampling: Sampling,
    execution: Execution = Execution(),
    mesh: Mesh | None = None,
) -> Decoding:
    """Reads the last tokens and draws the next ones.

    Args:
        params: the model's weights.
        config: the model's shape.
        state: state before the step; donate it under jit.
        sampling: how tokens are drawn.
        execution: how the layers are run.
        mesh: mesh of the weights.

    Returns:
        The state after the step.
    """
    logits, cache = vlm.decode_step(params, config, state.token, state.cache, execution)
    return constrain_rows(mesh, _record(state._replace(cache=cache), logits, sampling))


def decode(
    params: dict[str, Any],
    config: ModelConfig,
    state: Decoding,
    sampling: Sampling,
    limit: ArrayLike,
    execution: Execution = Execution(),
    mesh: Mesh | None = None,
) -> Decoding:
    """Repeats `advance` until all rows are finished or have `limit` tokens.

    Args:
        params: the model's weights.
        config: the model's shape.
        state: state before the step; donate it under jit.
        sampling: how tokens are drawn.
        limit: maximum number of tokens per row, at most the `max_tokens` of the state.
        execution: how the layers are run.
        mesh: mesh of the weights.

    Returns:
        The final state.
    """

    def going(state):
        return (state.step < limit) & ~jnp.all(state.finished)

    def body(state):
        return advance(params, config, state, sampling, execution, mesh)

    return jax.lax.while_loop(going, body, state)


def check_finite(finite: Bool[np.ndarray, "b"], numbers: Int[np.ndarray, "b"]) -> None:
    """Raises if answers come from logits that are not finite.

    Args:
        finite: [b] `Decoding.finite`, on the host.
        numbers: [b] numbers of the prompts.

    Raises:
        ValueError: the logits of a prompt, which is named, were not finite.
    """
    broken = np.flatnonzero(~finite)
    if broken.size:
        with user_input():
            raise ValueError(
                f"prompt {numbers[broken[0]]}: the model's logits are not finite. Either its input "
                "is not, or its dtype overflows, as float16 may: use bfloat16 or float32"
            )


run_decode = jit_for_weights(decode, ("config", "execution", "mesh"), ("state",))
