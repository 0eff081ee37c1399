"""The one way from images and prompts to answers.

    encode -> choose -> assemble -> begin -> finish

`encode` runs the tower once an image; `choose` lets a pruner keep tokens for each (image, prompt);
`assemble` projects them and puts them in their prompts; `begin` runs the language model, in stages
where the pruner cuts between its layers, and draws the first tokens; `finish` draws the rest.
`rank_all` and `answer_all` do so for whole sets of prompts, batch by batch. Shapes are padded to
buckets, so that the number of compiled programs is bounded whatever is asked.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import truncate
from stepprune_jax.inference import decoding
from stepprune_jax.inference.buckets import ladder, row_bucket
from stepprune_jax.inference.decoding import Decoding, Sampling, Trace
from stepprune_jax.inference.text import answer_text
from stepprune_jax.inference.timing import timed
from stepprune_jax.models import vlm
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import (
    constrain_rows,
    fetch,
    jit_for_weights,
    mesh_of,
    place_rows,
    replicate_like,
)
from stepprune_jax.policy import bucket_ladder, choose_bucket
from stepprune_jax.pruning import Budget, Kept, Method, Pruner, Ranking, View
from stepprune_jax.pruning.base import take


class RunOptions(NamedTuple):
    """How the model is run; static.

    Attributes:
        positions: position ids of kept tokens, "original" or "compact", see `vlm.assemble`, or
            "own" for those of the method's authors. Behind a cut between layers, "compact" numbers
            what is left anew.
        execution: how the layers of tower and language model are run.
        context_limit: longest row after expansion; longer ones are cut at the right end. None for
            that of the model's family.
    """

    positions: str = "original"
    execution: Execution = Execution()
    context_limit: int | None = None


class Prompts(NamedTuple):
    """A set of prompts as the programs take it; arrays lie on the host.

    Attributes:
        ids: [q, l] with -200 where an image stands, right-padded.
        length: [q] of these.
        words: [q, w] ids of the user's words, for pruners that read them.
        num_words: [q] of these.
        image_of: [q, j] row of each of its images in the `Vision`; -1 for none.
        number: [q] number of each prompt in its set, for random draws.
    """

    ids: Int[np.ndarray, "q l"]
    length: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q w"]
    num_words: Int[np.ndarray, "q"]
    image_of: Int[np.ndarray, "q j"]
    number: Int[np.ndarray, "q"]

    @property
    def has_image(self) -> Bool[np.ndarray, "q"]:
        """Which prompts show an image."""
        return (self.image_of >= 0).any(axis=1)

    def take(self, rows: Int[np.ndarray, "r"]) -> "Prompts":
        """Returns some of the prompts."""
        return Prompts(*(part[rows] for part in self))

    def cut(self, width: int) -> "Prompts":
        """Returns the prompts with ids padded to so many."""
        return self._replace(ids=self.ids[:, :width])


class Vision(NamedTuple):
    """What the tower makes of images, once and for all; on the host or on devices.

    Attributes:
        features: [i, n, d] visual tokens; a smaller image's are a prefix of its row.
        grid: [i, 2] rows and columns of the patches; on the host.
        sizes: [i] tokens of each image; on the host.
        taps: [i, ...] intermediates that pruners see.
    """

    features: Any
    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]
    taps: dict[Tap, Any]


class Pairs(NamedTuple):
    """Every (image, prompt) pair is a row of the pruner; the rows are padded to a bucket.

    Attributes:
        image: [r] row in the `Vision`.
        prompt: [r] row of the batch.
        place: [r] which of the prompt's images it is.
        slot: [b, j] pair of each image of each prompt.
        present: [b, j] True = image.
        count: pairs without the padding.
    """

    image: Int[np.ndarray, "r"]
    prompt: Int[np.ndarray, "r"]
    place: Int[np.ndarray, "r"]
    slot: Int[np.ndarray, "b j"]
    present: Bool[np.ndarray, "b j"]
    count: int


class Begun(NamedTuple):
    """A batch after its first tokens.

    Attributes:
        state: of the decoding.
        trace: of the prefill.
        visual_tokens: [b] of each row before pruning, over all its images.
        kept: [b] of these, how many are left behind the last cut.
        shapes: what the compiled programs of this batch depend on.
    """

    state: Decoding
    trace: Trace
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]
    shapes: tuple[Any, ...]


def _encode(
    params: dict[str, Any],
    config: Any,
    pixels: Any,
    taps: tuple[Tap, ...],
    execution: Execution,
    mesh: Mesh | None,
) -> tuple[Array, tuple[Array, ...]]:
    features, tapped = vlm.encode_image(params, config, pixels, taps, execution)
    chosen = tuple(tapped[f"{tap.kind}.{tap.layer}"] for tap in taps)
    return constrain_rows(mesh, (features, chosen))


def _view(
    params: dict[str, Any],
    config: Any,
    features: Float[Array, "i n d"],
    taps: tuple[Array, ...],
    image: Int[Array, "r"],
    words: Int[Array, "r w"],
    num_words: Int[Array, "r"],
    mesh: Mesh | None,
    projected: bool = False,
) -> tuple[Array, tuple[Array, ...], Array, Array]:
    """Tokens, projected or not, taps, text and text mask of each pair."""
    text = vlm.embed_text(params, config, words)
    mask = jnp.arange(words.shape[1]) < num_words[:, None]
    chosen = tuple(tap[image] for tap in taps)
    tokens = features[image]
    if projected:
        tokens = vlm.project(params, config, tokens)
    return constrain_rows(mesh, (tokens, chosen, text, mask))


def _place(
    params: dict[str, Any],
    config: Any,
    ids: Int[Array, "b l"],
    length: Int[Array, "b"],
    kept: Kept,
    grid: Int[Array, "r 2"],
    slot: Int[Array, "b j"],
    present: Bool[Array, "b j"],
    positions: str,
    capacity: int,
    mesh: Mesh | None,
    projected: bool = False,
) -> vlm.Sequence:
    """Projects what was kept, unless it is already, and puts it in its places."""
    tokens = kept.tokens if projected else vlm.project(params, config, kept.tokens)
    visual = vlm.Visual(tokens, kept.valid, kept.index, kept.place, grid)
    visual = jax.tree.map(lambda part: part[slot], visual)
    visual = visual._replace(valid=visual.valid & present[..., None])
    sequence = vlm.assemble(params, config, ids, length, visual, positions, capacity)
    return constrain_rows(mesh, sequence)


run_encode = jit_for_weights(_encode, ("config", "taps", "execution", "mesh"))
run_view = jit_for_weights(_view, ("config", "mesh", "projected"))
run_place = jit_for_weights(_place, ("config", "positions", "capacity", "mesh", "projected"))


@functools.partial(jax.jit, static_argnames=("pruner", "capacity"))
def run_select(pruner: Pruner, params: Any, view: View, capacity: int) -> Kept:
    """`Pruner.select` in one program."""
    return pruner.select(params, view, capacity)


@functools.partial(jax.jit, static_argnames=("pruner", "steps"))
def run_rank(pruner: Pruner, params: Any, view: View, steps: int) -> Ranking:
    """`Ranker.rank` in one program."""
    return pruner.rank(params, view, steps)


run_take = jax.jit(take, static_argnames="capacity")


@functools.partial(jax.jit, static_argnames="capacity")
def _narrow(kept: Kept, capacity: int) -> Kept:
    """The first slots of each row."""
    count = kept.count
    return Kept(*(part[:, :capacity] for part in kept[:-1]), count)


def encode(
    model: VLM, pixels: Any, taps: Sequence[Tap] = (), execution: Execution = Execution()
) -> Vision:
    """Runs the tower.

    Args:
        model: the model.
        pixels: of some images, as the family's preprocessing makes them.
        taps: intermediates that pruners want to see.
        execution: how the tower's blocks are run.

    Returns:
        The features and taps, on the model's devices.
    """
    mesh = mesh_of(model.params)
    taps = tuple(dict.fromkeys(taps))
    features, tapped = run_encode(
        model.params,
        model.config,
        place_rows(mesh, pixels),
        taps=taps,
        execution=execution,
        mesh=mesh,
    )
    family, config = model.config.family, model.config
    grid = np.asarray(family.grids(config, pixels), np.int32)
    sizes = np.asarray(family.num_tokens(config, grid), np.int32)
    return Vision(features, grid, sizes, dict(zip(taps, tapped, strict=True)))


def place_method(model: VLM, method: Method) -> Method:
    """Copies what a method has learned to the model's devices."""
    return method._replace(params=replicate_like(model.params, method.params))


