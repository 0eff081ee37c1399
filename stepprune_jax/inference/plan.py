"""Plans a batch on the host: which pairs of image and prompt, how many tokens, how long the rows.

These are numpy arrays and numbers, computed once for a batch before any of its programs runs.
Shapes are rounded up to buckets, so that few programs serve all batches.

Where images have any number of tokens, batches with one image in a row have joint buckets: the
padded sizes of image and text decide every shape of the program, so a stream reaches one program
for each pair of the two. A learned stop has two programs. The padded sizes of image and words
decide the first, which chooses; the length of the row decides the second.
"""

import warnings
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.data.prompts import truncated_images
from stepprune_jax.inference.base import Prompts
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy.buckets import (
    bucket_ladder,
    choose_bucket,
    kept_bucket,
    ladder,
    row_bucket,
    text_bucket,
)
from stepprune_jax.pruning import Pruner


class PairPlan(NamedTuple):
    """The (image, prompt) pairs of a batch, and how many tokens of each a pruner may keep.

    Attributes:
        image: [r] row of each pair's image in the images.
        prompt: [r] row of its prompt in the batch.
        slot: [b, j] pair of each image of each prompt.
        shown: [b, j] True = image.
        counts: [r] tokens to keep if they follow from the images' sizes, otherwise all.
        capacity: padded number of tokens kept of an image; the most where a stop decides.
        sizes: padded numbers to choose from, ascending.
    """

    image: Int[np.ndarray, "r"]
    prompt: Int[np.ndarray, "r"]
    slot: Int[np.ndarray, "b j"]
    shown: Bool[np.ndarray, "b j"]
    counts: Int[np.ndarray, "r"]
    capacity: int = 0
    sizes: Sequence[int] = ()


def pair_up(image_of: Int[np.ndarray, "b j"]) -> PairPlan:
    """Lists the pairs of a batch, padded to a bucket by repeating the first; none has tokens."""
    b, j = image_of.shape
    shown = image_of >= 0
    prompt, place = np.nonzero(shown)
    slot = np.zeros((b, j), np.int32)
    slot[prompt, place] = np.arange(len(prompt))
    rows = padded_rows(len(prompt), b)
    image, prompt = image_of[prompt, place][rows], prompt[rows]
    counts = np.zeros(max(1, len(rows)), np.int32)
    return PairPlan(image.astype(np.int32), prompt.astype(np.int32), slot, shown, counts)


def plan_choice(
    config: ModelConfig,
    pruner: Pruner,
    image_of: Int[np.ndarray, "b j"],
    image_sizes: Int[np.ndarray, "i"],
    n: int,
    sizes: Sequence[int] | None = None,
) -> PairPlan:
    """Plans what a pruner chooses from.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        image_of: [b, j] row of each image of each prompt; -1 for none.
        image_sizes: [i] tokens of each image.
        n: padded number of tokens of each image.
        sizes: padded numbers of kept tokens; by default those of `bucket_ladder`.
    """
    schedule, pairs = pruner.schedule(config, n), pair_up(image_of)
    if schedule.enter == n:
        sizes = (n,)
    elif sizes is None:
        sizes = bucket_ladder(schedule.most)
    counts = exact_counts(config, pruner, image_sizes[pairs.image])
    capacity = schedule.most
    if pruner.budget.is_exact:
        # Where images have any number of tokens, n alone decides the capacity.
        least = schedule.bound if varies_freely(config) else 0
        capacity = choose_bucket(np.append(counts, least), sizes)
    return pairs._replace(counts=counts, capacity=capacity, sizes=sizes)


def padded_rows(count: int, batch: int) -> Int[np.ndarray, "r"]:
    """Returns 0, 1, ..., padded with zeros to a bucket; multiples of `batch` are buckets."""
    rows = np.arange(row_bucket(count, range(batch, count + batch, batch)))
    return np.where(rows < count, rows, 0)


