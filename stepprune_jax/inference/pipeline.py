"""The pipeline from images and prompts to answers.

    encode -> choose -> begin -> finish

`encode` runs the tower once per image; `choose` lets a pruner keep tokens for each (image, prompt)
pair; `begin` projects them, puts them in their prompts and runs the language model to the first
tokens, in stages if the pruner cuts between its layers; `finish` draws the rest. `begin` performs
the earlier steps if they have not been done: given `Images`, it runs tower, choice and language
model as the one or two programs of `inference.programs`. Shapes are padded to buckets, so that the
number of compiled programs is bounded for any input.
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
from stepprune_jax.data.prompts import truncated_images
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.buckets import ladder, row_bucket
from stepprune_jax.inference.decoding import Decoding, RunOptions, Sampling, Stages, Trace
from stepprune_jax.inference.programs import Choice, Features, Pairs, Pixels, Texts
from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import fetch, mesh_of, place_rows, replicate_like
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.pruning import Budget, Kept, Method, Pruner, Ranking, View


class Prompts(NamedTuple):
    """A set of prompts in the form that programs read; arrays are on the host.

    Attributes:
        ids: [q, l] right-padded ids, with -200 in place of an image.
        length: [q] number of ids.
        words: [q, w] ids of the user's words, for pruners that read them.
        num_words: [q] number of these.
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
        """Mask of the prompts that show an image."""
        return (self.image_of >= 0).any(axis=1)

    def take(self, rows: Int[np.ndarray, "r"]) -> "Prompts":
        """Returns some of the prompts."""
        return Prompts(*(part[rows] for part in self))

    def cut(self, width: int) -> "Prompts":
        """Returns the prompts with ids padded or cut to `width`."""
        return self._replace(ids=self.ids[:, :width])


class Images(NamedTuple):
    """Images before the tower; on the host.

    Attributes:
        pixels: [i, ...] result of the family's preprocessing.
        grid: [i, 2] rows and columns of the patches.
        sizes: [i] tokens of each image.
    """

    pixels: Any
    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]


class Vision(NamedTuple):
    """Features of images after the tower; on the host or on devices.

    Attributes:
        features: [i, n, d] visual tokens; a smaller image's are a prefix of its row.
        grid: [i, 2] rows and columns of the patches; on the host.
        sizes: [i] tokens of each image; on the host.
        taps: [i, ...] intermediates for pruners.
    """

    features: Any
    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]
    taps: dict[Tap, Any]


class Padding(NamedTuple):
    """Static sizes of a batch, if not those of the default ladders.

    Attributes:
        kept: sizes that kept tokens may be padded to; None for those of `policy.bucket_ladder`.
        width: slots for text, so that rows have this length plus the padded tokens of their images;
            None pads rows to the next of a ladder of lengths.
    """

    kept: tuple[int, ...] | None = None
    width: int | None = None


LADDERS = Padding()


class Begun(NamedTuple):
    """A batch after its first tokens.

    Attributes:
        state: state of the decoding.
        trace: record of the prefill.
        visual_tokens: [b] visual tokens of each row before pruning, over all its images.
        kept: [b] number of these that remain after the last cut.
    """

    state: Decoding
    trace: Trace
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]


class Ready(NamedTuple):
    """A batch whose last program before the decoding is ready to run.

    Attributes:
        run: the program with all its arguments.
        choice: the program that kept the tokens, with its arguments, if it is not part of `run`; it
            has already run.
        visual_tokens: as in `Begun`.
        kept: as in `Begun`.
    """

    run: functools.partial
    choice: functools.partial | None
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]


def read_images(config: ModelConfig, pixels: Any) -> Images:
    """Builds `Images` from the result of the family's preprocessing."""
    grid = np.asarray(config.family.grids(config, pixels), np.int32)
    return Images(pixels, grid, np.asarray(config.family.num_tokens(config, grid), np.int32))


