"""Prefill, one decode step, and the loop over it, as pure functions.

A whole answer and one that is read token by token run the same step in the same program, so both
give the same tokens: a loop up to a limit that is one higher each time, or a step that the host
repeats, where layers are large and the device a GPU (`placement.decodes_by_step`).
"""

from collections.abc import Sequence as Ordered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference.base import Decoding, Places, Plan, PromptLayout, Trace
from stepprune_jax.inference.sampling import Sampling, penalise, sample
from stepprune_jax.models import vlm
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.parallel.placement import constrain_replicated, constrain_rows
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.pruning import Pruner
from stepprune_jax.user_input import UserError


def row_keys(key: Array, rows: int) -> Array:
    """Returns one PRNG key per row, independent of the number of rows."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def seen_ids(config: ModelConfig, ids: Int[Array, "b l"], sequence: Sequence) -> Bool[Array, "b v"]:
    """Marks the tokens of prompts; an image counts as the model's own id for images."""
    vocabulary = config.text.vocab_size
    image = vocabulary if config.image_token_id is None else config.image_token_id
    # A truncated row has fewer text tokens than its prompt.
    text = (sequence.rows.valid & (sequence.image < 0)).sum(1)
    read = jnp.cumsum(ids != IMAGE_TOKEN, axis=1) <= text[:, None]
    # Ids beyond the vocabulary are dropped.
    ids = jnp.where(read, jnp.where(ids == IMAGE_TOKEN, image, ids), vocabulary)
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocabulary), bool).at[rows, ids].set(True, mode="drop")


def _record(state: Decoding, logits: Array, sampling: Sampling) -> Decoding:
    """Draws every row's next token and records it, unless the row is finished."""
    seen, drawn_from, keys = state.seen, logits, None
    if seen is not None:
        drawn_from = penalise(logits, seen, sampling.repetition_penalty)
    if state.key is not None:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, state.step)
    draw = jax.vmap(sample, in_axes=(0, 0, None, None))
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


def make_cuts(pruner: Pruner | None, texts: PromptLayout, plan: Plan) -> list[vlm.Cut]:
    """Builds the cuts of a plan, with the functions of its pruner."""
    rows = {"last": 1, "text": plan.text}

    def drop(cut, count):
        return lambda rows, taps: pruner.drop(cut, rows, taps, count)

    return [
        vlm.Cut(
            layer=cut.layer,
            slots=slots,
            drop=drop(cut, count),
            taps=cut.taps,
            rows=rows[cut.rows],
            renumber=plan.positions == "compact",
            forgets=cut.forgets,
            probe=pruner.probe(),
        )
        for cut, slots, count in zip(plan.cuts, plan.slots[1:], texts.counts, strict=True)
    ]


def start(
    params: Params,
    config: ModelConfig,
    pruner: Pruner | None,
    sequence: Sequence,
    texts: PromptLayout,
    sampling: Sampling,
    plan: Plan,
    halted: vlm.PausedPrefill | None = None,
) -> tuple[Decoding, Trace]:
    """Runs the prefill, with the pruner's cuts, and draws the first tokens."""
    cuts = make_cuts(pruner, texts, plan)
    slots = plan.max_tokens - 1  # the last token is never read, so it needs none
    result = vlm.prefill(
        params, config, sequence, slots, cuts, execution=plan.execution, halted=halted
    )
    b = len(texts.length)
    zeros, penalised = jnp.zeros(b, jnp.int32), sampling.repetition_penalty is not None
    state = Decoding(
        cache=result.cache,
        token=zeros,
        finished=zeros > 0,
        finite=zeros == 0,
        count=zeros,
        key=None if sampling.key is None else row_keys(sampling.key, b),
        step=jnp.int32(0),
        tokens=jnp.full((b, plan.max_tokens), -1, jnp.int32),
        seen=seen_ids(config, texts.ids, sequence) if penalised else None,
    )
    stages = tuple(
        Places(*(getattr(row, name) for name in Places._fields)) for row in (sequence, *result.cuts)
    )
    state = _record(state, result.logits, sampling)
    return constrain_rows(plan.mesh, (state, Trace(result.logits, stages)))


def decode(
    params: Params,
    config: ModelConfig,
    state: Decoding,
    sampling: Sampling,
    limit: ArrayLike | None,
    execution: Execution = Execution(),
    mesh: Mesh | None = None,
) -> tuple[Decoding, Int[Array, "3 b"]]:
    """Reads the last tokens and draws the next, until all rows are finished or have `limit` tokens.

    Args:
        params: the model's weights, of which only the language model's are read.
        config: the model's shape.
        state: state before the step; donate it under jit.
        sampling: how tokens are drawn, resolved.
        limit: maximum number of tokens per row, at most the `max_tokens` of the state; None for
            exactly one step, which changes no row that is finished.
        execution: how the layers are run.
        mesh: mesh of the weights.

    Returns:
        The final state; and apart from it, as the next step takes the state's memory, what the host
        reads of it: token, finished and finite of each row, the same on all devices.
    """

    def going(state):
        return (state.step < limit) & ~jnp.all(state.finished)

    def step(state):
        logits, cache = vlm.decode_step(params, config, state.token, state.cache, execution)
        return constrain_rows(mesh, _record(state._replace(cache=cache), logits, sampling))

    state = step(state) if limit is None else jax.lax.while_loop(going, step, state)
    return state, constrain_replicated(mesh, jnp.stack([state.token, state.finished, state.finite]))


class NotFiniteError(UserError):
    """The model's logits are not finite for some prompts of a batch or of a set.

    Attributes:
        numbers: numbers of these prompts.
        answers: the answers to the batch, with None for these prompts, or the `Answers` to the set.
    """

    REASON = (
        "the model's logits are not finite. Either its input is not, or its dtype overflows, as "
        "float16 may: use bfloat16 or float32"
    )

    def __init__(self, numbers: Ordered[int], answers: Any = ()):
        """Names the prompts, but no more than ten of them."""
        self.numbers, self.answers = tuple(map(int, numbers)), answers
        super().__init__(f"{listed('prompt', self.numbers)}: {self.REASON}")


def listed(noun: str, names: Ordered[object]) -> str:
    """Returns names after a noun: "prompt 3", "prompts 3, 7", at most ten and how many more."""
    text = ", ".join(map(str, names[:10]))
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {text}{more}"


run_decode = jit_for_weights(decode, ("config", "execution", "mesh"), ("state",), answers=True)
