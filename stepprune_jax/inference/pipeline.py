"""The steps of a batch from prompts and images to answers.

    encode -> choose -> prepare -> begin -> finish

`encode` runs the tower once per image; `choose` lets a pruner keep tokens for each (image, prompt)
pair; `prepare` plans the rows of the language model; `begin` runs it to the first tokens, in stages
if the pruner cuts between its layers; `finish` draws the rest. Given images before the tower,
`prepare` leaves tower and choice to the program of `begin` where the counts are known in advance.
Shapes are padded to buckets, so that the number of compiled programs is bounded for any input.
"""

import collections
import dataclasses
import zlib
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
    Pairs,
    Plan,
    PrefillResult,
    PromptLayout,
    Prompts,
    RunOptions,
)
from stepprune_jax.inference.plan import (
    PairPlan,
    enters_known,
    fit_context,
    has_joint_bucket,
    joint_rows,
    joint_text,
    length_bucket,
    padded_rows,
    padded_to,
    pair_up,
    plan_choice,
    row_lengths,
    survivors,
)
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import (
    decodes_by_step,
    mesh_of,
    place_rows,
    replicate_like,
    to_host,
)
from stepprune_jax.policy.buckets import choose_bucket
from stepprune_jax.pruning import AllTokens, Budget, Kept, Pruner, PrunerInputs, Ranker, Ranking
from stepprune_jax.selectors import TrainedPruner


def encode(
    model: VLM, images: Images, taps: Sequence[Tap] = (), execution: Execution = Execution()
) -> Images:
    """Runs the tower over images as one batch; the result is on the model's devices."""
    mesh, taps = mesh_of(model.params), tuple(dict.fromkeys(taps))
    features, tapped = programs.run_encode(
        model.params,
        model.backbone,
        place_rows(mesh, images.pixels),
        taps=taps,
        plan=Plan(execution=execution, mesh=mesh),
    )
    tapped = dict(zip(taps, tapped, strict=True))
    return images._replace(pixels=None, features=features, taps=tapped)


def place_pruner(model: VLM, pruner: Pruner) -> Pruner:
    """Copies a pruner's weights to the model's devices, as its programs read them."""
    if isinstance(pruner, TrainedPruner):
        pruner = pruner.prepare()
    placed = replicate_like(model.params, pruner)
    # The host counts tokens by the budget.
    return dataclasses.replace(placed, budget=pruner.budget)


def make_pruner_inputs(
    model: VLM, pruner: Pruner, prompts: Prompts, images: Images
) -> PrunerInputs:
    """Builds a pruner's view of a batch: a row for each (image, prompt) pair, as in `choose`."""
    choice = _plan_choice(model, pruner, prompts, images)
    pairs = _pairs(model, pruner, prompts, images, choice)
    plan = Plan(projected=pruner.after_projector, mesh=mesh_of(model.params))
    return programs.run_make_pruner_inputs(model.params, model.backbone, pairs, plan=plan)


def choose(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images,
    *,
    execution: Execution = Execution(),
    sizes: Sequence[int] | None = None,
    ranking: Ranking | None = None,
) -> tuple[Kept, Int[np.ndarray, "r"]]:
    """Keeps tokens of each (image, prompt) pair, and returns them with their counts on the host.

    Pairs are in order of prompts, with the first repeated in the rows that pad them to a bucket.
    Counts are read back from the devices only where a learned stop decides. Kept tokens are padded
    to one of `sizes`, by default those of `bucket_ladder`. A `ranking` of the pairs spares its
    computation; the kept tokens are then those before the projector, for any pruner. Images after
    the tower need the taps of the pruner.
    """
    choice = _plan_choice(model, pruner, prompts, images, sizes)
    return _choose(model, pruner, choice, prompts, images, execution, ranking)


def _choose(
    model: VLM,
    pruner: Pruner,
    choice: PairPlan,
    prompts: Prompts,
    images: Images,
    execution: Execution,
    ranking: Ranking | None,
) -> tuple[Kept, Int[np.ndarray, "r"]]:
    """Runs a planned choice; see `choose`."""
    mesh = mesh_of(model.params)
    if ranking is not None:
        counts = np.asarray(pruner.counts(ranking, choice.counts), np.int32)
        arrays = (images.features[choice.image], ranking.order, counts)
        capacity = choose_bucket(counts, choice.sizes)
        return programs.run_take(*place_rows(mesh, arrays), capacity=capacity), counts
    pairs = _pairs(model, pruner, prompts, images, choice)
    plan = Plan(choice.capacity, pruner.after_projector, execution=execution, mesh=mesh)
    kept = programs.run_choose(model.params, model.backbone, pruner.program(), pairs, plan=plan)
    return kept, choice.counts if pruner.budget.is_exact else to_host(kept.count)


def rank(model: VLM, pruner: Ranker, prompts: Prompts, images: Images, steps: int) -> Ranking:
    """Puts the tokens of each (image, prompt) pair in an order of length `steps`.

    Args are those of `choose`, with a `Ranker` and images after the tower; rows are as there.
    """
    # One program serves every budget: an order does not depend on it.
    pruner = dataclasses.replace(pruner.program(), budget=Budget())
    plan = Plan(projected=pruner.after_projector, mesh=mesh_of(model.params))
    choice = _plan_choice(model, pruner, prompts, images)
    pairs = _pairs(model, pruner, prompts, images, choice)
    return programs.run_rank(model.params, model.backbone, pruner, pairs, plan=plan, steps=steps)


