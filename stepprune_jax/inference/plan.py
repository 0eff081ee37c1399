"""The plan of a batch: its pairs of image and prompt, counts of tokens, and lengths of rows.

Plans are numpy arrays and numbers on the host; no program runs. `plan_batch` plans the selection.
`plan_rows` plans the rows of the language model from the number of tokens of each pair.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import pad_batch, word_ids
from stepprune_jax.inference.base import (
    CHUNK_PATCHES,
    Batch,
    Images,
    PairPlan,
    Pairs,
    Plan,
    PromptLayout,
    Prompts,
    RankedPairs,
    RunOptions,
)
from stepprune_jax.inference.shapes import (
    counts_after_cuts,
    enters_known,
    exact_counts,
    has_joint_bucket,
    joint_row_lengths,
    joint_text_width,
    row_lengths,
    varies_freely,
)
from stepprune_jax.inference.truncation import check_clips, truncate_images
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import Clips
from stepprune_jax.parallel.placement import mesh_of, place_rows
from stepprune_jax.policy.buckets import (
    bucket_ladder,
    choose_bucket,
    pad_ids,
    pad_rows,
    row_bucket,
    words_bucket,
)
from stepprune_jax.pruning import AllTokens, Kept, Pruner, Ranker, Ranking
from stepprune_jax.user_input import UserError


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
    """Plans a batch, and builds the arrays that its programs read.

    Args:
        model: the model.
        pruner: the pruner, from `place_pruner`.
        prompts: the prompts.
        images: the images of the prompts, before or after the tower; None if no prompt has an
            image.
        options: how the model is run.
        sizes: padded numbers of kept tokens to choose from, ascending; None selects
            `bucket_ladder`.
        width: number of slots of a row for text, in addition to the padded tokens of its images.
            None pads rows to the next length of a ladder, or to the length of a joint bucket (see
            `shapes`).
        ranking: the order of each pair's tokens, on the host, from `pipeline.rank`. `select` then
            takes tokens from this order and does not run the pruner. The images must have features.

    Returns:
        The input of `pipeline.prepare_prefill`.
    """
    if images is None or prompts.image_of.max(initial=-1) < 0:
        return Batch(
            prompts=prompts,
            options=options,
            width=width,
            pruner=AllTokens(),
            pairing=pair_images(prompts.image_of),
            grid=np.ones((1, 2), np.int32),
            source=_invalid_token(model),
        )
    if width is None and has_joint_bucket(model.config, prompts.image_of.shape[1]):
        words = pad_ids(prompts.words, joint_text_width(model.config, pruner, prompts))
        prompts = prompts._replace(words=words)
    pairing, features = plan_pairs(model, pruner, prompts, images, sizes), images.features
    if ranking is None or features is None or not isinstance(pruner, Ranker):
        source = make_pairs(model, pruner, prompts, images, pairing)
    else:
        counts = np.asarray(pruner.counts(ranking, pairing.counts), np.int32)
        pairing = pairing._replace(counts=counts, capacity=choose_bucket(counts, pairing.sizes))
        ranked = RankedPairs(features[pairing.image], ranking.order, counts)
        source = place_rows(mesh_of(model.params), ranked)
    return Batch(
        prompts=prompts,
        options=options,
        width=width,
        pruner=pruner,
        pairing=pairing,
        grid=images.grid[pairing.image],
        source=source,
        clips=None if images.clips is None else images.clips.take(pairing.image),
    )


def _invalid_token(model: VLM) -> Kept:
    """Returns the kept tokens of a batch without images: one invalid token."""
    zero = np.zeros((1, 1), np.int32)
    dtype = jax.tree.leaves(model.params)[0].dtype
    tokens = np.zeros((1, 1, model.config.token_width), dtype)
    # Arrays on the host, which the program copies to the devices.
    arrays: Any = zero, zero, tokens, zero > 0, zero[0]
    return Kept(*arrays)


def pair_images(image_of: Int[np.ndarray, "b j"]) -> PairPlan:
    """Lists the (image, prompt) pairs of a batch, sorted by prompt.

    The list is padded with the first pair to a bucket of rows.

    Args:
        image_of: [b, j] row in `Images` of each of a prompt's images; -1 for no image.

    Returns:
        The pairs, with zeros in place of sizes and counts of tokens.
    """
    b, j = image_of.shape
    has_image = image_of >= 0
    flat_index = np.flatnonzero(has_image)  # of each pair in the raveled [b, j]
    pair_of = np.zeros(b * j, np.int32)
    pair_of[flat_index] = np.arange(len(flat_index))
    flat_index = flat_index[pad_rows(len(flat_index), b)]
    no_tokens = np.zeros(max(1, len(flat_index)), np.int32)
    return PairPlan(
        image=image_of.ravel()[flat_index],
        prompt=flat_index // j,
        pair=pair_of.reshape(b, j),
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
    """Lists the (image, prompt) pairs of a batch, and plans how many tokens each pair keeps.

    Args:
        model: the model.
        pruner: the pruner.
        prompts: the prompts.
        images: the images of the prompts, before or after the tower.
        sizes: padded numbers of kept tokens to choose from, ascending; None selects
            `bucket_ladder`.

    Returns:
        The pairs, with exact counts of tokens if the images' sizes decide the counts, and with the
        padded number of tokens.
    """
    check_videos(pruner, images)
    config, pairing = model.config, pair_images(prompts.image_of)
    if images.features is not None:
        n = images.features.shape[1]
    else:
        n = num_padded_tokens(model, images)
    schedule = pruner.schedule(config, n)
    if schedule.enter == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(schedule.most)
    image_size = images.sizes[pairing.image]
    counts, capacity = exact_counts(config, pruner, image_size), schedule.most
    if pruner.budget.is_exact:
        counts, ladder = adapt_counts(pruner, images, pairing.image, counts), sizes
        if max(counts.tolist()) > schedule.most:  # such as a complete temporal patch
            ladder = bucket_ladder(n)
        sizes = ladder
        # If images may have any number of tokens, the capacity follows from the padded number n. It
        # is then the same for all images that share a program.
        min_capacity = schedule.bound if varies_freely(config) else 0
        capacity = choose_bucket(max(*counts.tolist(), min_capacity), sizes)
    return pairing._replace(size=image_size, counts=counts, n=n, capacity=capacity, sizes=sizes)


def adapt_counts(
    pruner: Pruner, images: Images, rows: Int[np.ndarray, "r"], counts: Int[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Returns the numbers of tokens to keep of images and videos, see `Pruner.media_counts`.

    Args:
        pruner: the pruner, with an exact budget.
        images: the images and videos.
        rows: [r] row of each pair's image or video.
        counts: [r] numbers of tokens by the budget.
    """
    frames = np.ones(len(rows), np.int32)
    if images.clips is not None:
        frames = np.asarray(images.clips.frames)[rows]
    if pruner.budget.kind in ("all", "none", "unset"):
        return counts
    return np.asarray(pruner.media_counts(counts, images.sizes[rows], frames), np.int32)