def pair_up(image_of: Int[np.ndarray, "b j"]) -> Pairs:
    """Lists the (image, prompt) pairs of a batch, padded by repeating the first."""
    b, j = image_of.shape
    prompt, place_of = np.nonzero(image_of >= 0)
    count = len(prompt)
    slot, present = np.zeros((b, j), np.int32), np.zeros((b, j), bool)
    slot[prompt, place_of], present[prompt, place_of] = np.arange(count), True
    image = image_of[prompt, place_of]
    if count:
        padding = row_bucket(count, range(b, count + b, b)) - count
        rows = np.append(np.arange(count), np.zeros(padding, np.int64))
        image, prompt, place_of = image[rows], prompt[rows], place_of[rows]
    image, prompt, place_of = (x.astype(np.int32) for x in (image, prompt, place_of))
    return Pairs(image, prompt, place_of, slot, present, count)


def make_view(model: VLM, pruner: Pruner, vision: Vision, prompts: Prompts, pairs: Pairs) -> View:
    """Builds what a pruner sees of a batch.

    Args:
        model: the model.
        pruner: who looks.
        vision: of all images; with the taps that the pruner wants.
        prompts: of the batch.
        pairs: from `pair_up`.

    Returns:
        A row for each pair, on the model's devices.
    """
    mesh, image = mesh_of(model.params), pairs.image
    rows, features = np.arange(len(image), dtype=np.int32), vision.features
    taps = tuple(vision.taps[tap] for tap in pruner.taps(model.config))
    if isinstance(features, np.ndarray):  # only what is looked at goes to the devices
        features, taps = features[image], tuple(tap[image] for tap in taps)
        features, taps = place_rows(mesh, (features, taps))
    else:
        rows = image
    words, num_words = prompts.words, prompts.num_words
    if not pruner.reads_text:
        words, num_words = np.zeros((len(words), 1), np.int32), np.zeros(len(words), np.int32)
    sizes, n = vision.sizes[image], vision.features.shape[1]
    # Each image of a prompt has draws of its own; the first has those of the prompt's number.
    number = prompts.number[pairs.prompt] + (pairs.place << 24)
    of_prompt = (words[pairs.prompt], num_words[pairs.prompt], number)
    rows, grid, count = place_rows(mesh, (rows, vision.grid[image], _exact(pruner, sizes)))
    words, num_words, number = place_rows(mesh, of_prompt)
    tokens, taps, text, text_valid = run_view(
        model.params,
        model.config,
        features,
        taps,
        rows,
        words,
        num_words,
        mesh=mesh,
        projected=pruner.after_projector,
    )
    valid = None
    if (sizes < n).any():
        valid = place_rows(mesh, np.arange(n) < sizes[:, None])
    return View(tokens, valid, grid, text, text_valid, number, count, taps)


