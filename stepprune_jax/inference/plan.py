"""The plan of a batch: its pairs of image and prompt, counts of tokens, and lengths of rows.

Plans are numpy arrays and numbers on the host; no program runs. `plan_batch` plans the selection.
`plan_rows` plans the rows of the language model: within `plan_batch` if the images' sizes decide
the number of kept tokens, otherwise after the selection.
"""

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference.base import (
    Batch,
    Images,
    PairPlan,
    Pairs,
    Plan,
    PromptLayout,
    Prompts,
    RunOptions,
)
from stepprune_jax.inference.shapes import (
    counts_after_cuts,
    enters_known,
    exact_counts,
    has_joint_bucket,
    joint_rows,
    joint_text,
    row_lengths,
    varies_freely,
)
from stepprune_jax.inference.truncation import truncate_images
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel.placement import mesh_of, place_rows
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket, pad_ids, pad_rows
from stepprune_jax.pruning import AllTokens, Kept, Pruner, Ranking


def plan_batch(
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
    """Plans a batch, and lays out the arrays that its programs read.

    Args:
        model: the model.
        pruner: the pruner, from `place_pruner`.
        prompts: the prompts.
        images: their images, before or after the tower; None if no prompt has an image.
        options: how the model is run.
        sizes: padded numbers of kept tokens, ascending; None selects `bucket_ladder`.
        width: slots of a row for text, in addition to the padded tokens of its images. None pads
            rows to the next length of a ladder, or to the length of a joint bucket (see `shapes`).
        ranking: the order of each pair's tokens, on the host, from `pipeline.rank`; then `select`
            does not run the pruner, and returns tokens before the projector for any pruner. The
            images must have features.

    Returns:
        The batch. Its rows are planned if the images' sizes or the ranking decide the number of
        kept tokens.

    Warns:
        UserWarning: a prompt is longer than the context and is truncated.
    """
    if images is None or prompts.image_of.max(initial=-1) < 0:
        return _plan_without_images(model, prompts, options, width)
    if width is None and has_joint_bucket(model.config, prompts.image_of.shape[1]):
        words = pad_ids(prompts.words, joint_text(model.config, pruner, prompts))
        prompts = prompts._replace(words=words)
    pairing, pairs, ranked = plan_pairs(model, pruner, prompts, images, sizes), None, None
    if ranking is None:
        pairs = make_pairs(model, pruner, prompts, images, pairing)
    else:
        counts = np.asarray(pruner.counts(ranking, pairing.counts), np.int32)
        capacity = choose_bucket(counts, pairing.sizes)
        pairing = pairing._replace(counts=counts, capacity=capacity)
        arrays = images.features[pairing.image], ranking.order, counts
        ranked = place_rows(mesh_of(model.params), arrays)
    batch = Batch(
        prompts=prompts,
        options=options,
        width=width,
        pruner=pruner,
        pairing=pairing,
        grid=images.grid[pairing.image],
        pairs=pairs,
        ranked=ranked,
        visual_tokens=np.where(pairing.has_image, pairing.size[pairing.pair], 0).sum(1),
    )
    is_counted = pruner.budget.is_exact or ranked is not None
    return plan_rows(model, batch) if is_counted else batch


def _plan_without_images(
    model: VLM, prompts: Prompts, options: RunOptions, width: int | None
) -> Batch:
    """Plans a batch of text, whose kept tokens are placeholders."""
    pairing = pair_images(prompts.image_of)
    dtype = jax.tree.leaves(model.params)[0].dtype
    zero = np.zeros((1, 1), np.int32)
    tokens = np.zeros((1, 1, model.config.token_width), dtype)
    batch = Batch(
        prompts=prompts,
        options=options,
        width=width,
        pruner=AllTokens(),
        pairing=pairing,
        grid=np.ones((1, 2), np.int32),
        pairs=None,
        ranked=None,
        visual_tokens=np.zeros(len(prompts.length), np.int32),
        kept=Kept(zero, zero, tokens, zero > 0, zero[0]),
    )
    return plan_rows(model, batch)


def pair_images(image_of: Int[np.ndarray, "b j"]) -> PairPlan:
    """Lists the (image, prompt) pairs of a batch in order of prompts, without counts of tokens.

    The first pair is repeated until the number of pairs is a bucket.
    """
    b, j = image_of.shape
    has_image = image_of >= 0
    places = np.flatnonzero(has_image)
    pair = np.zeros(b * j, np.int32)
    pair[places] = np.arange(len(places))
    places = places[pad_rows(len(places), b)]
    no_tokens = np.zeros(max(1, len(places)), np.int32)
    return PairPlan(
        image=image_of.ravel()[places],
        prompt=places // j,
        pair=pair.reshape(b, j),
        has_image=has_image,
        size=no_tokens,
        counts=no_tokens,
    )


def plan_pairs(
    model: VLM,
    pruner: Pruner,
    prompts: Prompts,
    images: Images,
    sizes: Sequence[int] | None = None,
) -> PairPlan:
    """Lists the pairs of a batch, and plans how many tokens of each the pruner may keep."""
    config, pairing = model.config, pair_images(prompts.image_of)
    if images.features is not None:
        n = images.features.shape[1]
    else:
        n = model.backbone.num_padded_tokens(images.pixels)
    schedule = pruner.schedule(config, n)
    if schedule.enter == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(schedule.most)
    size = images.sizes[pairing.image]
    counts, capacity = exact_counts(config, pruner, size), schedule.most
    if pruner.budget.is_exact:
        # Where images have any number of tokens, n decides the capacity, not the images' sizes.
        min_capacity = schedule.bound if varies_freely(config) else 0
        capacity = choose_bucket(max(*counts.tolist(), min_capacity), sizes)
    return pairing._replace(size=size, counts=counts, n=n, capacity=capacity, sizes=sizes)


def make_pairs(
    model: VLM, pruner: Pruner, prompts: Prompts, images: Images, pairing: PairPlan
) -> Pairs:
    """Builds the inputs of a selection, on the devices of the model."""
    mesh, image, prompt = mesh_of(model.params), pairing.image, pairing.prompt
    words, num_words = prompts.words[prompt], prompts.num_words[prompt]
    grid, image_seed = images.grid[image], images.seed[image].tolist()
    # The checksum of the image continues over the question, so the seed of a row depends on its
    # image and its question only.
    questions = zip(words, num_words, image_seed, strict=True)
    seed = [zlib.crc32(ids[:count], start) for ids, count, start in questions]
    pixels, features, taps = images.pixels, images.features, ()
    if features is None:
        distinct, image = np.unique(image, return_inverse=True)
        rows = distinct[pad_rows(len(distinct), len(prompts.length))].tolist()
        if rows != list(range(len(images.sizes))):  # otherwise the pixels need no copy
            pixels = jax.tree.map(lambda part: part[rows], pixels)
        pixels = place_rows(mesh, pixels)
    else:
        pixels, taps = None, tuple(images.taps[tap] for tap in pruner.taps(model.config))
        if isinstance(features, np.ndarray):  # only the rows in use are copied to the devices
            features, taps = jax.tree.map(lambda part: part[image], (features, taps))
            features, taps = place_rows(mesh, (features, taps))
            image = np.arange(len(image))
    if not pruner.reads_text:
        words, num_words = np.zeros((len(words), 1), np.int32), np.zeros(len(words), np.int32)
    # Images that fill their bucket share the program of smaller images.
    needs_sizes = model.config.sizes_vary or min(pairing.size.tolist()) < pairing.n
    arrays = {
        "image": image.astype(np.int32),
        "grid": grid,
        "size": pairing.size if needs_sizes else None,
        "words": words,
        "num_words": num_words,
        "number": prompts.number[prompt],
        "seed": np.array(seed, np.uint32),
        "count": pairing.counts,
    }
    return Pairs(pixels, features, taps, **place_rows(mesh, arrays))


def plan_rows(model: VLM, batch: Batch) -> Batch:
    """Plans the rows of the language model.

    Args:
        model: the model.
        batch: a batch without `plan`, where `pairing.counts` are the tokens of each pair that enter
            the language model.

    Returns:
        The batch with `plan`, `layout` and `num_kept`.
    """
    config, pruner, pairing, options = model.config, batch.pruner, batch.pairing, batch.options
    prompts, mesh = batch.prompts, mesh_of(model.params)
    limit = options.context_limit or model.backbone.CONTEXT_LIMIT
    image_tokens = np.where(pairing.has_image, pairing.counts[pairing.pair], 0)
    image_tokens = truncate_images(prompts, image_tokens, limit)
    cuts = pruner.cuts(config, pairing.n)
    after = counts_after_cuts(config, pruner, image_tokens, len(cuts))
    stages = [image_tokens, *(tokens.sum(2) for tokens in after)]
    slots, text_slots, width = _plan_slots(config, batch, stages, limit)
    is_own = options.positions == "own"
    plan = Plan(
        capacity=pairing.capacity if batch.selects_in_prefill else 0,
        is_projected=pruner.after_projector and batch.ranked is None,
        slots=tuple(slots),
        cuts=cuts,
        text_slots=text_slots if any(cut.rows == "text" for cut in cuts) else 0,
        positions=pruner.method_positions(config) if is_own else options.positions,
        max_tokens=options.max_tokens,
        execution=options.execution,
        mesh=mesh,
    )
    layout = PromptLayout(
        ids=pad_ids(prompts.ids, width),
        length=prompts.length,
        pair=pairing.pair,
        has_image=pairing.has_image,
        grid=batch.grid[pairing.pair],
        counts=tuple(after[..., 0]),
    )
    layout, num_kept = place_rows(mesh, layout), stages[-1].sum(1)
    return batch._replace(plan=plan, layout=layout, num_kept=num_kept)


def _plan_slots(
    config: ModelConfig,
    batch: Batch,
    stages: Sequence[Int[np.ndarray, "b j"]],
    limit: int,
) -> tuple[list[int], int, int]:
    """Returns the row length of each stage, and the padded numbers of text tokens and of ids."""
    pairing, prompts, width = batch.pairing, batch.prompts, batch.width
    j = pairing.pair.shape[1]
    if width is not None:
        capacity = 1  # of the placeholder of a batch without images
        if batch.selects_in_prefill:
            capacity = pairing.capacity
        elif pairing.n:
            capacity = choose_bucket(pairing.counts, pairing.sizes)
        max_tokens = [capacity, *(int(tokens.max(initial=0)) for tokens in stages[1:])]
        return [width + j * count for count in max_tokens], width, width
    if is_joint(config, batch) and enters_known(config, batch.pruner):
        text = prompts.words.shape[1]
        slots = joint_rows(config, batch.pruner, n=pairing.n, text=text, stages=stages, limit=limit)
    else:
        slots, text = row_lengths(prompts.num_text, stages, limit)
    # The largest number of ids that the slots can take, with one more id for a truncated row. The
    # program then depends on the row length only.
    return slots, text, slots[0] + j + 1


def is_joint(config: ModelConfig, batch: Batch) -> bool:
    """Returns whether a batch has a joint bucket; see `shapes`."""
    has_images = batch.pairing.n > 0
    num_images = batch.prompts.image_of.shape[1]
    return has_images and batch.width is None and has_joint_bucket(config, num_images)