def check_videos(pruner: Pruner, images: Images | None) -> None:
    """Raises a UserError if there are videos, and the pruner has no meaning for videos."""
    if images is not None and images.clips is not None and not pruner.reads_videos:
        raise UserError(f"{pruner.name} prunes images only, and no videos; see docs/video.md")


def num_padded_tokens(model: VLM, images: Images) -> int:
    """Returns the padded number of tokens of each image or video, in the input of a pruner."""
    if images.clips is None:
        return model.backbone.num_padded_tokens(images.pixels)
    return model.backbone.num_padded_clip_tokens(int(images.sizes.max()))


def join_patches(
    model: VLM, images: Images, rows: Sequence[int], num_prompts: int
) -> tuple[Any, Int[np.ndarray, "i n"]]:
    """Collects the temporal patches of images and videos, and numbers their tokens.

    Args:
        model: the model.
        images: images and videos before the tower.
        rows: rows of the images and videos to collect.
        num_prompts: number of prompts of the batch.

    Returns:
        pixels: [p, ...] the temporal patches, padded with the first patch to a bucket of rows.
        token_of: [i, n] index of each token of an image or video among the tokens of the tower for
            all patches; -1 in the padding.
    """
    assert images.clips is not None
    clips, sizes = images.clips.take(np.asarray(rows)), images.sizes[rows]
    patch_rows = images.clips.patch_rows(np.asarray(rows))
    num_patches, num_slots = len(patch_rows), model.backbone.num_padded_tokens(images.pixels)
    if num_patches <= CHUNK_PATCHES:
        padded_rows = pad_rows(num_patches, num_prompts)
    else:  # the tower encodes complete chunks
        num_chunks = -(-num_patches // CHUNK_PATCHES)
        padded_rows = np.zeros(CHUNK_PATCHES * row_bucket(num_chunks), np.int32)
        padded_rows[:num_patches] = np.arange(num_patches)
    patch_rows = patch_rows[padded_rows]
    pixels = jax.tree.map(lambda array: array[patch_rows], images.pixels)
    token_of = np.full((len(rows), num_padded_tokens(model, images)), -1, np.int32)
    first_patch = 0
    for row, (frames, size) in enumerate(zip(clips.frames.tolist(), sizes.tolist(), strict=True)):
        first_tokens = num_slots * np.arange(first_patch, first_patch + frames)
        token_of[row, :size] = (first_tokens[:, None] + np.arange(size // frames)).ravel()
        first_patch += frames
    return pixels, token_of


def make_pairs(
    model: VLM, pruner: Pruner, prompts: Prompts, images: Images, pairing: PairPlan
) -> Pairs:
    """Builds the inputs of a selection, on the devices of the model.

    Args:
        model: the model.
        pruner: the pruner.
        prompts: the prompts.
        images: the images of the prompts, before or after the tower.
        pairing: result of `plan_pairs`.

    Returns:
        The inputs, with one row per (image, prompt) pair.
    """
    mesh, image, prompt = mesh_of(model.params), pairing.image, pairing.prompt
    words, num_words = prompts.words[prompt], prompts.num_words[prompt]
    grid, image_seed = images.grid[image], images.seed[image].tolist()
    # The checksum of the image is extended by the question, so the seed of a row depends only on
    # its image and its question.
    seed = [
        zlib.crc32(question_words[:word_count], checksum)
        for question_words, word_count, checksum in zip(words, num_words, image_seed, strict=True)
    ]
    pixels, features, taps, token_of = images.pixels, images.features, (), None
    if features is None:
        distinct_images = sorted({*image.tolist()})
        image = np.searchsorted(distinct_images, image)
        padded_rows = pad_rows(len(distinct_images), len(prompts.length)).tolist()
        image_rows = [distinct_images[row] for row in padded_rows]
        if images.clips is not None:
            pixels, token_of = join_patches(model, images, image_rows, len(prompts.length))
        elif image_rows != list(range(len(images.sizes))):  # indexing would copy the pixels
            pixels = jax.tree.map(lambda array: array[image_rows], pixels)
        pixels = place_rows(mesh, pixels)
    else:
        array_of_tap = images.taps or {}
        pixels, taps = None, tuple(array_of_tap[tap] for tap in pruner.taps(model.config))
        if isinstance(features, np.ndarray):  # only the rows in use are copied to the devices
            features, taps = jax.tree.map(lambda array: array[image], (features, taps))
            features, taps = place_rows(mesh, (features, taps))
            image = np.arange(len(image))
    if pruner.reads_words and model.tokenizer is not None:
        words, num_words = _choose_words(model, pruner, words, num_words)
    if not pruner.reads_text:
        words, num_words = np.zeros((len(words), 1), np.int32), np.zeros(len(words), np.int32)
    # Without sizes, the program skips the masks of padding. Models whose images differ in size
    # always pass sizes, so that images with and without padding share a program.
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
        "token_of": token_of,
        "frames": None if images.clips is None else images.clips.take(pairing.image).frames,
    }
    return Pairs(pixels, features, taps, **place_rows(mesh, arrays))


def _choose_words(
    model: VLM, pruner: Pruner, ids: Int[np.ndarray, "r w"], num_ids: Int[np.ndarray, "r"]
) -> tuple[Int[np.ndarray, "r v"], Int[np.ndarray, "r"]]:
    """Replaces the ids of the user's text by the ids of the words that a pruner reads.

    Args:
        model: the model, with a tokenizer.
        pruner: a pruner with `reads_words`.
        ids: [r, w] right-padded ids of the user's text.
        num_ids: [r] number of ids in each row.

    Returns:
        [r, v] right-padded ids of the words, where v is w or a larger bucket; and [r] number of ids
        in each row.
    """
    tokenizer: Any = model.tokenizer
    texts = (
        tokenizer.decode(row_ids[:count], clean_up_tokenization_spaces=False)
        for row_ids, count in zip(ids, num_ids, strict=True)
    )
    rows = [word_ids(tokenizer, pruner.words(model.config, text)) for text in texts]
    return pad_batch(rows, width=max(ids.shape[1], words_bucket(max(map(len, rows)))))


def plan_rows(
    model: VLM, batch: Batch, counts: Int[np.ndarray, "r"]
) -> tuple[Plan, PromptLayout, Int[np.ndarray, "b"]]:
    """Plans the rows of the language model.

    Args:
        model: the model.
        batch: result of `plan_batch`.
        counts: [r] number of tokens of each pair that enter the language model.

    Returns:
        plan: static part of the prefill.
        layout: the prompts with the places of their images, on the devices of the model.
        num_kept: [b] visual tokens of each row after the last cut.

    Warns:
        UserWarning: a prompt is longer than the context and is truncated.
    """
    config, pruner, pairing, options = model.config, batch.pruner, batch.pairing, batch.options
    prompts, mesh = batch.prompts, mesh_of(model.params)
    context_limit = options.context_limit or model.backbone.CONTEXT_LIMIT
    image_tokens = np.where(pairing.has_image, counts[pairing.pair], 0)
    if batch.clips is not None:
        check_clips(prompts, image_tokens, context_limit)
    image_tokens = truncate_images(prompts, image_tokens, context_limit)
    cuts = pruner.cuts(config, pairing.n)
    # [cuts, b, j, 2]: kept and merged tokens of each image after each cut.
    counts_after = counts_after_cuts(config, pruner, image_tokens, len(cuts))
    stage_tokens = [image_tokens, *(tokens.sum(2) for tokens in counts_after)]
    slots, text_slots, ids_width = _plan_slots(
        config, batch, counts, stage_tokens=stage_tokens, context_limit=context_limit
    )
    uses_method_positions = options.positions == "own"
    plan = Plan(
        capacity=pairing.capacity if batch.selects_in_prefill else 0,
        is_projected=pruner.after_projector and not isinstance(batch.source, RankedPairs),
        slots=tuple(slots),
        cuts=cuts,
        text_slots=text_slots if any(cut.rows == "text" for cut in cuts) else 0,
        positions=(pruner.method_positions(config) if uses_method_positions else options.positions),
        max_tokens=options.max_tokens,
        execution=options.execution,
        mesh=mesh,
    )
    arrays: dict[str, Any] = {
        "ids": pad_ids(prompts.ids, ids_width),
        "length": prompts.length,
        "pair": pairing.pair,
        "has_image": pairing.has_image,
        "grid": batch.grid[pairing.pair],
        "counts": tuple(counts_after[..., 0]),
        "clips": _clips_of_prompts(batch),
    }
    return plan, PromptLayout(**place_rows(mesh, arrays)), stage_tokens[-1].sum(1)


def _clips_of_prompts(batch: Batch) -> Clips | None:
    """Returns the [b, j] temporal patches of the prompts' images and videos; 0 without an image."""
    if batch.clips is None:
        return None
    pairing, clips = batch.pairing, batch.clips.take(batch.pairing.pair)
    return clips._replace(frames=np.where(pairing.has_image, clips.frames, 0))


def _plan_slots(
    config: ModelConfig,
    batch: Batch,
    counts: Int[np.ndarray, "r"],
    *,
    stage_tokens: Sequence[Int[np.ndarray, "b j"]],
    context_limit: int,
) -> tuple[list[int], int, int]:
    """Plans the padded lengths of the rows of a batch.

    Args:
        config: the model's configuration.
        batch: result of `plan_batch`.
        counts: [r] number of tokens of each pair that enter the language model.
        stage_tokens: for each stage of the language model, [b, j] number of tokens of each image.
        context_limit: longest row.

    Returns:
        slots: row length of each stage.
        text_slots: padded number of text tokens of a row.
        ids_width: padded number of ids of a prompt.
    """
    pairing, prompts, width = batch.pairing, batch.prompts, batch.width
    j = pairing.pair.shape[1]
    if width is not None:
        capacity = 1  # a batch without images has one invalid token
        if batch.selects_in_prefill:
            capacity = pairing.capacity
        elif pairing.n:
            capacity = choose_bucket(counts, pairing.sizes)
        max_tokens = [capacity, *(int(tokens.max(initial=0)) for tokens in stage_tokens[1:])]
        return [width + j * count for count in max_tokens], width, width
    if is_joint(config, batch) and enters_known(config, batch.pruner):
        text_slots = prompts.words.shape[1]
        slots = joint_row_lengths(
            config,
            batch.pruner,
            n=pairing.n,
            text_slots=text_slots,
            stage_tokens=stage_tokens,
            context_limit=context_limit,
        )
    else:
        slots, text_slots = row_lengths(prompts.num_text, stage_tokens, context_limit)
    # A row that fills its slots has at most slots[0] text ids and a number of sentinels of images;
    # one more id marks a row that is truncated. The program then depends only on the row length and
    # on the padded number of sentinels, which is larger than j only with videos.
    num_marks = row_bucket(max(j, int(prompts.num_marks.max())))
    return slots, text_slots, slots[0] + num_marks + 1


def is_joint(config: ModelConfig, batch: Batch) -> bool:
    """Returns whether the padded sizes of image and text decide all shapes; see `shapes`."""
    has_images = batch.pairing.n > 0
    num_images = batch.prompts.image_of.shape[1]
    return has_images and batch.width is None and has_joint_bucket(config, num_images)
