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
    """Returns how many tokens of each image enter the language model, or all if not yet known."""
    sizes = image_sizes.tolist()
    entering = {size: pruner.schedule(config, size).enter for size in set(sizes)}
    counts = [size if entering[size] is None else entering[size] for size in sizes]
    return np.array(counts, np.int32)


def counts_after_cuts(
    config: ModelConfig, pruner: Pruner, image_tokens: Int[np.ndarray, "b j"], num_cuts: int
) -> Int[np.ndarray, "cuts b j 2"]:
    """Evaluates `Schedule.after` for each image: kept and merged tokens; 0 without an image."""
    counts = np.zeros((num_cuts, *image_tokens.shape, 2), np.int32)
    for size in set(image_tokens[image_tokens > 0].tolist()) if num_cuts else ():
        after = np.array(pruner.schedule(config, size).after)
        counts[:, image_tokens == size] = after[:, None]
    return counts


def row_lengths(
    num_text: Int[np.ndarray, "b"], stages: Sequence[Int[np.ndarray, "b j"]], limit: int
) -> tuple[list[int], int]:
    """Pads the lengths of rows to buckets.

    Args:
        num_text: [b] text tokens of each row.
        stages: [b, j] tokens of each image at each stage of the language model.
        limit: the longest row.

    Returns:
        The row length of each stage, and the padded number of text tokens.
    """
    totals = [int((num_text + tokens.sum(1)).max()) for tokens in stages]
    slots = [length_bucket(min(total, limit), limit) for total in totals]
    return slots, length_bucket(int(num_text.max()), limit, 16)


def varies_freely(config: ModelConfig) -> bool:
    """Returns whether images have any number of tokens, rather than numbers that tiles allow."""
    return config.sizes_vary and not config.is_tiled


def has_joint_bucket(config: ModelConfig, num_images: int) -> bool:
    """Returns whether batches with up to `num_images` images in a row have joint buckets."""
    return num_images == 1 and varies_freely(config)


def enters_known(config: ModelConfig, pruner: Pruner) -> bool:
    """Returns whether the size of an image decides how many tokens enter the language model."""
    return pruner.schedule(config, config.max_image_tokens).enter is not None


def joint_text(config: ModelConfig, pruner: Pruner, prompts: Prompts) -> int:
    """Returns the padded number of words of a joint bucket.

    If `enters_known`, this is the padded number of text tokens as well.
    """
    longest = int(prompts.num_words.max(initial=1))
    if enters_known(config, pruner):
        longest = max(longest, int(prompts.num_text.max()))
    return text_bucket(longest)


def joint_rows(
    config: ModelConfig,
    pruner: Pruner,
    *,
    n: int,
    text: int,
    stages: Sequence[Int[np.ndarray, "b j"]],
    limit: int,
) -> list[int]:
    """Returns the row length of each stage of a joint bucket, which has room for n image tokens.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        n: padded number of tokens of each image.
        text: padded number of text tokens.
        stages: [b, j] tokens of each image at each stage.
        limit: the longest row.
    """
    schedule, slots = pruner.schedule(config, n), []
    planned_counts = schedule.enter, *map(sum, schedule.after)
    for planned_count, tokens in zip(planned_counts, stages, strict=True):
        count = max(planned_count or 0, int(tokens.sum(1).max()))
        slots.append(min(limit, text + (n if count == n else kept_bucket(count))))
    return slots


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
    image_tokens = np.asarray(counts, np.int32).reshape(1, -1)
    cuts = pruner.cuts(config, config.max_image_tokens) if len(counts) else ()
    after = counts_after_cuts(config, pruner, image_tokens, len(cuts))
    stages = [image_tokens, *(tokens.sum(2) for tokens in after)]
    reads_text = any(cut.rows == "text" for cut in cuts)
    is_joint = has_joint_bucket(config, len(counts)) and enters_known(config, pruner)

    def shape_of(text: int) -> Hashable:
        if is_joint:
            return text_bucket(text)
        slots, text_slots = row_lengths(np.array([text]), stages, limit)
        return *slots, text_slots if reads_text else 0

    def list_between(first: int, last: int) -> list[int]:
        if first == last or shape_of(first) == shape_of(last):  # sizes grow with the text
            return [first]
        middle = (first + last) // 2
        lower, upper = list_between(first, middle), list_between(middle + 1, last)
        return lower + (upper[1:] if shape_of(lower[-1]) == shape_of(upper[0]) else upper)

    return list_between(texts[0], texts[-1]) if texts else []
