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
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import truncated_images
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.base import (
    Batch,
    Begun,
    Decoding,
    Images,
    Pairs,
    Plan,
    Prompts,
    RunOptions,
    Texts,
)
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import (
    decodes_by_step,
    fetch,
    mesh_of,
    place_rows,
    replicate_like,
)
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket, ladder, row_bucket
from stepprune_jax.pruning import AllTokens, Budget, Kept, Pruner, Ranker, Ranking, View
from stepprune_jax.trained import Weighted


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
    if isinstance(pruner, Weighted):
        pruner = pruner.prepare()
    return replicate_like(model.params, pruner)


def see(model: VLM, pruner: Pruner, prompts: Prompts, images: Images) -> View:
    """Builds a pruner's view of a batch: a row for each (image, prompt) pair, as in `choose`."""
    choice = _plan_choice(model, pruner, prompts, images, None)
    pairs = _pairs(model, pruner, prompts, images, choice)
    plan = Plan(projected=pruner.after_projector, mesh=mesh_of(model.params))
    return programs.run_see(model.params, model.backbone, pairs, plan=plan)


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


class _Choice(NamedTuple):
    """What a pruner chooses from, as far as the host knows it."""

    rows: "_Rows"
    counts: Int[np.ndarray, "r"]  # tokens to keep if they follow from the images' sizes, or all
    capacity: int  # padded number of tokens kept of an image, the most where a stop decides
    sizes: Sequence[int]  # padded numbers to choose from


def _plan_choice(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images,
    sizes: Sequence[int] | None,
) -> _Choice:
    """Plans the choice of a batch; `sizes` are those of `choose`."""
    config, rows = model.config, _pair_up(prompts.image_of)
    n = _padded_tokens(model, images)
    schedule = pruner.schedule(config, n)
    if schedule.enter == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(schedule.most)
    counts = exact_counts(model.config, pruner, images.sizes[rows.image])
    capacity = choose_bucket(counts, sizes) if pruner.budget.is_exact else schedule.most
    return _Choice(rows, counts, capacity, sizes)


def _choose(
    model: VLM,
    pruner: Pruner,
    choice: _Choice,
    prompts: Prompts,
    images: Images,
    execution: Execution,
    ranking: Ranking | None,
) -> tuple[Kept, Int[np.ndarray, "r"]]:
    """Runs a planned choice; see `choose`."""
    mesh = mesh_of(model.params)
    if ranking is not None:
        counts = np.asarray(pruner.counts(ranking, choice.counts), np.int32)
        arrays = (images.features[choice.rows.image], ranking.order, counts)
        capacity = choose_bucket(counts, choice.sizes)
        return programs.run_take(*place_rows(mesh, arrays), capacity=capacity), counts
    pairs = _pairs(model, pruner, prompts, images, choice)
    plan = Plan(choice.capacity, pruner.after_projector, execution=execution, mesh=mesh)
    kept = programs.run_choose(model.params, model.backbone, pruner.program(), pairs, plan=plan)
    return kept, choice.counts if pruner.budget.is_exact else fetch(kept.count)