def exact_counts(
    config: ModelConfig, pruner: Pruner, image_sizes: Int[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Returns the tokens to keep of images if they follow from their sizes, otherwise all."""
    sizes, at = np.unique(image_sizes, return_inverse=True)
    counts = [pruner.schedule(config, int(size)).enter for size in sizes]
    pairs = zip(counts, sizes, strict=True)
    return np.array([size if count is None else count for count, size in pairs], np.int32)[at]


def survivors(
    config: ModelConfig, pruner: Pruner, of_image: Int[np.ndarray, "b j"], cuts: int
) -> Int[np.ndarray, "cuts b j 2"]:
    """Evaluates `Schedule.after` for each image of each row; 0 for images without tokens."""
    left = np.zeros((cuts, *of_image.shape, 2), np.int32)
    for size in np.unique(of_image[of_image > 0]) if cuts else ():
        of_size = np.array(pruner.schedule(config, int(size)).after)
        left[:, of_image == size] = of_size[:, None]
    return left


def fit_context(
    prompts: Prompts, of_image: Int[np.ndarray, "b j"], limit: int
) -> Int[np.ndarray, "b j"]:
    """Returns the tokens of each image after truncating rows to the context, with a warning."""
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


def row_lengths(
    text: Int[np.ndarray, "b"], left: Sequence[Int[np.ndarray, "b j"]], limit: int
) -> tuple[list[int], int]:
    """Returns buckets for the rows of each stage, and for their text alone."""
    totals = [np.minimum(text + count.sum(1), limit).max() for count in left]
    slots = [length_bucket(int(total), limit) for total in totals]
    return slots, length_bucket(int(text.max()), limit, 16)


def varies_freely(config: ModelConfig) -> bool:
    """Returns whether images have any number of tokens, rather than numbers that tiles allow."""
    return config.sizes_vary and not config.is_tiled


def has_joint_bucket(config: ModelConfig, images: int) -> bool:
    """Returns whether batches with up to `images` images in a row have joint buckets."""
    return images == 1 and varies_freely(config)


def enters_known(config: ModelConfig, pruner: Pruner) -> bool:
    """Returns whether the size of an image decides how many tokens enter the language model."""
    return pruner.schedule(config, config.max_image_tokens).enter is not None


def joint_text(config: ModelConfig, pruner: Pruner, prompts: Prompts) -> int:
    """Returns the padded number of words of a joint bucket.

    Where the counts are known, this is the padded number of text tokens as well.
    """
    longest = int(prompts.num_words.max(initial=1))
    if enters_known(config, pruner):
        longest = max(longest, int((prompts.length - (prompts.image_of >= 0).sum(1)).max()))
    return text_bucket(longest)


def joint_rows(
    config: ModelConfig,
    pruner: Pruner,
    n: int,
    text: int,
    counts: Sequence[Int[np.ndarray, "b j"]],
    limit: int,
) -> list[int]:
    """Returns the row length of each stage of a joint bucket, which has room for n image tokens.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        n: padded number of tokens of each image.
        text: padded number of text tokens.
        counts: [b, j] tokens of each image at each stage.
        limit: the longest row.
    """
    schedule, rows = pruner.schedule(config, n), []
    for tokens, count in zip((schedule.enter, *map(sum, schedule.after)), counts, strict=True):
        needed = max(tokens or 0, int(count.sum(1).max()))
        rows.append(min(limit, text + (n if needed == n else kept_bucket(needed))))
    return rows


def list_texts(
    config: ModelConfig,
    pruner: Pruner,
    counts: Sequence[int],
    texts: range,
    limit: int,
) -> list[int]:
    """Lists lengths of text that together have every shape of rows that a range of lengths has.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        counts: tokens of each image of a row that enter the language model.
        texts: the lengths of text.
        limit: the longest row.

    Returns:
        Lengths of the range, ascending, one for each shape.
    """
    of_image = np.asarray(counts, np.int32).reshape(1, -1)
    cuts = pruner.cuts(config, config.max_image_tokens) if len(counts) else ()
    stages = [of_image, *survivors(config, pruner, of_image, len(cuts)).sum(3)]
    reads_text = any(cut.rows == "text" for cut in cuts)
    is_joint = has_joint_bucket(config, len(counts)) and enters_known(config, pruner)

    def shape(text: int) -> Hashable:
        if is_joint:
            return text_bucket(text)
        slots, padded = row_lengths(np.array([text]), stages, limit)
        return *slots, padded if reads_text else 0

    def distinct(first: int, last: int) -> list[int]:
        if first == last or shape(first) == shape(last):  # sizes grow with the text
            return [first]
        middle = (first + last) // 2
        lower, upper = distinct(first, middle), distinct(middle + 1, last)
        return lower + (upper[1:] if shape(lower[-1]) == shape(upper[0]) else upper)

    return distinct(texts[0], texts[-1]) if texts else []


def length_bucket(length: int, limit: int, smallest: int = 64) -> int:
    """Returns the first of a `ladder` of lengths up to the limit that is large enough, or it."""
    return next((size for size in ladder(limit, smallest) if size >= length), limit)


def padded_to(ids: Int[np.ndarray, "b l"], width: int) -> Int[np.ndarray, "b width"]:
    """Pads or cuts ids at the right end."""
    ids = ids[:, :width]
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])))
