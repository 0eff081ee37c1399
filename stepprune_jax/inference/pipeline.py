"""The one way from images and prompts to answers.

    encode -> choose -> begin -> finish

`encode` runs the tower once an image; `choose` lets a pruner keep tokens for each (image, prompt);
`begin` projects them, puts them in their prompts and runs the language model, in stages where the
pruner cuts between its layers, to the first tokens; `finish` draws the rest. `begin` does by itself
what has not been done before: given `Images` it runs tower, choice and language model as the one or
two programs of `inference.programs`. Shapes are padded to buckets, so that the number of compiled
programs is bounded whatever is asked.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import truncate
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.buckets import ladder, row_bucket
from stepprune_jax.inference.decoding import Decoding, RunOptions, Sampling, Stages, Trace
from stepprune_jax.inference.programs import Choice, Features, Pairs, Pixels, Texts
from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import fetch, mesh_of, place_rows, replicate_like
from stepprune_jax.policy import bucket_ladder, choose_bucket
from stepprune_jax.pruning import Budget, Kept, Method, Pruner, Ranking, View


class Prompts(NamedTuple):
    """A set of prompts as the programs take it; arrays lie on the host.

    Attributes:
        ids: [q, l] with -200 where an image stands, right-padded.
        length: [q] of these.
        words: [q, w] ids of the user's words, for pruners that read them.
        num_words: [q] of these.
        image_of: [q, j] row of each of its images in the `Images` or `Vision`; -1 for none.
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


class Images(NamedTuple):
    """Images that the tower has not seen; on the host.

    Attributes:
        pixels: [i, ...] as the family's preprocessing makes them.
        grid: [i, 2] rows and columns of the patches.
        sizes: [i] tokens of each image.
    """

    pixels: Any
    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]


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


class Padding(NamedTuple):
    """Static sizes of a batch, where the ladders that are usual are not wanted.

    Attributes:
        kept: sizes that kept tokens may be padded to; None for those of `policy.bucket_ladder`.
        width: slots for text, so that rows are as long as that and the padded tokens of their
            images; None pads rows to the next of a ladder of lengths.
    """

    kept: tuple[int, ...] | None = None
    width: int | None = None


LADDERS = Padding()


class Begun(NamedTuple):
    """A batch after its first tokens.

    Attributes:
        state: of the decoding.
        trace: of the prefill.
        visual_tokens: [b] of each row before pruning, over all its images.
        kept: [b] of these, how many are left behind the last cut.
    """

    state: Decoding
    trace: Trace
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]


class Ready(NamedTuple):
    """A batch whose last program before the decoding is ready to run.

    Attributes:
        run: the program with all its arguments.
        choice: the program that kept the tokens, likewise, where that is not a part of `run`; it
            has run.
        visual_tokens: of `Begun`.
        kept: of `Begun`.
    """

    run: functools.partial
    choice: functools.partial | None
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]


def read_images(config: ModelConfig, pixels: Any) -> Images:
    """Describes images by their pixels, as the family's preprocessing makes them."""
    grid = np.asarray(config.family.grids(config, pixels), np.int32)
    return Images(pixels, grid, np.asarray(config.family.num_tokens(config, grid), np.int32))


def encode(
    model: VLM, images: Images, taps: Sequence[Tap] = (), execution: Execution = Execution()
) -> Vision:
    """Runs the tower.

    Args:
        model: the model.
        images: as many as shall go through it together.
        taps: intermediates that pruners want to see.
        execution: how the tower's blocks are run.

    Returns:
        The features and taps, on the model's devices.
    """
    mesh, taps = mesh_of(model.params), tuple(dict.fromkeys(taps))
    pixels = place_rows(mesh, images.pixels)
    tokens, tapped = programs.run_encode(
        model.params, model.config, pixels, taps=taps, execution=execution, mesh=mesh
    )
    return Vision(tokens, images.grid, images.sizes, dict(zip(taps, tapped, strict=True)))


def place_method(model: VLM, method: Method) -> Method:
    """Copies what a method has learned to the model's devices."""
    return method._replace(params=replicate_like(model.params, method.params))