def _exact(pruner: Pruner, image_sizes: Int[np.ndarray, "r"]) -> Int[np.ndarray, "r"]:
    """Tokens to keep of images, where that follows from their sizes; else all."""
    count = [pruner.entering(int(size)) for size in image_sizes]
    return np.array(
        [size if c is None else c for c, size in zip(count, image_sizes, strict=True)], np.int32
    )


def choose(
    model: VLM,
    method: Method,
    view: View,
    image_sizes: Int[np.ndarray, "r"],
    sizes: Sequence[int] | None = None,
    ranking: Ranking | None = None,
) -> tuple[Kept, Int[np.ndarray, "r"]]:
    """Keeps tokens of each row.

    Args:
        model: the model.
        method: from `place_method`.
        view: from `make_view`.
        image_sizes: [r] tokens of each row's image; on the host.
        sizes: static sizes that kept tokens may be padded to; by default those of
            `policy.bucket_ladder`.
        ranking: of these rows, if it is known, on the host.

    Returns:
        What is kept, in the smallest size that holds every row; and [r] its counts on the host,
        which are read back from the devices only where a learned stop decides.
    """
    pruner, n = method.pruner, view.tokens.shape[1]
    most = pruner.most(n)
    exact = _exact(pruner, image_sizes)
    if pruner.entering(n) == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(most)
    if ranking is not None:
        count = np.asarray(pruner.counts(method.params, ranking, exact), np.int32)
        capacity = choose_bucket(count, sizes)
        order, placed = place_rows(mesh_of(model.params), (ranking.order, count))
        return run_take(view.tokens, order, placed, capacity=capacity), count
    program = pruner.program()
    if pruner.budget.is_exact:
        return run_select(program, method.params, view, choose_bucket(exact, sizes)), exact
    kept = run_select(program, method.params, view, most)
    count = fetch(kept.count)
    return _narrow(kept, choose_bucket(count, sizes)), count


