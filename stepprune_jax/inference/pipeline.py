"""The stages of a batch from its images and prompts to its last tokens.

    plan_batch -> prepare_prefill -> prefill -> finish

`plan_batch` plans on the host. `prepare_prefill` plans the rows of the language model. If the
number of kept tokens is not known before the tower has run, it also runs the tower and the pruner
(`select`). `prefill` runs what remains up to the first tokens, in one program. `finish` and
`decode` sample the further tokens. Shapes are padded to buckets, which bounds the number of
compiled programs for any input.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.base import (
    Batch,
    Decoding,
    Images,
    Pairs,
    Plan,
    PrefillInputs,
    PrefillResult,
    Prompts,
    RankedPairs,
    RunOptions,
)
from stepprune_jax.inference.plan import (
    is_joint,
    join_patches,
    make_pairs,
    plan_batch,
    plan_pairs,
    plan_rows,
)
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.shapes import enters_known
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.sequence import Kept
from stepprune_jax.models.sequence import Sequence as RowSequence
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
from stepprune_jax.pruning.base import AnyPruner
from stepprune_jax.selectors import TrainedPruner


def place_pruner(model: VLM, pruner: AnyPruner) -> AnyPruner:
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
    pixels, token_of = images.pixels, None
    if images.clips is not None:
        num_images = len(images.grid)
        pixels, token_of = join_patches(model, images, range(num_images), num_images)
    features, tap_arrays = programs.run_encode(
        model.params,
        model.backbone,
        place_rows(mesh, pixels),
        place_rows(mesh, token_of),
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


def select(model: VLM, batch: Batch) -> Kept:
    """Selects the tokens of each pair by a program that ends with the selection.

    Args:
        model: the model.
        batch: result of `plan_batch`, for prompts with images.

    Returns:
        The kept tokens, one row per pair, on the model's devices.
    """
    capacity = batch.pairing.capacity
    if isinstance(batch.source, RankedPairs):
        return programs.run_take(*batch.source, capacity=capacity)
    plan = Plan(
        capacity=capacity,
        is_projected=batch.pruner.after_projector,
        execution=batch.options.execution,
        mesh=mesh_of(model.params),
    )
    return programs.run_select(
        model.params, model.backbone, batch.pruner.program(), batch.source, plan=plan
    )


def prepare_prefill(model: VLM, batch: Batch) -> PrefillInputs:
    """Plans the rows of a batch, after the programs whose results decide the shapes of the prefill.

    These programs are the selection, unless the prefill includes the selection, and the layers of
    the language model before a cut whose number of tokens is not known.

    Args:
        model: the model.
        batch: result of `plan_batch`.

    Returns:
        The inputs of `prefill`. If a learned stop decides the number of tokens, this function
        copies the counts to the host.

    Warns:
        UserWarning: a prompt is longer than the context and is truncated.
    """
    pairing, pruner, source = batch.pairing, batch.pruner, batch.source
    counts = pairing.counts
    if isinstance(source, Kept) or (isinstance(source, Pairs) and batch.selects_in_prefill):
        tokens = source
    else:
        tokens = select(model, batch)
        if isinstance(source, Pairs) and not pruner.budget.is_exact:
            counts = to_host(tokens.count)
    plan, layout, num_kept = plan_rows(model, batch, counts)
    if is_joint(model.config, batch) and not enters_known(model.config, pruner):
        # With a fixed capacity, one prefill program serves images of all sizes. The additional
        # token shows the program that a row is longer than its slots.
        tokens = programs.run_resize(tokens, capacity=plan.slots[0] + 1, mesh=plan.mesh)
    visual_tokens = np.where(pairing.has_image, pairing.size[pairing.pair], 0).sum(1)
    inputs = PrefillInputs(pruner, plan, layout, tokens, visual_tokens, num_kept)
    if plan.cuts and not pruner.budget.is_exact:
        context_limit = batch.options.context_limit or model.backbone.CONTEXT_LIMIT
        return _prefill_to_cut(model, inputs, context_limit)
    return inputs


def _prefill_to_cut(model: VLM, inputs: PrefillInputs, context_limit: int) -> PrefillInputs:
    """Runs the language model up to a cut whose selection decides the row lengths after the cut.

    A cut is a place between two layers where the pruner drops visual tokens. The host must know how
    many tokens remain before it can choose the program for the layers after the cut.

    Args:
        model: the model.
        inputs: kept tokens and a plan with exactly one cut.
        context_limit: longest row.

    Returns:
        The inputs of the program that continues at the cut: with the state of the language model at
        the cut, the number of remaining visual tokens, and the row length after the cut.
    """
    plan = inputs.plan
    # With `prunes_cache`, the cache at the cut has no free slots for new tokens. A constant number
    # of new tokens lets answers of any length share the program.
    max_tokens = 1 if plan.cuts[0].prunes_cache else plan.max_tokens
    paused, counts = programs.run_prefill_to_cut(
        model.params,
        model.backbone,
        inputs.pruner.program(),
        inputs.tokens,
        inputs.layout,
        plan=dataclasses.replace(plan, max_tokens=max_tokens),
    )
    num_remaining, num_kept = to_host(counts).T
    length_before = plan.slots[0]
    length_after = min(length_bucket(int(num_remaining.max()), context_limit), length_before)
    plan = dataclasses.replace(plan, slots=(length_before, length_after))
    return inputs._replace(plan=plan, tokens=paused, num_kept=num_kept)


def embed(
    model: VLM, inputs: PrefillInputs
) -> tuple[Float[np.ndarray, "b s e"], Int[np.ndarray, "b"]]:
    """Copies the rows of `build_rows` to the host: the embeddings of each row, and its length."""
    rows = build_rows(model, inputs)
    return to_host((rows.hidden, rows.length))


def build_rows(model: VLM, inputs: PrefillInputs) -> RowSequence:
    """Builds the input rows of a language model that another program runs.

    Args:
        model: the model.
        inputs: result of `prepare_prefill` for images with features or prompts without images, and
            a pruner that drops no tokens between layers.

    Returns:
        The rows before the first layer, with zeros in the padding.
    """
    # The plan is part of the key of the compiled program, so it has only the fields that matter.
    plan = Plan(
        is_projected=inputs.plan.is_projected,
        slots=inputs.plan.slots,
        positions=inputs.plan.positions,
        mesh=inputs.plan.mesh,
    )
    return programs.run_build_sequence(
        model.params, model.backbone, inputs.tokens, inputs.layout, plan=plan
    )


def prefill(model: VLM, inputs: PrefillInputs, sampling: Sampling) -> PrefillResult:
    """Runs the language model over a batch and samples the first token of each row.

    Args:
        model: the model.
        inputs: result of `prepare_prefill`.
        sampling: how tokens are sampled, from `Sampling.resolve`.

    Returns:
        The decoding state, the trace of the prefill, and the numbers of visual tokens.
    """
    plan, has_selection = inputs.plan, isinstance(inputs.tokens, Pairs)
    program = programs.run_first_tokens if has_selection else programs.run_prefill
    # A pruner that the program does not read would still cause another compilation.
    pruner = inputs.pruner.program() if has_selection or plan.cuts else None
    state, trace = program(
        model.params, model.backbone, pruner, inputs.tokens, inputs.layout, sampling, plan=plan
    )
    return PrefillResult(state, trace, inputs.visual_tokens, inputs.num_kept)


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
    return prefill(model, prepare_prefill(model, batch), sampling)


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
    stride, max_unread = (1, 1) if by_step else (stride, 0)
    language, unread_outputs = {"language": model.params["language"]}, collections.deque()
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