def see(model: VLM, pruner: Pruner, prompts: Prompts, images: Vision) -> View:
    """Builds what a pruner sees of a batch.

    Args:
        model: the model.
        pruner: who looks.
        prompts: of the batch; at least one shows an image.
        images: theirs, with the taps that the pruner wants.

    Returns:
        A row for each (image, prompt) pair, as those of `choose`, on the model's devices.
    """
    shown = _shown(model, pruner, prompts, images, _pair_up(prompts.image_of))
    projected, mesh = pruner.after_projector, mesh_of(model.params)
    return programs.run_see(model.params, model.config, *shown, projected=projected, mesh=mesh)


def choose(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images | Vision,
    *,
    execution: Execution = Execution(),
    sizes: Sequence[int] | None = None,
    ranking: Ranking | None = None,
) -> tuple[Kept, Int[np.ndarray, "r"]]:
    """Keeps tokens of each (image, prompt) pair.

    Args:
        model: the model.
        method: from `place_method`.
        prompts: of the batch; at least one shows an image.
        images: theirs. A `Vision` has the taps that the pruner wants.
        execution: how the tower's blocks are run.
        sizes: static sizes that kept tokens may be padded to; by default those of
            `policy.bucket_ladder`.
        ranking: of these pairs, if it is known, on the host.

    Returns:
        What is kept of each pair, prompt by prompt, and of the first pair again in rows that pad
        them to a bucket; and [r] its counts on the host, which are read back from the devices only
        where a learned stop decides.
    """
    rows = _pair_up(prompts.image_of)
    run, counts, _ = _prepare_choice(
        model, method, prompts, images, rows, execution, sizes, ranking
    )
    kept = run()
    return kept, fetch(kept.count) if counts is None else counts


def rank(model: VLM, method: Method, prompts: Prompts, images: Vision, steps: int) -> Ranking:
    """Puts the tokens of each (image, prompt) pair in an order.

    Args:
        model: the model.
        method: of a `Ranker`, from `place_method`.
        prompts: of the batch; at least one shows an image.
        images: theirs, with the taps that the pruner wants.
        steps: length of the order.

    Returns:
        The orders, on the devices; rows as those of `choose`.
    """
    # One program serves every budget: an order does not depend on it.
    pruner = dataclasses.replace(method.pruner, budget=Budget())
    arguments = _shown(model, pruner, prompts, images, _pair_up(prompts.image_of))
    return programs.run_rank(
        model.params,
        model.config,
        method.params,
        *arguments,
        pruner=pruner,
        steps=steps,
        mesh=mesh_of(model.params),
    )


def prepare(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images | Vision | None,
    sampling: Sampling,
    options: RunOptions,
    *,
    padding: Padding = LADDERS,
    ranking: Ranking | None = None,
) -> Ready:
    """Does all of `begin` but its last program, the only one for `Images` and exact counts.

    Args:
        model: the model.
        method: how to prune, from `place_method`.
        prompts: the batch.
        images: of the prompts, before the tower or behind it; None without any.
        sampling: how tokens are drawn.
        options: how the model is run.
        padding: static sizes.
        ranking: order of the tokens of each image, if it is known; on the host.

    Returns:
        The last program, and what the host knows of its result.

    Warns:
        UserWarning: a prompt is longer than the context and was cut.
    """
    mesh, config = mesh_of(model.params), model.config
    rows, cuts = _pair_up(prompts.image_of), ()
    if len(rows.image):
        cuts = method.pruner.cuts(config, _padded_tokens(config, images))
        sizes, grid = images.sizes[rows.image], images.grid[rows.image]
        choice, counts, fitting = _prepare_choice(
            model, method, prompts, images, rows, options.execution, padding.kept, ranking
        )
    else:
        sizes, grid = np.zeros(1, np.int32), np.ones((1, 2), np.int32)
        choice, counts, fitting = functools.partial(_no_tokens, model), sizes, (1,)
    in_one = len(rows.image) > 0 and isinstance(images, Images) and counts is not None
    kept = None if in_one else choice()
    counts = fetch(kept.count) if counts is None else counts

    limit = options.context_limit or config.family.CONTEXT_LIMIT
    of_image = _fit(prompts, np.where(rows.shown, counts[rows.slot], 0), limit)
    survivors = _survivors(method.pruner, config, of_image, len(cuts))
    left = [of_image, *survivors.sum(3)]
    text = prompts.length - rows.shown.sum(1)
    j, ids, longest = rows.slot.shape[1], prompts.ids, prompts.ids.shape[1]
    if padding.width is None:
        totals = [np.minimum(text + count.sum(1), limit).max() for count in left]
        slots = [_bucket(int(total), ladder(limit)) for total in totals]
        # As many as there can be in so many slots, and one more for a row that is to be cut. So
        # the length of the rows is all that the program depends on.
        ids, longest = (
            _padded_to(ids, slots[0] + j + 1),
            _bucket(int(text.max()), ladder(limit, 16)),
        )
    else:
        most = [choose_bucket(counts, fitting), *(int(c.max(initial=0)) for c in left[1:])]
        slots = [padding.width + j * count for count in most]
    positions = options.positions
    if positions == "own":
        positions = method.pruner.own_positions(config)
    projected = len(rows.image) > 0 and method.pruner.after_projector
    stages = Stages(tuple(slots), projected=projected)
    if cuts:
        pruner = method.pruner.program()
        longest = longest if any(cut.rows == "text" for cut in cuts) else 0
        stages = Stages(tuple(slots), cuts, pruner, longest, positions == "compact", projected)
    static = {
        "stages": stages,
        "options": options._replace(positions=positions, context_limit=None),
        "mesh": mesh,
    }
    kept_behind = tuple(survivors[..., 0])
    texts = Texts(ids, prompts.length, rows.slot, rows.shown, grid[rows.slot], kept_behind)
    arguments = (place_rows(mesh, texts), sampling)
    if in_one:
        arguments, static = (*choice.args, *arguments), choice.keywords | static
        run = functools.partial(programs.run_answer, *arguments, **static)
    else:
        # What nobody reads would still tell one program from another.
        own = (model.params, config, method.params if cuts else (), kept)
        run = functools.partial(programs.run_begin, *own, *arguments, **static)
    before = np.where(rows.shown, sizes[rows.slot], 0)
    return Ready(run, None if in_one else choice, before.sum(1), left[-1].sum(1))