def _no_tokens(model: VLM, features: Any) -> Kept:
    """Stands for the kept tokens of a batch without images."""
    width = model.config.feature_width if features is None else features.shape[2]
    dtype = jax.tree.leaves(model.params)[0].dtype
    one = np.zeros((1, 1), np.int32)
    return Kept(one, one, np.zeros((1, 1, width), dtype), one > 0, one[0])


def begin(
    model: VLM,
    method: Method,
    prompts: Prompts,
    vision: Vision | None,
    sampling: Sampling,
    keys: Array,
    max_tokens: int,
    options: RunOptions,
    *,
    ranking: Ranking | None = None,
    sizes: Sequence[int] | None = None,
    width: int | None = None,
) -> Begun:
    """Prunes the images of a batch of prompts, and runs the language model to the first tokens.

    Args:
        model: the model.
        method: how to prune, from `place_method`.
        prompts: the batch.
        vision: of its images; None without any.
        sampling: how tokens are drawn.
        keys: [b] from `decoding.row_keys`.
        max_tokens: longest answer.
        options: how the model is run.
        ranking: order of the tokens of each image, if it is known; on the host.
        sizes: static sizes that kept tokens may be padded to.
        width: slots for text, so that rows are as long as that and the padded tokens of their
            images; without it rows are padded to the next of a ladder of lengths.

    Returns:
        The batch after its first tokens.
    """
    mesh, config = mesh_of(model.params), model.config
    pairs = pair_up(prompts.image_of)
    if pairs.count:
        view = make_view(model, method.pruner, vision, prompts, pairs)
        n, image_sizes = view.tokens.shape[1], vision.sizes[pairs.image]
        kept, counts = choose(model, method, view, image_sizes, sizes, ranking)
        grid = vision.grid[pairs.image]
    else:
        kept = _no_tokens(model, None if vision is None else vision.features)
        n, image_sizes, grid = 0, np.zeros(1, np.int32), np.ones((1, 2), np.int32)
        counts = np.zeros(1, np.int32)
    of_image = np.where(pairs.present, counts[pairs.slot], 0)
    before = np.where(pairs.present, image_sizes[pairs.slot], 0)
    limit = options.context_limit or config.family.CONTEXT_LIMIT
    of_image = _fit(prompts, of_image, limit)
    layer_cuts = method.pruner.cuts(config, n) if pairs.count else ()
    survivors = _survivors(method.pruner, config, of_image, len(layer_cuts))
    stages_of_image = [of_image, *survivors.sum(3)]
    text = prompts.length - (prompts.image_of >= 0).sum(1)
    j, capacity = pairs.slot.shape[1], kept.tokens.shape[1]
    slots = []
    for number, count in enumerate(stages_of_image):
        if width is None:
            slots.append(_bucket(min(int((text + count.sum(1)).max()), limit), limit))
        else:
            slots.append(width + j * (int(count.max(initial=0)) if number else capacity))
    ids, length, slot, present, grid = place_rows(
        mesh, (prompts.ids, prompts.length, pairs.slot, pairs.present, grid)
    )
    positions = options.positions
    if positions == "own":
        positions = method.pruner.positions
    sequence = run_place(
        model.params,
        config,
        ids,
        length,
        kept,
        grid,
        slot,
        present,
        positions=positions,
        capacity=slots[0],
        mesh=mesh,
        projected=bool(pairs.count) and method.pruner.after_projector,
    )
    stages = decoding.ONE_STAGE
    if layer_cuts:
        stages = decoding.Stages(
            method.pruner.program(),
            layer_cuts,
            tuple(slots[1:]),
            text=prompts.ids.shape[1],
            renumber=positions == "compact",
        )
    state, trace = decoding.run_start(
        model.params,
        config,
        sequence,
        keys,
        sampling,
        (method.params, tuple(place_rows(mesh, list(survivors[..., 0])))) if layer_cuts else (),
        stages=stages,
        max_tokens=max_tokens,
        execution=options.execution,
        mesh=mesh,
    )
    shapes = (ids.shape, prompts.words.shape, slot.shape, len(pairs.image), capacity, tuple(slots))
    return Begun(state, trace, before.sum(1), stages_of_image[-1].sum(1), shapes)