def encode(
    model: VLM, images: Images, taps: Sequence[Tap] = (), execution: Execution = Execution()
) -> Vision:
    """Runs the tower.

    Args:
        model: the model.
        images: the images, run as one batch.
        taps: intermediates that pruners need.
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
    """Copies a method's trained parameters to the model's devices."""
    return method._replace(params=replicate_like(model.params, method.params))


def see(model: VLM, pruner: Pruner, prompts: Prompts, images: Vision) -> View:
    """Builds a pruner's view of a batch.

    Args:
        model: the model.
        pruner: the pruner.
        prompts: prompts of the batch; at least one shows an image.
        images: their images, with the taps that the pruner needs.

    Returns:
        A row for each (image, prompt) pair, as in `choose`, on the model's devices.
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
        method: method from `place_method`.
        prompts: prompts of the batch; at least one shows an image.
        images: their images; a `Vision` needs the taps of the pruner.
        execution: how the tower's blocks are run.
        sizes: static sizes that kept tokens may be padded to; by default those of
            `policy.bucket_ladder`.
        ranking: ranking of these pairs on the host, if known.

    Returns:
        The kept tokens of each pair, in order of prompts, with the first pair repeated in the rows
        that pad them to a bucket; and [r] their counts on the host, which are read back from the
        devices only where a learned stop decides.
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
        method: method of a `Ranker`, from `place_method`.
        prompts: prompts of the batch; at least one shows an image.
        images: their images, with the taps that the pruner needs.
        steps: length of the order.

    Returns:
        The orders, on the devices, with rows as in `choose`.
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
    """Performs `begin` except its last program, which is the only one for exact counts.

    Args:
        model: the model.
        method: method from `place_method`.
        prompts: the batch.
        images: images of the prompts, before or after the tower; None if there are none.
        sampling: how tokens are drawn.
        options: how the model is run.
        padding: static sizes.
        ranking: order of the tokens of each image on the host, if known.

    Returns:
        The last program, and the counts known on the host.

    Warns:
        UserWarning: a prompt is longer than the context and was truncated.
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
        # The most ids that so many slots can take, and one more for a row that is truncated, so
        # that the program depends on the length of the rows alone.
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
        # Unused parameters would still distinguish programs, so they are left out.
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

    Args and warnings are those of `prepare`.

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
    """Draws all tokens up to a limit; consumes the state. Every limit uses the same program."""
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
        place: [r] number of the image in its prompt.
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
    """Returns 0, 1, ..., padded with zeros to a bucket; multiples of `batch` are buckets."""
    rows = np.arange(row_bucket(count, range(batch, count + batch, batch)))
    return np.where(rows < count, rows, 0)


def _padded_tokens(config: ModelConfig, images: Images | Vision) -> int:
    """Returns the padded number n of tokens of each image after the tower."""
    if isinstance(images, Vision):
        return images.features.shape[1]
    leaves, structure = jax.tree.flatten(images.pixels)
    return _tower_tokens(config, structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))


@functools.cache
def _tower_tokens(config: ModelConfig, structure: Any, leaves: tuple[Any, ...]) -> int:
    """Returns the number of tokens of the tower's result for an image."""
    one = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in leaves]
    encode_one = functools.partial(config.family.encode_image, config=config)
    features, _ = jax.eval_shape(
        encode_one, vlm.abstract_params(config), pixels=structure.unflatten(one)
    )
    return features.shape[1]


def _shown(
    model: VLM, pruner: Pruner, prompts: Prompts, images: Images | Vision, rows: _Rows
) -> tuple[Pixels | Features, Pairs]:
    """Places a pruner's inputs on the model's devices."""
    mesh, image, n = mesh_of(model.params), rows.image, _padded_tokens(model.config, images)
    sizes, grid = images.sizes[image], images.grid[image]
    if isinstance(images, Images):
        used, image = np.unique(image, return_inverse=True)
        used = used[_padded_rows(len(used), len(prompts.length))]
        source = Pixels(jax.tree.map(lambda part: part[used], images.pixels))
    else:
        taps = tuple(images.taps[tap] for tap in pruner.taps(model.config))
        source = Features(images.features, taps)
        if isinstance(images.features, np.ndarray):  # only the rows in use go to the devices
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
        # Each image of a prompt has its own draws; the first has those of the prompt's number.
        number=prompts.number[rows.prompt] + (rows.place << 24),
        count=exact_counts(pruner, sizes),
    )
    if not isinstance(jax.tree.leaves(source)[0], jax.Array):
        source = place_rows(mesh, source)
    return source, place_rows(mesh, pairs)


def exact_counts(pruner: Pruner, image_sizes: Int[np.ndarray, "r"]) -> Int[np.ndarray, "r"]:
    """Returns the tokens to keep of images if they follow from their sizes, otherwise all."""
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
    """Returns the choosing program with its arguments, the counts if known, and sizes to pad to."""
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
    """Evaluates `Pruner.survivors` for each image of each row; 0 for images without tokens."""
    left = np.zeros((cuts, *of_image.shape, 2), np.int32)
    for size in np.unique(of_image[of_image > 0]) if cuts else ():
        of_size = np.array(pruner.survivors(config, int(size)))
        left[:, of_image == size] = of_size[:, None]
    return left


def _fit(prompts: Prompts, of_image: np.ndarray, limit: int) -> np.ndarray:
    """Returns tokens of each image [b, j] after truncating rows to the context."""
    shown = prompts.image_of >= 0
    text = prompts.length - shown.sum(1)
    longest = int((text + of_image.sum(1)).max())
    if longest > limit:
        warnings.warn(
            f"a prompt of {longest} embeddings was truncated to its first {limit}: its end, and so "
            "the question, may be lost",
            stacklevel=4,
        )
        of_image = of_image.copy()
        for row, (ids, length) in enumerate(zip(prompts.ids, prompts.length, strict=True)):
            mine = row, shown[row]
            of_image[mine] = truncated_images(ids[:length], of_image[mine], limit)
    return of_image


def _bucket(longest: int, sizes: Sequence[int]) -> int:
    """Returns the first of ascending sizes that is large enough, or the last one."""
    return next((size for size in sizes if size >= longest), sizes[-1])