def begin(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images | Vision | None,
    sampling: Sampling,
    options: RunOptions,
    *,
    padding: Padding = LADDERS,
    ranking: Ranking | None = None,
) -> Begun:
    """Prunes the images of a batch of prompts, and runs the language model to the first tokens.

    Args and warnings are those of `prepare`, which does all that comes before the last program.

    Returns:
        The batch after its first tokens.
    """
    ready = prepare(
        model, method, prompts, images, sampling, options, padding=padding, ranking=ranking
    )
    return Begun(*ready.run(), ready.visual_tokens, ready.kept)


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


class _Rows(NamedTuple):
    """The (image, prompt) pairs of a batch, padded to a bucket by repeating the first.

    Attributes:
        image: [r] row in the images.
        prompt: [r] row of the batch.
        place: [r] which of the prompt's images it is.
        slot: [b, j] pair of each image of each prompt.
        shown: [b, j] True = image.
    """

    image: Int[np.ndarray, "r"]
    prompt: Int[np.ndarray, "r"]
    place: Int[np.ndarray, "r"]
    slot: Int[np.ndarray, "b j"]
    shown: Bool[np.ndarray, "b j"]


def _pair_up(image_of: Int[np.ndarray, "b j"]) -> _Rows:
    """Lists the (image, prompt) pairs of a batch."""
    b, j = image_of.shape
    prompt, place_of = np.nonzero(image_of >= 0)
    count = len(prompt)
    slot, shown = np.zeros((b, j), np.int32), np.zeros((b, j), bool)
    slot[prompt, place_of], shown[prompt, place_of] = np.arange(count), True
    image = image_of[prompt, place_of]
    rows = _padded_rows(count, b)
    return _Rows(*(x[rows].astype(np.int32) for x in (image, prompt, place_of)), slot, shown)


def _padded_rows(count: int, batch: int) -> Int[np.ndarray, "r"]:
    """0, 1, ..., padded with zeros to a bucket of rows; multiples of the batch are such."""
    rows = np.arange(row_bucket(count, range(batch, count + batch, batch)))
    return np.where(rows < count, rows, 0)


def _padded_tokens(config: ModelConfig, images: Images | Vision) -> int:
    """The number n of tokens that the tower's result has for each image."""
    if isinstance(images, Vision):
        return images.features.shape[1]
    leaves, structure = jax.tree.flatten(images.pixels)
    return _tower_tokens(config, structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))


@functools.cache
def _tower_tokens(config: ModelConfig, structure: Any, leaves: tuple[Any, ...]) -> int:
    """Shape of the tower's result for an image."""
    one = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in leaves]
    encode_one = functools.partial(vlm.encode_image, config=config)
    features, _ = jax.eval_shape(
        encode_one, vlm.abstract_params(config), pixels=structure.unflatten(one)
    )
    return features.shape[1]


