"""The stages of a batch from its images and prompts to its last tokens.

    plan_batch -> select -> prefill -> finish

`plan_batch` plans on the host. `select` runs the tower and the pruner; `prefill` builds the rows
and runs the language model to the first tokens; both are one program where the number of kept
tokens is known before the tower has run. `finish` and `decode` sample the further tokens. Shapes
are padded to buckets, so that the number of compiled programs is bounded for any input.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.base import (
    Batch,
    Decoding,
    Images,
    Plan,
    PrefillResult,
    Prompts,
    RunOptions,
)
from stepprune_jax.inference.plan import is_joint, make_pairs, plan_batch, plan_pairs, plan_rows
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.shapes import enters_known
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import (
    decodes_by_step,
    mesh_of,
    place_rows,
    replicate_like,
    to_host,
)
from stepprune_jax.policy.buckets import length_bucket
from stepprune_jax.pruning import Budget, Pruner, Ranker, Ranking
from stepprune_jax.selectors import TrainedPruner


def place_pruner(model: VLM, pruner: Pruner) -> Pruner:
    """Copies a pruner's weights to the model's devices, as its programs read them."""
    if isinstance(pruner, TrainedPruner):
        pruner = pruner.prepare()
    on_device = replicate_like(model.params, pruner)
    # The host counts tokens by the budget.
    return dataclasses.replace(on_device, budget=pruner.budget)


def encode(
    model: VLM, images: Images, taps: Sequence[Tap] = (), execution: Execution = Execution()
) -> Images:
    """Runs the tower over images as one batch; the result is on the model's devices."""
    mesh, taps = mesh_of(model.params), tuple(dict.fromkeys(taps))
    features, in_order = programs.run_encode(
        model.params,
        model.backbone,
        place_rows(mesh, images.pixels),
        taps=taps,
        plan=Plan(execution=execution, mesh=mesh),
    )
    by_tap = dict(zip(taps, in_order, strict=True))
    return images._replace(pixels=None, features=features, taps=by_tap)


def rank(model: VLM, pruner: Ranker, prompts: Prompts, images: Images, steps: int) -> Ranking:
    """Orders the tokens of each (image, prompt) pair.

    Args:
        model: the model.
        pruner: the ranker.
        prompts: the prompts.
        images: their images after the tower, with the taps of the pruner.
        steps: length of each order.

    Returns:
        The orders, on the devices, by pair in order of prompts. Padding rows repeat the first pair.
    """
    # One program serves every budget: an order does not depend on it.
    pruner = dataclasses.replace(pruner.program(), budget=Budget())
    plan = Plan(is_projected=pruner.after_projector, mesh=mesh_of(model.params))
    pairs = make_pairs(model, pruner, prompts, images, plan_pairs(model, pruner, prompts, images))
    return programs.run_rank(model.params, model.backbone, pruner, pairs, plan=plan, steps=steps)


def select(model: VLM, batch: Batch) -> Batch:
    """Selects the tokens of each pair by a program that ends with the selection.

    Args:
        model: the model.
        batch: a batch with `pairs` or `ranked`.

    Returns:
        The batch with `kept`. Where a learned stop decides, the counts are read back from the
        devices, and the rows are planned.
    """
    pairing, mesh = batch.pairing, mesh_of(model.params)
    if batch.ranked is not None:
        kept = programs.run_take(*batch.ranked, capacity=pairing.capacity)
    else:
        plan = Plan(
            pairing.capacity,
            batch.pruner.after_projector,
            execution=batch.options.execution,
            mesh=mesh,
        )
        kept = programs.run_select(
            model.params, model.backbone, batch.pruner.program(), batch.pairs, plan=plan
        )
    if batch.plan is None:
        counts = to_host(kept.count)
        batch = plan_rows(model, batch._replace(pairing=pairing._replace(counts=counts)))
    if is_joint(model.config, batch) and not enters_known(model.config, batch.pruner):
        # One prefill serves images of all sizes. One more token reveals that a row is truncated.
        kept = programs.run_resize(kept, capacity=batch.plan.slots[0] + 1, mesh=mesh)
    return batch._replace(kept=kept)


def prefill_to_cut(model: VLM, batch: Batch) -> Batch:
    """Runs a selected batch to a cut that decides the number of tokens, and reads them back.

    Returns:
        The batch with `paused`, with the row length after the cut in `plan`, and with `num_kept`.
    """
    # A cut with `forgets` leaves no room in its cache, so answers of any length share its program.
    max_tokens = 1 if batch.plan.cuts[0].forgets else batch.plan.max_tokens
    paused, counts = programs.run_prefill_to_cut(
        model.params,
        model.backbone,
        batch.pruner.program(),
        batch.kept,
        batch.layout,
        plan=dataclasses.replace(batch.plan, max_tokens=max_tokens),
    )
    remaining, num_kept = to_host(counts).T
    limit = batch.options.context_limit or model.backbone.CONTEXT_LIMIT
    first_slots = batch.plan.slots[0]
    slots = first_slots, min(length_bucket(int(remaining.max()), limit), first_slots)
    plan = dataclasses.replace(batch.plan, slots=slots)
    return batch._replace(plan=plan, paused=paused, num_kept=num_kept)