def prepare(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images | None,
    options: RunOptions,
    *,
    sizes: Sequence[int] | None = None,
    width: int | None = None,
    ranking: Ranking | None = None,
) -> Batch:
    """Plans a batch, and chooses its tokens unless that is part of its last program.

    Rows have `width` slots for text and the padded tokens of their images; without it they are
    padded to the next of a ladder of lengths, or to those of a joint bucket (see `plan`). `sizes`
    and `ranking` are those of `choose`. A prompt that is longer than the context is truncated, with
    a warning.
    """
    config, mesh = model.config, mesh_of(model.params)
    capacity, padded, cuts, chooses, n = 0, 1, (), False, 0
    num_images = prompts.image_of.shape[1] if prompts.has_image.any() else 0
    joint = width is None and images is not None and has_joint_bucket(config, num_images)
    if joint:
        words = padded_to(prompts.words, joint_text(config, pruner, prompts))
        prompts = prompts._replace(words=words)
    if images is None or not prompts.has_image.any():
        choice, pruner, tokens = pair_up(prompts.image_of), AllTokens(), _no_tokens(model)
        size, grid, counts = np.zeros(1, np.int32), np.ones((1, 2), np.int32), choice.counts
    else:
        choice = _plan_choice(model, pruner, prompts, images, sizes)
        size, grid = images.sizes[choice.image], images.grid[choice.image]
        n = _padded_tokens(model, images)
        cuts = pruner.cuts(config, n)
        # Where the counts are known and the tower has not run, the last program chooses.
        chooses = images.features is None and pruner.budget.is_exact
        if chooses:
            tokens, counts = _pairs(model, pruner, prompts, images, choice), choice.counts
            capacity = padded = choice.capacity
        else:
            tokens, counts = _choose(
                model, pruner, choice, prompts, images, options.execution, ranking
            )
            padded = choose_bucket(counts, choice.sizes)
    limit = options.context_limit or model.backbone.CONTEXT_LIMIT
    of_image = np.where(choice.shown, counts[choice.slot], 0)
    of_image = fit_context(prompts, of_image, limit)
    after = survivors(config, pruner, of_image, len(cuts))
    left, j = [of_image, *after.sum(3)], choice.slot.shape[1]
    if width is None:
        if joint and enters_known(config, pruner):
            text = prompts.words.shape[1]
            slots = joint_rows(config, pruner, n, text, left, limit)
        else:
            slots, text = row_lengths(prompts.length - choice.shown.sum(1), left, limit)
            if joint:  # One program for images of all sizes; one more slot reveals truncated rows.
                tokens = programs.run_resize(tokens, capacity=slots[0] + 1, mesh=mesh)
        # The most ids that so many slots can take, and one more for a row that is truncated, so
        # that the program depends on the length of the rows alone.
        ids = padded_to(prompts.ids, slots[0] + j + 1)
    else:
        most = [padded, *(int(count.max(initial=0)) for count in left[1:])]
        slots, text = [width + j * count for count in most], width
        ids = padded_to(prompts.ids, width)
    own = options.positions == "own"
    plan = Plan(
        capacity=capacity,
        projected=pruner.after_projector and ranking is None,
        slots=tuple(slots),
        cuts=cuts,
        text=text if any(cut.rows == "text" for cut in cuts) else 0,
        positions=pruner.method_positions(config) if own else options.positions,
        max_tokens=options.max_tokens,
        execution=options.execution,
        mesh=mesh,
    )
    texts = PromptLayout(
        ids, prompts.length, choice.slot, choice.shown, grid[choice.slot], tuple(after[..., 0])
    )
    # An unused pruner would still distinguish programs, so it is left out.
    used = pruner.program() if cuts or chooses else None
    before = np.where(choice.shown, size[choice.slot], 0).sum(1)
    batch = Batch(plan, used, tokens, place_rows(plan.mesh, texts), before, left[-1].sum(1))
    return batch if not cuts or pruner.budget.is_exact else _halt(model, batch, limit)


def _halt(model: VLM, batch: Batch, limit: int) -> Batch:
    """Runs a batch to a cut whose counts depend on its tokens, and reads them back."""
    # A cache that forgets has no room yet, so answers of any length share its program.
    longest = 1 if batch.plan.cuts[0].forgets else batch.plan.max_tokens
    plan = dataclasses.replace(batch.plan, max_tokens=longest)
    halted, count = programs.run_halt(
        model.params, model.backbone, batch.pruner, batch.tokens, batch.texts, plan=plan
    )
    remain, visual = to_host(count).T
    slots = min(length_bucket(int(remain.max()), limit), plan.slots[0])
    plan = dataclasses.replace(batch.plan, slots=(plan.slots[0], slots))
    return batch._replace(plan=plan, tokens=halted, kept=visual)