def rank(model: VLM, pruner: Ranker, prompts: Prompts, images: Images, steps: int) -> Ranking:
    """Puts the tokens of each (image, prompt) pair in an order of length `steps`.

    Args are those of `choose`, with a `Ranker` and images after the tower; rows are as there.
    """
    # One program serves every budget: an order does not depend on it.
    pruner = dataclasses.replace(pruner.program(), budget=Budget())
    plan = Plan(projected=pruner.after_projector, mesh=mesh_of(model.params))
    choice = _plan_choice(model, pruner, prompts, images, None)
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
    padded to the next of a ladder of lengths. `sizes` and `ranking` are those of `choose`. A prompt
    that is longer than the context is truncated, with a warning.
    """
    config, mesh = model.config, mesh_of(model.params)
    capacity, padded, cuts, chooses = 0, 1, (), False
    if images is None or not prompts.has_image.any():
        rows, pruner, tokens = _pair_up(prompts.image_of), AllTokens(), _no_tokens(model)
        size, grid = np.zeros(1, np.int32), np.ones((1, 2), np.int32)
        counts = size
    else:
        choice = _plan_choice(model, pruner, prompts, images, sizes)
        rows, size, grid = choice.rows, images.sizes, images.grid
        size, grid = size[rows.image], grid[rows.image]
        cuts = pruner.cuts(config, _padded_tokens(model, images))
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
    of_image = _fit(prompts, np.where(rows.shown, counts[rows.slot], 0), limit)
    survivors = _survivors(pruner, config, of_image, len(cuts))
    left, j = [of_image, *survivors.sum(3)], rows.slot.shape[1]
    if width is None:
        slots, text = _lengths(prompts.length - rows.shown.sum(1), left, limit)
        # The most ids that so many slots can take, and one more for a row that is truncated, so
        # that the program depends on the length of the rows alone.
        ids = _padded_to(prompts.ids, slots[0] + j + 1)
    else:
        most = [padded, *(int(count.max(initial=0)) for count in left[1:])]
        slots, text = [width + j * count for count in most], width
        ids = _padded_to(prompts.ids, width)
    own = options.positions == "own"
    plan = Plan(
        capacity=capacity,
        projected=pruner.after_projector and ranking is None,
        slots=tuple(slots),
        cuts=cuts,
        text=text if any(cut.rows == "text" for cut in cuts) else 0,
        positions=pruner.own_positions(config) if own else options.positions,
        max_tokens=options.max_tokens,
        execution=options.execution,
        mesh=mesh,
    )
    texts = Texts(
        ids, prompts.length, rows.slot, rows.shown, grid[rows.slot], tuple(survivors[..., 0])
    )
    # An unused pruner would still distinguish programs, so it is left out.
    used = pruner.program() if cuts or chooses else None
    before = np.where(rows.shown, size[rows.slot], 0).sum(1)
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
    remain, visual = fetch(count).T
    slots = min(_bucket(int(remain.max()), ladder(limit)), plan.slots[0])
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
    return fetch((rows.hidden, rows.length))


def begin(model: VLM, batch: Batch, sampling: Sampling) -> Begun:
    """Runs the language model, and what `prepare` left to its program, to the first tokens."""
    plan, pruner, tokens, texts, visual_tokens, kept = batch
    state, trace = programs.run_begin(
        model.params, model.backbone, pruner, tokens, texts, sampling, plan=plan
    )
    return Begun(state, trace, visual_tokens, kept)


class Drawn(NamedTuple):
    """What the host reads of a step."""

    token: Int[np.ndarray, "b"]
    finished: Bool[np.ndarray, "b"]
    finite: Bool[np.ndarray, "b"]


def decode(
    model: VLM,
    state: Decoding,
    sampling: Sampling,
    limit: int,
    execution: Execution = Execution(),
    stride: int = 1,
) -> Iterator[tuple[Decoding, Drawn]]:
    """Draws tokens after the first, up to a limit; consumes the state.

    Yields the state and what was drawn last, after `stride` tokens or all; whoever reads it stops
    where all rows are finished. Where the host starts each step, it starts the next one before it
    reads what was drawn, so that the device never waits; the state is then a step ahead, which
    changes nothing that is finished.
    """
    by_step = decodes_by_step(model.params)
    language = {"language": model.params["language"]}
    stride, behind = 1 if by_step else stride, collections.deque()
    for step in range(1, limit, stride):
        state, drawn = decoding.run_decode(
            language,
            model.config,
            state,
            sampling,
            None if by_step else np.int32(min(step + stride, limit)),
            execution=execution,
            mesh=mesh_of(model.params),
        )
        behind.append(drawn)
        if len(behind) > by_step:
            yield state, _read(behind.popleft())
    for drawn in behind:
        yield state, _read(drawn)


def _read(drawn: Int[Array, "3 b"]) -> Drawn:
    token, finished, finite = np.asarray(drawn)
    return Drawn(token, finished > 0, finite > 0)


def finish(
    model: VLM,
    state: Decoding,
    sampling: Sampling,
    limit: int,
    execution: Execution = Execution(),
) -> Decoding:
    """Draws all tokens after the first, up to a limit; consumes the state."""
    for after, drawn in decode(model, state, sampling, limit, execution, stride=limit):
        state = after
        if drawn.finished.all():
            break
    return state


class _Rows(NamedTuple):
    """The (image, prompt) pairs of a batch, padded to a bucket by repeating the first."""

    image: Int[np.ndarray, "r"]  # row in the images
    prompt: Int[np.ndarray, "r"]  # row of the batch
    slot: Int[np.ndarray, "b j"]  # pair of each image of each prompt
    shown: Bool[np.ndarray, "b j"]  # True = image


def _pair_up(image_of: Int[np.ndarray, "b j"]) -> _Rows:
    b, j = image_of.shape
    shown = image_of >= 0
    prompt, place = np.nonzero(shown)
    count = len(prompt)
    slot = np.zeros((b, j), np.int32)
    slot[prompt, place] = np.arange(count)
    image = image_of[prompt, place]
    rows = _padded_rows(count, b)
    return _Rows(*(x[rows].astype(np.int32) for x in (image, prompt)), slot, shown)


def _padded_rows(count: int, batch: int) -> Int[np.ndarray, "r"]:
    """Returns 0, 1, ..., padded with zeros to a bucket; multiples of `batch` are buckets."""
    rows = np.arange(row_bucket(count, range(batch, count + batch, batch)))
    return np.where(rows < count, rows, 0)


def _padded_tokens(model: VLM, images: Images) -> int:
    """Returns the padded number n of tokens of each image after the tower."""
    if images.features is not None:
        return images.features.shape[1]
    return model.backbone.padded_tokens(images.pixels)


def _pairs(model: VLM, pruner: Pruner, prompts: Prompts, images: Images, choice: _Choice) -> Pairs:
    """Places a pruner's inputs on the model's devices."""
    rows, mesh = choice.rows, mesh_of(model.params)
    image, n = rows.image, _padded_tokens(model, images)
    sizes, grid, seed = images.sizes[image], images.grid[image], images.seed[image]
    said = zip(prompts.words[rows.prompt], prompts.num_words[rows.prompt], seed, strict=True)
    # Continued by the question, so that neither place nor batch changes what is drawn for a row.
    seed = np.array([zlib.crc32(ids[:count], check) for ids, count, check in said], np.uint32)
    if images.features is None:
        used, image = np.unique(image, return_inverse=True)
        used = used[_padded_rows(len(used), len(prompts.length))]
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
                sizes if (sizes < n).any() else None,
                words[rows.prompt],
                num_words[rows.prompt],
                prompts.number[rows.prompt],
                seed,
                choice.counts,
            ),
        ),
    )


def exact_counts(
    config: ModelConfig, pruner: Pruner, image_sizes: Int[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Returns the tokens to keep of images if they follow from their sizes, otherwise all."""
    sizes, at = np.unique(image_sizes, return_inverse=True)
    counts = [pruner.schedule(config, int(size)).enter for size in sizes]
    pairs = zip(counts, sizes, strict=True)
    return np.array([size if count is None else count for count, size in pairs], np.int32)[at]


