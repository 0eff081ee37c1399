"""Counts of tokens and lengths of rows, from numbers on the host; the rules are `policy.buckets`.

Where images have any number of tokens, batches with one image in a row have joint buckets: the
padded sizes of image and text decide every shape of the program, so a stream of requests reaches
one program for each pair of the two sizes. A learned stop has two programs. The padded sizes of
image and words decide the first, which selects; the length of the row decides the second.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int

from stepprune_jax.inference.base import Prompts
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy.buckets import kept_bucket, length_bucket, text_bucket
from stepprune_jax.pruning import Pruner


def exact_counts(
    config: ModelConfig, pruner: Pruner, image_sizes: Int[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Returns how many tokens of each image enter the language model.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        image_sizes: [r] number of tokens of each image before pruning.

    Returns:
        [r] int32 counts; the number of all tokens if a learned stop decides the count later.
    """
    sizes = image_sizes.tolist()
    count_of_size = {size: pruner.schedule(config, size).enter for size in set(sizes)}
    counts = [size if count_of_size[size] is None else count_of_size[size] for size in sizes]
    return np.array(counts, np.int32)


def counts_after_cuts(
    config: ModelConfig, pruner: Pruner, image_tokens: Int[np.ndarray, "b j"], num_cuts: int
) -> Int[np.ndarray, "cuts b j 2"]:
    """Counts the tokens of each image after each cut, a place between layers that drops tokens.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        image_tokens: [b, j] tokens of each image that enter the language model; 0 without an image.
        num_cuts: number of cuts of the pruner.

    Returns:
        [cuts, b, j, 2] numbers of kept and of merged tokens, from `Schedule.after`.
    """
    counts = np.zeros((num_cuts, *image_tokens.shape, 2), np.int32)
    if not num_cuts:
        return counts
    for size in set(image_tokens[image_tokens > 0].tolist()):
        survivors = np.array(pruner.schedule(config, size).after)  # [cuts, 2]
        counts[:, image_tokens == size] = survivors[:, None]
    return counts


def row_lengths(
    num_text: Int[np.ndarray, "b"],
    stage_tokens: Sequence[Int[np.ndarray, "b j"]],
    context_limit: int,
) -> tuple[list[int], int]:
    """Rounds the longest row of each stage up to a bucket.

    Args:
        num_text: [b] number of text tokens of each row.
        stage_tokens: for each stage of the language model, [b, j] number of tokens of each image.
        context_limit: longest row.

    Returns:
        The padded row length of each stage, and the padded number of text tokens.
    """
    longest_rows = [int((num_text + tokens.sum(1)).max()) for tokens in stage_tokens]
    slots = [length_bucket(min(longest, context_limit), context_limit) for longest in longest_rows]
    return slots, length_bucket(int(num_text.max()), context_limit, smallest=16)


def varies_freely(config: ModelConfig) -> bool:
    """Returns whether an image may have any number of tokens, without a grid of fixed tiles."""
    return config.sizes_vary and not config.is_tiled


def has_joint_bucket(config: ModelConfig, num_images: int) -> bool:
    """Returns whether batches with up to `num_images` images in a row have joint buckets."""
    return num_images == 1 and varies_freely(config)


def enters_known(config: ModelConfig, pruner: Pruner) -> bool:
    """Returns whether the size of an image decides how many tokens enter the language model."""
    return pruner.schedule(config, config.max_image_tokens).enter is not None


def joint_text_width(config: ModelConfig, pruner: Pruner, prompts: Prompts) -> int:
    """Returns the padded number of question words of a batch with a joint bucket.

    If `enters_known`, the text tokens of the prompts are padded to the same number.
    """
    longest = int(prompts.num_words.max(initial=1))
    if enters_known(config, pruner):
        longest = max(longest, int(prompts.num_text.max()))
    return text_bucket(longest)


def joint_row_lengths(
    config: ModelConfig,
    pruner: Pruner,
    *,
    n: int,
    text_slots: int,
    stage_tokens: Sequence[Int[np.ndarray, "b j"]],
    context_limit: int,
) -> list[int]:
    """Returns the row length of each stage of the language model for a joint bucket.

    The length has room for the tokens that the pruner would keep of an image of n tokens, so all
    images that are padded to n tokens share a program.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        n: padded number of tokens of each image.
        text_slots: padded number of text tokens.
        stage_tokens: for each stage, [b, j] number of tokens of each image.
        context_limit: longest row.
    """
    schedule, slots = pruner.schedule(config, n), []
    counts_of_n = schedule.enter, *map(sum, schedule.after)
    for count_of_n, tokens in zip(counts_of_n, stage_tokens, strict=True):
        count = max(count_of_n or 0, int(tokens.sum(1).max()))
        image_slots = n if count == n else kept_bucket(count)
        slots.append(min(context_limit, text_slots + image_slots))
    return slots


def list_texts(
    config: ModelConfig,
    pruner: Pruner,
    counts: Sequence[int],
    texts: range,
    limit: int,
) -> list[int]:
    """Lists one length of text for each shape of rows, so that a caller can compile every shape.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        counts: for each image of a row, the number of tokens that enter the language model.
        texts: the range of lengths of text, in tokens.
        limit: the longest row.

    Returns:
        Lengths of `texts`, ascending. Every other length of `texts` has the shape of one of them.
    """
    image_tokens = np.asarray(counts, np.int32).reshape(1, -1)
    cuts = pruner.cuts(config, config.max_image_tokens) if len(counts) else ()
    counts_after = counts_after_cuts(config, pruner, image_tokens, len(cuts))
    stage_tokens = [image_tokens, *(tokens.sum(2) for tokens in counts_after)]
    reads_text = any(cut.rows == "text" for cut in cuts)
    is_joint = has_joint_bucket(config, len(counts)) and enters_known(config, pruner)

    def shape_of(length: int) -> Hashable:
        if is_joint:
            return text_bucket(length)
        slots, text_slots = row_lengths(np.array([length]), stage_tokens, limit)
        return *slots, text_slots if reads_text else 0

    def list_between(first: int, last: int) -> list[int]:
        """Bisects: if both ends have one shape, all lengths between the ends have this shape."""
        if first == last or shape_of(first) == shape_of(last):
            return [first]
        middle = (first + last) // 2
        lower, upper = list_between(first, middle), list_between(middle + 1, last)
        return lower + (upper[1:] if shape_of(lower[-1]) == shape_of(upper[0]) else upper)

    return list_between(texts[0], texts[-1]) if texts else []