def embed(model: VLM, batch: Batch) -> tuple[Float[np.ndarray, "b s e"], Int[np.ndarray, "b"]]:
    """Returns the rows that enter the language model, for one that runs elsewhere, and lengths.

    The batch is prepared from images after the tower, and for a pruner without cuts.
    """
    plan = Plan(
        projected=batch.plan.projected,
        slots=batch.plan.slots,
        positions=batch.plan.positions,
        mesh=batch.plan.mesh,
    )
    rows = programs.run_place(model.params, model.backbone, batch.tokens, batch.texts, plan=plan)
    return to_host((rows.hidden, rows.length))


def begin(model: VLM, batch: Batch, sampling: Sampling) -> PrefillResult:
    """Runs the language model, and what `prepare` left to its program, to the first tokens."""
    plan, pruner, tokens, texts, visual_tokens, kept = batch
    state, trace = programs.run_begin(
        model.params, model.backbone, pruner, tokens, texts, sampling, plan=plan
    )
    return PrefillResult(state, trace, visual_tokens, kept)


class StepOutput(NamedTuple):
    """What the host reads of a step."""

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
    """Draws the tokens after the first, up to `options.max_tokens` in all; consumes the state.

    Yields the state and what was drawn last, after every `stride` tokens. The caller stops once all
    rows are finished. Where the host starts each step, it starts the next one before it reads what
    was drawn, so that the device never waits; the state is then a step ahead, which changes no row
    that is finished.
    """
    by_step, limit = decodes_by_step(model.params), options.max_tokens
    language = {"language": model.params["language"]}
    stride, behind = 1 if by_step else stride, collections.deque()
    for step in range(1, limit, stride):
        state, drawn = decoding.run_decode(
            language,
            model.config,
            state,
            sampling,
            None if by_step else np.int32(min(step + stride, limit)),
            execution=options.execution,
            mesh=mesh_of(model.params),
        )
        behind.append(drawn)
        if len(behind) > by_step:
            yield state, _read(behind.popleft())
    for drawn in behind:
        yield state, _read(drawn)


def _read(drawn: Int[Array, "3 b"]) -> StepOutput:
    token, finished, finite = np.asarray(drawn)
    return StepOutput(token, finished > 0, finite > 0)


def finish(model: VLM, state: Decoding, sampling: Sampling, options: RunOptions) -> Decoding:
    """Draws all tokens after the first; consumes the state."""
    for after, drawn in decode(model, state, sampling, options, stride=options.max_tokens):
        state = after
        if drawn.finished.all():
            break
    return state


def _plan_choice(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images,
    sizes: Sequence[int] | None = None,
) -> PairPlan:
    n = _padded_tokens(model, images)
    return plan_choice(model.config, pruner, prompts.image_of, images.sizes, n, sizes)


def _padded_tokens(model: VLM, images: Images) -> int:
    """Returns the padded number n of tokens of each image after the tower."""
    if images.features is not None:
        return images.features.shape[1]
    return model.backbone.num_padded_tokens(images.pixels)


def _pairs(model: VLM, pruner: Pruner, prompts: Prompts, images: Images, choice: PairPlan) -> Pairs:
    """Places a pruner's inputs on the model's devices."""
    mesh, n = mesh_of(model.params), _padded_tokens(model, images)
    image, prompt = choice.image, choice.prompt
    sizes, grid, seed = images.sizes[image], images.grid[image], images.seed[image]
    said = zip(prompts.words[prompt], prompts.num_words[prompt], seed, strict=True)
    # Continued by the question, so that neither place nor batch changes what is drawn for a row.
    seed = np.array([zlib.crc32(ids[:count], check) for ids, count, check in said], np.uint32)
    if images.features is None:
        used, image = np.unique(image, return_inverse=True)
        used = used[padded_rows(len(used), len(prompts.length))]
        source = jax.tree.map(lambda part: part[used], images.pixels), None
    else:
        source = images.features, tuple(images.taps[tap] for tap in pruner.taps(model.config))
        if isinstance(images.features, np.ndarray):  # only the rows in use go to the devices
            source = jax.tree.map(lambda part: part[image], source)
            image = np.arange(len(image))
    if not isinstance(jax.tree.leaves(source)[0], jax.Array):
        source = place_rows(mesh, source)
    words, num_words = prompts.words, prompts.num_words
    if not pruner.reads_text:
        words, num_words = np.zeros((len(words), 1), np.int32), np.zeros(len(words), np.int32)
    return Pairs(
        *source,
        *place_rows(
            mesh,
            (
                image.astype(np.int32),
                grid,
                # An image that fills its bucket has the program of smaller ones.
                sizes if model.config.sizes_vary or (sizes < n).any() else None,
                words[prompt],
                num_words[prompt],
                prompts.number[prompt],
                seed,
                choice.counts,
            ),
        ),
    )


def _no_tokens(model: VLM) -> Kept:
    """Returns placeholder tokens for a batch without images."""
    dtype = jax.tree.leaves(model.params)[0].dtype
    one = np.zeros((1, 1), np.int32)
    return Kept(one, one, np.zeros((1, 1, model.config.token_width), dtype), one > 0, one[0])