def _shown(
    model: VLM, pruner: Pruner, prompts: Prompts, images: Images | Vision, rows: _Rows
) -> tuple[Pixels | Features, Pairs]:
    """What a pruner is shown of a batch, on the model's devices."""
    mesh, image, n = mesh_of(model.params), rows.image, _padded_tokens(model.config, images)
    sizes, grid = images.sizes[image], images.grid[image]
    if isinstance(images, Images):
        used, image = np.unique(image, return_inverse=True)
        used = used[_padded_rows(len(used), len(prompts.length))]
        source = Pixels(jax.tree.map(lambda part: part[used], images.pixels))
    else:
        taps = tuple(images.taps[tap] for tap in pruner.taps(model.config))
        source = Features(images.features, taps)
        if isinstance(images.features, np.ndarray):  # only what is looked at goes to the devices
            source = jax.tree.map(lambda part: part[image], source)
            image = np.arange(len(image))
    words, num_words = prompts.words, prompts.num_words
    if not pruner.reads_text:
        words, num_words = np.zeros((len(words), 1), np.int32), np.zeros(len(words), np.int32)
    pairs = Pairs(
        image=image.astype(np.int32),
        grid=grid,
        size=sizes if (sizes < n).any() else None,
        words=words[rows.prompt],
        num_words=num_words[rows.prompt],
        # Each image of a prompt has draws of its own; the first has those of the prompt's number.
        number=prompts.number[rows.prompt] + (rows.place << 24),
        count=exact_counts(pruner, sizes),
    )
    if not isinstance(jax.tree.leaves(source)[0], jax.Array):
        source = place_rows(mesh, source)
    return source, place_rows(mesh, pairs)


def exact_counts(pruner: Pruner, image_sizes: Int[np.ndarray, "r"]) -> Int[np.ndarray, "r"]:
    """Tokens to keep of images, where that follows from their sizes; else all."""
    count = [pruner.entering(int(size)) for size in image_sizes]
    return np.array(
        [size if c is None else c for c, size in zip(count, image_sizes, strict=True)], np.int32
    )


def _prepare_choice(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images | Vision,
    rows: _Rows,
    execution: Execution,
    sizes: Sequence[int] | None,
    ranking: Ranking | None,
) -> tuple[functools.partial[Kept], Int[np.ndarray, "r"] | None, Sequence[int]]:
    """The program that keeps tokens with its arguments; counts, if known; sizes to pad to."""
    pruner, mesh, n = method.pruner, mesh_of(model.params), _padded_tokens(model.config, images)
    if pruner.entering(n) == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(pruner.most(n))
    counts = exact_counts(pruner, images.sizes[rows.image])
    if ranking is not None:
        counts = np.asarray(pruner.counts(method.params, ranking, counts), np.int32)
        arrays = place_rows(mesh, (images.features[rows.image], ranking.order, counts))
        capacity = choose_bucket(counts, sizes)
        take = functools.partial(programs.run_take, *arrays, capacity=capacity)
        return take, counts, sizes
    capacity = choose_bucket(counts, sizes) if pruner.budget.is_exact else pruner.most(n)
    run = functools.partial(
        programs.run_choose,
        model.params,
        model.config,
        method.params,
        *_shown(model, pruner, prompts, images, rows),
        choice=Choice(pruner.program(), capacity, execution),
        mesh=mesh,
    )
    return run, counts if pruner.budget.is_exact else None, sizes


def _no_tokens(model: VLM) -> Kept:
    """Stands for the kept tokens of a batch without images."""
    dtype = jax.tree.leaves(model.params)[0].dtype
    one = np.zeros((1, 1), np.int32)
    return Kept(one, one, np.zeros((1, 1, model.config.feature_width), dtype), one > 0, one[0])


def _padded_to(ids: Int[np.ndarray, "b l"], width: int) -> Int[np.ndarray, "b width"]:
    """Ids with padding added or cut off at the right end."""
    ids = ids[:, :width]
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])))


def _survivors(
    pruner: Pruner, config: ModelConfig, of_image: Int[np.ndarray, "b j"], cuts: int
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


def _bucket(longest: int, sizes: Sequence[int]) -> int:
    """The smallest of some sizes in order that is large enough; the last one if none is."""
    return next((size for size in sizes if size >= longest), sizes[-1])