def _survivors(
    pruner: Pruner, config: Any, of_image: Int[np.ndarray, "b j"], cuts: int
) -> Int[np.ndarray, "cuts b j 2"]:
    """`Pruner.survivors` of each image of each row, none of images without tokens."""
    left = np.zeros((cuts, *of_image.shape, 2), np.int32)
    for size in np.unique(of_image[of_image > 0]) if cuts else ():
        of_size = np.array(pruner.survivors(config, int(size)))
        left[:, of_image == size] = of_size[:, None]
    return left


def _fit(prompts: Prompts, of_image: np.ndarray, limit: int) -> np.ndarray:
    """Tokens of each image [b, j] once rows are cut to the context."""
    shown = prompts.image_of >= 0
    text = prompts.length - shown.sum(1)
    longest = int((text + of_image.sum(1)).max())
    if longest > limit:
        warnings.warn(
            f"a prompt of {longest} embeddings was cut to its first {limit}: its end, and so the "
            "question, may be lost",
            stacklevel=4,
        )
        of_image = of_image.copy()
        for row, (ids, length) in enumerate(zip(prompts.ids, prompts.length, strict=True)):
            left = truncate(ids[:length].tolist(), of_image[row, shown[row]].tolist(), limit).kept
            of_image[row] = 0
            of_image[row, : len(left)] = left
    return of_image


def _bucket(longest: int, limit: int) -> int:
    """The next of a ladder of lengths."""
    return next(size for size in ladder(limit) if size >= longest)


def finish(
    model: VLM,
    state: Decoding,
    sampling: Sampling,
    limit: int,
    execution: Execution = Execution(),
) -> Decoding:
    """Draws all tokens up to a limit; consumes the state. One at a time is the same program."""
    return decoding.run_decode(
        model.params,
        model.config,
        state,
        sampling,
        np.int32(limit),
        execution=execution,
        mesh=mesh_of(model.params),
    )


class Batching(NamedTuple):
    """How a set of prompts is dealt out to batches.

    Attributes:
        batch_size: prompts at a time.
        sizes: static sizes that kept tokens are padded to; None for a ladder.
        widths: sizes that the prompts of a batch are padded to; without any, that of all prompts.
    """

    batch_size: int
    sizes: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()


