"""The start of decoding after a prefill, one decoding step, and the loop over the steps.

Pure functions. An answer and a stream of tokens run the same program, so both give the same tokens.
The program is a loop up to a limit on the number of tokens, and a stream raises the limit by one
for each token. On a GPU with large layers, the program is instead one step that the host repeats
(`placement.decodes_by_step`).
"""

from collections.abc import Sequence as Ordered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference.base import Decoding
from stepprune_jax.inference.sampling import Sampling, penalise, sample
from stepprune_jax.models import vlm
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.parallel.placement import constrain_replicated, constrain_rows
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.user_input import UserError


def row_keys(key: Array, num_rows: int) -> Array:
    """Returns one PRNG key per row, where the key of a row does not depend on `num_rows`."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_rows))


def mark_tokens(
    config: ModelConfig, ids: Int[Array, "b l"], sequence: Sequence
) -> Bool[Array, "b v"]:
    """Marks the tokens of each prompt; an image counts as the model's own id for images.

    Args:
        config: the model's shape.
        ids: [b, l] ids of the prompts, with -200 in place of an image.
        sequence: the rows of the prompts before the first layer; long prompts may be truncated.

    Returns:
        [b, v] True = the token occurs in the prompt.
    """
    vocab_size = config.text.vocab_size
    # The id `vocab_size` is out of bounds, so the scatter below drops it.
    image_id = vocab_size if config.image_token_id is None else config.image_token_id
    # A truncated row has fewer text tokens than its prompt.
    num_text = (sequence.rows.valid & (sequence.image < 0)).sum(1)
    is_read = jnp.cumsum(ids != IMAGE_TOKEN, axis=1) <= num_text[:, None]
    ids = jnp.where(is_read, jnp.where(ids == IMAGE_TOKEN, image_id, ids), vocab_size)
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocab_size), bool).at[rows, ids].set(True, mode="drop")


def start(
    prefill: vlm.Prefill,
    prompt_tokens: Bool[Array, "b v"] | None,
    sampling: Sampling,
    max_tokens: int,
) -> Decoding:
    """Samples the first token of each row after a prefill.

    Args:
        prefill: the prefill, with logits at each row's last token.
        prompt_tokens: [b, v] True = token of the prompt; None without a repetition penalty.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        max_tokens: longest answer, in tokens.

    Returns:
        The state before the first decoding step.
    """
    b = len(prefill.logits)
    zeros = jnp.zeros(b, jnp.int32)
    state = Decoding(
        cache=prefill.cache,
        token=zeros,
        finished=zeros > 0,
        finite=zeros == 0,
        count=zeros,
        key=row_keys(sampling.key, b) if isinstance(sampling.key, jax.Array) else None,
        step=jnp.int32(0),
        tokens=jnp.full((b, max_tokens), -1, jnp.int32),
        seen=prompt_tokens,
    )
    return _sample_and_record(state, prefill.logits, sampling)


def _sample_and_record(
    state: Decoding, logits: Float[Array, "b v"], sampling: Sampling
) -> Decoding:
    """Samples one token per row and appends it to the answers; finished rows do not change.

    Args:
        state: state before the step.
        logits: [b, v] logits of the next token.
        sampling: how tokens are sampled, from `Sampling.resolve`.

    Returns:
        The state after the step, without the token in the cache.
    """
    seen, penalised_logits, keys = state.seen, logits, None
    if seen is not None and sampling.repetition_penalty is not None:
        penalised_logits = penalise(logits, seen, sampling.repetition_penalty)
    if state.key is not None:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, state.step)
    sample_rows = jax.vmap(sample, in_axes=(0, 0, None, None))
    token = sample_rows(keys, penalised_logits, sampling.temperature, sampling.top_p)
    token = jnp.where(state.finished, state.token, token)
    if seen is not None:
        seen = seen.at[jnp.arange(token.size), token].set(True)
    appended_token = jnp.where(state.finished, -1, token)
    # The maximum is NaN if any logit is NaN.
    finite = state.finite & (state.finished | jnp.isfinite(logits.max(axis=-1)))
    return state._replace(
        token=token,
        finished=state.finished | ~finite | jnp.isin(token, jnp.asarray(sampling.stop_ids)),
        finite=finite,
        count=state.count + ~state.finished,
        step=state.step + 1,
        tokens=jax.lax.dynamic_update_slice(state.tokens, appended_token[:, None], (0, state.step)),
        seen=seen,
    )


def decode(
    params: Params,
    config: ModelConfig,
    state: Decoding,
    sampling: Sampling,
    limit: ArrayLike | None,
    execution: Execution = Execution(),
    mesh: Mesh | None = None,
) -> tuple[Decoding, Int[Array, "3 b"]]:
    """Samples further tokens until all rows are finished or have `limit` tokens.

    Args:
        params: the model's weights; only the language model's weights are read.
        config: the model's shape.
        state: state before the step; donate it under jit.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        limit: maximum number of tokens per row, at most the length of `state.tokens`. None runs
            exactly one step, which does not change finished rows.
        execution: how the layers are run.
        mesh: mesh of the weights; None on a single device.

    Returns:
        The final state; and [3, b], its fields `token`, `finished` and `finite`, replicated over
        all devices. The host reads this copy, because the next step reuses the memory of the state.
    """

    def is_unfinished(state):
        return (state.step < limit) & ~jnp.all(state.finished)

    def step(state):
        logits, cache = vlm.decode_step(params, config, state.token, state.cache, execution)
        state = _sample_and_record(state._replace(cache=cache), logits, sampling)
        return constrain_rows(mesh, state)

    state = step(state) if limit is None else jax.lax.while_loop(is_unfinished, step, state)
    return state, constrain_replicated(mesh, jnp.stack([state.token, state.finished, state.finite]))


class NotFiniteError(UserError):
    """The model's logits are not finite for some prompts of a batch or of a data set.

    Attributes:
        numbers: numbers of the prompts without finite logits.
        answers: the answers to the batch, with None for the prompts of `numbers`; or the `Answers`
            to the data set.
    """

    REASON = (
        "the model's logits are not finite. Either its input is not, or its dtype overflows, as "
        "float16 may: use bfloat16 or float32"
    )

    def __init__(self, numbers: Ordered[int], answers: Any = ()):
        """Builds a message that names at most ten of the prompts."""
        self.numbers, self.answers = tuple(map(int, numbers)), answers
        super().__init__(f"{listed('prompt', self.numbers)}: {self.REASON}")


def listed(noun: str, names: Ordered[object]) -> str:
    """Returns a noun with up to ten names, such as "prompt 3" or "prompts 3, 7 and 4 more"."""
    text = ", ".join(map(str, names[:10]))
    ending = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {text}{ending}"


run_decode = jit_for_weights(decode, ("config", "execution", "mesh"), ("state",), answers=True)