def complete_plan(model: VLM, batch: Batch) -> Batch:
    """Runs the stages whose results decide shapes of the prefill.

    Args:
        model: the model.
        batch: result of `plan_batch`.

    Returns:
        The batch, unchanged if its prefill includes the selection.
    """
    if batch.kept is None and not batch.selects_in_prefill:
        batch = select(model, batch)
    if batch.plan.cuts and not batch.pruner.budget.is_exact:
        batch = prefill_to_cut(model, batch)
    return batch


def embed(model: VLM, batch: Batch) -> tuple[Float[np.ndarray, "b s e"], Int[np.ndarray, "b"]]:
    """Returns the rows before the first layer, for a language model that runs elsewhere.

    Args:
        model: the model.
        batch: a batch with `kept`, for a pruner without cuts.

    Returns:
        The embeddings of each row, zeros in the padding, and the length of each row.
    """
    # Only these fields decide the program.
    plan = Plan(
        is_projected=batch.plan.is_projected,
        slots=batch.plan.slots,
        positions=batch.plan.positions,
        mesh=batch.plan.mesh,
    )
    rows = programs.run_build_sequence(
        model.params, model.backbone, batch.kept, batch.layout, plan=plan
    )
    return to_host((rows.hidden, rows.length))


def prefill(model: VLM, batch: Batch, sampling: Sampling) -> PrefillResult:
    """Runs a batch to its first tokens, after `complete_plan`.

    Args:
        model: the model.
        batch: the batch.
        sampling: how tokens are sampled, resolved.

    Returns:
        The batch after its first tokens.
    """
    if batch.paused is not None:
        run, inputs = programs.run_resume, batch.paused
    elif batch.kept is not None:
        run, inputs = programs.run_prefill, batch.kept
    else:
        run, inputs = programs.run_first_tokens, batch.pairs
    plan = batch.plan
    # An unused pruner would still distinguish programs.
    pruner = batch.pruner.program() if plan.cuts or batch.kept is None else None
    arrays = pruner, inputs, batch.layout, sampling
    state, trace = run(model.params, model.backbone, *arrays, plan=plan)
    return PrefillResult(state, trace, batch.visual_tokens, batch.num_kept)


def first_tokens(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images | None,
    options: RunOptions,
    sampling: Sampling,
    *,
    sizes: Sequence[int] | None = None,
    width: int | None = None,
    ranking: Ranking | None = None,
) -> PrefillResult:
    """Runs prompts and images to the first token of each prompt.

    See `plan_batch` for the arguments, and `prefill` for `sampling`.
    """
    batch = plan_batch(
        model, pruner, prompts, images, options, sizes=sizes, width=width, ranking=ranking
    )
    return prefill(model, complete_plan(model, batch), sampling)


class StepOutput(NamedTuple):
    """The part of a step's result that the host reads.

    Attributes:
        token: [b] id that was sampled last.
        finished: [b] True = the row is finished.
        finite: [b] False = the logits of a token of the row were not finite.
    """

    token: Int[np.ndarray, "b"]
    finished: Bool[np.ndarray, "b"]
    finite: Bool[np.ndarray, "b"]


def decode(
    model: VLM,
    state: Decoding,
    sampling: Sampling,
    options: RunOptions,
    stride: int = 1,
) -> Iterator[tuple[Decoding, StepOutput]]:
    """Samples the tokens after the first, up to `options.max_tokens` in all; consumes the state.

    Where the host starts each step, it starts the next step before it reads a result, so that the
    device never waits. The state is then one step ahead of the output, which changes no finished
    row.

    Args:
        model: the model.
        state: state after the prefill.
        sampling: how tokens are sampled, resolved.
        options: how the model is run.
        stride: number of tokens between two results.

    Yields:
        The state and the output of the last step, after every `stride` tokens. The caller stops
        when all rows are finished.
    """
    by_step, limit = decodes_by_step(model.params), options.max_tokens
    language = {"language": model.params["language"]}
    stride, unread = 1 if by_step else stride, collections.deque()
    for step in range(1, limit, stride):
        state, output = decoding.run_decode(
            language,
            model.config,
            state,
            sampling,
            None if by_step else np.int32(min(step + stride, limit)),
            execution=options.execution,
            mesh=mesh_of(model.params),
        )
        unread.append(output)
        if len(unread) > by_step:
            yield state, _read(unread.popleft())
    for output in unread:
        yield state, _read(output)


def first_output(state: Decoding) -> StepOutput:
    """Reads the output of the prefill."""
    return StepOutput(*jax.device_get((state.token, state.finished, state.finite)))


def _read(output: Int[Array, "3 b"]) -> StepOutput:
    """Reads the output of a decoding step."""
    token, finished, finite = np.asarray(output)
    return StepOutput(token, finished > 0, finite > 0)


def finish(model: VLM, state: Decoding, sampling: Sampling, options: RunOptions) -> Decoding:
    """Samples all tokens after the first; consumes the state."""
    for next_state, output in decode(model, state, sampling, options, stride=options.max_tokens):
        state = next_state
        if output.finished.all():
            break
    return state