def _no_tokens(model: VLM) -> Kept:
    """Returns placeholder tokens for a batch without images."""
    dtype = jax.tree.leaves(model.params)[0].dtype
    one = np.zeros((1, 1), np.int32)
    return Kept(one, one, np.zeros((1, 1, model.config.feature_width), dtype), one > 0, one[0])


def _padded_to(ids: Int[np.ndarray, "b l"], width: int) -> Int[np.ndarray, "b width"]:
    """Pads or cuts ids at the right end."""
    ids = ids[:, :width]
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])))


def _survivors(
    pruner: Pruner, config: ModelConfig, of_image: Int[np.ndarray, "b j"], cuts: int
) -> Int[np.ndarray, "cuts b j 2"]:
    """Evaluates `Schedule.after` for each image of each row; 0 for images without tokens."""
    left = np.zeros((cuts, *of_image.shape, 2), np.int32)
    for size in np.unique(of_image[of_image > 0]) if cuts else ():
        of_size = np.array(pruner.schedule(config, int(size)).after)
        left[:, of_image == size] = of_size[:, None]
    return left


def _lengths(
    text: Int[np.ndarray, "b"], left: Sequence[Int[np.ndarray, "b j"]], limit: int
) -> tuple[list[int], int]:
    """Returns buckets for the rows of each stage, and for their text alone."""
    totals = [np.minimum(text + count.sum(1), limit).max() for count in left]
    slots = [_bucket(int(total), ladder(limit)) for total in totals]
    return slots, _bucket(int(text.max()), ladder(limit, 16))


def _fit(prompts: Prompts, of_image: np.ndarray, limit: int) -> np.ndarray:
    """Returns tokens of each image [b, j] after truncating rows to the context."""
    shown = prompts.image_of >= 0
    text = prompts.length - shown.sum(1)
    longest = int((text + of_image.sum(1)).max())
    if longest > limit:
        warnings.warn(
            f"a prompt of {longest} embeddings was truncated to its first {limit}: its end, and so "
            "the question, may be lost",
            stacklevel=3,
        )
        of_image = of_image.copy()
        for row, (ids, length) in enumerate(zip(prompts.ids, prompts.length, strict=True)):
            mine = row, shown[row]
            of_image[mine] = truncated_images(ids[:length], of_image[mine], limit)
    return of_image


def _bucket(longest: int, sizes: Sequence[int]) -> int:
    """Returns the first of ascending sizes that is large enough, or the last one."""
    return next((size for size in sizes if size >= longest), sizes[-1])