class Answers(NamedTuple):
    """What was answered to a set of prompts.

    Attributes:
        texts: one a prompt.
        kept: [q] visual tokens that were kept.
        order: for each prompt the indices of its kept tokens: of a ranker in order of choice, of
            other methods in raster order, without tokens that were merged or added.
        seconds: [q] of each prompt: its share of the time of its batch, from features to the last
            token.
    """

    texts: list[str]
    kept: Int[np.ndarray, "q"]
    order: list[np.ndarray]
    seconds: Float[np.ndarray, "q"]


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the row numbers of each batch, the last one filled up, and how many are real."""
    for first in range(0, total, size):
        rows = np.arange(first, first + size)
        yield np.minimum(rows, total - 1), min(size, total - first)


def rank_all(
    model: VLM,
    method: Method,
    prompts: Prompts,
    vision: Vision,
    *,
    steps: int,
    batch_size: int,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Ranking, float]:
    """Ranks the tokens of each prompt's image, for all budgets of a `Ranker` at once.

    Args:
        model: the model.
        method: the ranker, from `place_method`.
        prompts: each with one image.
        vision: of all images, on the host.
        steps: length of the order.
        batch_size: prompts at a time.
        report: called with the number of prompts done at each batch.

    Returns:
        The ranking, on the host, and the mean seconds of a prompt.
    """
    # One program serves every budget: an order does not depend on it.
    pruner = dataclasses.replace(method.pruner, budget=Budget())
    parts, seconds = [], 0.0
    for rows, count in batches(len(prompts.length), batch_size):

        def run(rows=rows):
            batch = prompts.take(rows)
            view = make_view(model, pruner, vision, batch, pair_up(batch.image_of))
            return fetch(run_rank(pruner, method.params, view, steps=steps))

        ranking, taken = timed(run, run_view.num_compiled, run_rank._cache_size)
        seconds += taken
        parts.append(jax.tree.map(lambda part, count=count: part[:count], ranking))
        report(int(rows[0]) + count)
    ranking = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    return ranking, seconds / len(prompts.length)


def answer_all(
    model: VLM,
    method: Method,
    prompts: Prompts,
    vision: Vision,
    max_tokens: int,
    options: RunOptions,
    batching: Batching,
    *,
    ranking: Ranking | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Answers:
    """Answers every prompt greedily.

    Prompts are sorted by their widths, if there are several, and their counts, if a ranking tells
    them, so that a batch is padded to the smallest sizes that hold it. What a prompt is answered
    does not depend on the others.

    Args:
        model: the model.
        method: how to prune, from `place_method`.
        prompts: each with one image, or none of them with any.
        vision: of all images, on the host.
        max_tokens: longest answer.
        options: how the model is run.
        batching: sizes.
        ranking: from `rank_all`, for these prompts.
        report: called with the number of prompts done at each batch.

    Returns:
        The answers, in the order of the prompts.
    """
    total, size = len(prompts.length), batching.batch_size
    widths = batching.widths or (prompts.ids.shape[1],)
    bucket = np.searchsorted(widths, prompts.length)
    count, order = np.zeros(total, np.int32), [np.zeros(0, np.int32)] * total
    if ranking is not None:
        exact = _exact(method.pruner, vision.sizes[prompts.image_of[:, 0]])
        count = np.asarray(method.pruner.counts(method.params, ranking, exact), np.int32)
        order = [picks[:kept] for picks, kept in zip(ranking.order, count, strict=True)]
    ranked = np.lexsort((-count, -bucket))
    stops = np.array(model.config.eos_token_ids, np.int32)
    greedy = decoding.Sampling(np.float32(0), np.float32(1), stops)
    # Greedy: the keys are never used.
    keys = decoding.row_keys(jax.random.key(0), size)
    known: dict[tuple[int, ...], str] = {}
    texts, seconds, kept = [""] * total, np.zeros(total), np.zeros(total, np.int32)
    for first in range(0, total, size):
        rows = ranked[np.minimum(np.arange(first, first + size), total - 1)]
        real, width = min(size, total - first), int(widths[bucket[rows[0]]])

        def run(rows=rows, width=width):
            batch = prompts.take(rows).cut(width)
            known_rank = None if ranking is None else jax.tree.map(lambda x: x[rows], ranking)
            begun = begin(
                model,
                method,
                batch,
                vision,
                greedy,
                keys,
                max_tokens,
                options,
                ranking=known_rank,
                sizes=batching.sizes,
                width=width,
            )
            state = finish(model, begun.state, greedy, max_tokens, options.execution)
            tokens, counts = fetch((state.tokens, state.count))
            ids = [tuple(row[:n].tolist()) for row, n in zip(tokens, counts, strict=True)]
            return ids, begun.kept, begun.trace.stages[-1].index

        (ids, left, index), taken = timed(run, *_COMPILED)
        if ranking is None:
            index = fetch(index)
        for at, row in enumerate(rows[:real].tolist()):
            if ids[at] not in known:
                known[ids[at]] = answer_text(model.tokenizer, ids[at])
            texts[row], seconds[row], kept[row] = known[ids[at]], taken / real, left[at]
            if ranking is None:
                order[row] = index[at][index[at] >= 0]
        report(first + real)
    return Answers(texts, kept, order, seconds)


_COMPILED = (
    run_view.num_compiled,
    run_place.num_compiled,
    decoding.run_start.num_compiled,
    decoding.run_decode.num_compiled,
    run_select._cache_size,
    run_take._cache_size,
    _narrow._cache_size,
)
