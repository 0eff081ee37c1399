"""The stages of a batch from its images and prompts to its last tokens.

    plan_batch -> select -> prefill -> finish

`plan_batch` plans on the host. `select` runs the tower and the pruner; `prefill` builds the rows
and runs the language model to the first tokens. One program does both if the number of kept
tokens is known before the tower has run. `finish` and `decode` sample the further tokens. Shapes
are padded to buckets, which bounds the number of compiled programs for any input.
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
    """Runs the vision tower over images as one batch.

    Args:
        model: the model.
        images: the images, with pixels.
        taps: intermediate arrays of the tower to return; repeated taps are computed once.
        execution: how the layers of the tower are run.

    Returns:
        The images with `features` and `taps` on the model's devices, without pixels.
    """
    mesh, taps = mesh_of(model.params), tuple(dict.fromkeys(taps))
    features, tap_arrays = programs.run_encode(
        model.params,
        model.backbone,
        place_rows(mesh, images.pixels),
        taps=taps,
        plan=Plan(execution=execution, mesh=mesh),
    )
    array_of_tap = dict(zip(taps, tap_arrays, strict=True))
    return images._replace(pixels=None, features=features, taps=array_of_tap)


def rank(model: VLM, pruner: Ranker, prompts: Prompts, images: Images, steps: int) -> Ranking:
    """Orders the tokens of each (image, prompt) pair.

    Args:
        model: the model.
        pruner: the ranker.
        prompts: the prompts.
        images: the images of the prompts after the tower, with the taps of the pruner.
        steps: number of tokens in each order.

    Returns:
        One order per pair, on the model's devices. Pairs are sorted by prompt, and padding rows
        repeat the first pair.
    """
    # The order does not depend on the budget, so one program serves every budget.
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
        The batch with `kept`. If a learned stop decides the number of tokens, this function copies
        the counts to the host and plans the rows of the language model.
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
        # With a fixed capacity, one prefill program serves images of all sizes. The additional
        # token shows the program that a row is longer than its slots.
        kept = programs.run_resize(kept, capacity=batch.plan.slots[0] + 1, mesh=mesh)
    return batch._replace(kept=kept)


def prefill_to_cut(model: VLM, batch: Batch) -> Batch:
    """Runs the language model up to a cut whose selection decides the row lengths after the cut.

    A cut is a place between two layers where the pruner drops visual tokens. The host must know how
    many tokens remain before it can choose the program for the layers after the cut.

    Args:
        model: the model.
        batch: a batch with `kept` and `plan`, whose pruner has exactly one cut.

    Returns:
        The batch with `paused`, the state of the language model at the cut; with `num_kept`; and
        with the row length after the cut in `plan.slots`.
    """
    # With `prunes_cache`, the cache at the cut has no free slots for new tokens. A constant number
    # of new tokens lets answers of any length share the program.
    max_tokens = 1 if batch.plan.cuts[0].prunes_cache else batch.plan.max_tokens
    paused, counts = programs.run_prefill_to_cut(
        model.params,
        model.backbone,
        batch.pruner.program(),
        batch.kept,
        batch.layout,
        plan=dataclasses.replace(batch.plan, max_tokens=max_tokens),
    )
    num_remaining, num_kept = to_host(counts).T
    context_limit = batch.options.context_limit or model.backbone.CONTEXT_LIMIT
    length_before = batch.plan.slots[0]
    length_after = min(length_bucket(int(num_remaining.max()), context_limit), length_before)
    plan = dataclasses.replace(batch.plan, slots=(length_before, length_after))
    return batch._replace(plan=plan, paused=paused, num_kept=num_kept)


def complete_plan(model: VLM, batch: Batch) -> Batch:
    """Runs the selection, and the layers before a cut, if their results decide prefill shapes.

    Args:
        model: the model.
        batch: result of `plan_batch`.

    Returns:
        The batch with a complete `plan`. The batch is unchanged if one program runs the selection
        and the prefill.
    """
    if batch.kept is None and not batch.selects_in_prefill:
        batch = select(model, batch)
    if batch.plan.cuts and not batch.pruner.budget.is_exact:
        batch = prefill_to_cut(model, batch)
    return batch


def embed(model: VLM, batch: Batch) -> tuple[Float[np.ndarray, "b s e"], Int[np.ndarray, "b"]]:
    """Builds the input embeddings of a language model that another program runs.

    Args:
        model: the model.
        batch: a batch with `kept`, for a pruner that drops no tokens between layers.

    Returns:
        The embeddings of each row, with zeros in the padding, and the length of each row.
    """
    # The plan is part of the key of the compiled program, so it has only the fields that matter.
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
    """Runs the language model over a batch and samples the first token of each row.

    Args:
        model: the model.
        batch: result of `complete_plan`.
        sampling: how tokens are sampled, from `Sampling.resolve`.

    Returns:
        The decoding state, the trace of the prefill, and the numbers of visual tokens.
    """
    if batch.paused is not None:
        program, visual_inputs = programs.run_resume, batch.paused
    elif batch.kept is not None:
        program, visual_inputs = programs.run_prefill, batch.kept
    else:
        program, visual_inputs = programs.run_first_tokens, batch.pairs
    plan = batch.plan
    # A pruner that the program does not read would still cause another compilation.
    pruner = batch.pruner.program() if plan.cuts or batch.kept is None else None
    state, trace = program(
        model.params, model.backbone, pruner, visual_inputs, batch.layout, sampling, plan=plan
    )
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
    """Plans a batch, runs its prefill and samples the first token of each prompt.

    Args:
        model: the model.
        pruner: the pruner, from `place_pruner`.
        prompts: the prompts.
        images: the images of the prompts; None if no prompt has an image.
        options: how the model is run.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        sizes: see `plan_batch`, as for `width` and `ranking`.
        width: see `plan_batch`.
        ranking: see `plan_batch`.

    Returns:
        The result of `prefill`.
    """
    batch = plan_batch(
        model, pruner, prompts, images, options, sizes=sizes, width=width, ranking=ranking
    )
    return prefill(model, complete_plan(model, batch), sampling)


class StepOutput(NamedTuple):
    """The part of a step's result that the host reads.

    Attributes:
        token: [b] id of the last sampled token.
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
    """Samples the tokens after the first token, up to `options.max_tokens` tokens per row.

    On some devices the host starts each decoding step (`placement.decodes_by_step`). It then starts
    the next step before it reads the result of the previous step, so that the device never waits.
    The yielded state is then one step ahead of the yielded output. The additional step does not
    change finished rows.

    Args:
        model: the model.
        state: state after the prefill; donated.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        options: how the model is run.
        stride: number of tokens between two results; 1 if the host starts each step.

    Yields:
        The state, and the output of the last step that the host has read. The caller stops the
        iteration when all rows are finished.
    """
    by_step, max_tokens = decodes_by_step(model.params), options.max_tokens
    language = {"language": model.params["language"]}
    stride, unread_outputs = 1 if by_step else stride, collections.deque()
    max_unread = 1 if by_step else 0
    for num_tokens in range(1, max_tokens, stride):
        state, output = decoding.run_decode(
            language,
            model.config,
            state,
            sampling,
            None if by_step else np.int32(min(num_tokens + stride, max_tokens)),
            execution=options.execution,
            mesh=mesh_of(model.params),
        )
        unread_outputs.append(output)
        if len(unread_outputs) > max_unread:
            yield state, _read_output(unread_outputs.popleft())
    for output in unread_outputs:
        yield state, _read_output(output)


def first_output(state: Decoding) -> StepOutput:
    """Copies the first tokens of a batch from the state after the prefill to the host."""
    return StepOutput(*jax.device_get((state.token, state.finished, state.finite)))


def _read_output(output: Int[Array, "3 b"]) -> StepOutput:
    """Copies the output of a decoding step to the host."""
    token, finished, finite = np.asarray(output)
    return StepOutput(token, finished > 0, finite > 0)


def finish(model: VLM, state: Decoding, sampling: Sampling, options: RunOptions) -> Decoding:
    """Samples all tokens after the first token; the state is donated."""
    for next_state, output in decode(model, state, sampling, options, stride=options.max_tokens):
        state = next_state
        if output.finished.all():
            break
    return state
