"""The rule for prompts that are longer than the context: the first `limit` embeddings remain.

An embedding is a text token or a visual token. Answers count the visual tokens that a pruner keeps
(`truncate_images`). Benchmarks count all visual tokens before any pruning, as LLaVA's programs do
(`truncate_prompts`).
"""

import warnings

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.prompts import truncated_images
from stepprune_jax.inference.base import Prompts
from stepprune_jax.user_input import UserError


def count_embeddings(
    prompts: Prompts, image_tokens: Int[np.ndarray, "q j"]
) -> Int[np.ndarray, "q"]:
    """Returns the length of each prompt after its images are replaced by their tokens."""
    return prompts.num_text + image_tokens.sum(1)


def truncate_images(
    prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int
) -> Int[np.ndarray, "q j"]:
    """Returns the number of tokens of each image among the first `limit` embeddings; may warn.

    Args:
        prompts: the prompts.
        image_tokens: [q, j] tokens of each image, 0 where a prompt has no image.
        limit: the longest row.
    """
    lengths = count_embeddings(prompts, image_tokens)
    if lengths.max() <= limit:
        return image_tokens
    _warn(prompts, lengths, limit)
    truncated = image_tokens.copy()
    for row in np.flatnonzero(lengths > limit):
        images = row, prompts.image_of[row] >= 0
        ids = prompts.ids[row, : prompts.length[row]]
        truncated[images] = truncated_images(ids, image_tokens[images], limit)
    return truncated


def truncate_prompts(prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int) -> Prompts:
    """Returns prompts without the text after the first `limit` embeddings; may warn.

    Args:
        prompts: the prompts.
        image_tokens: [q, j] all tokens of each image, 0 where a prompt has no image.
        limit: the longest row, which holds the images of each prompt.
    """
    lengths = count_embeddings(prompts, image_tokens)
    if lengths.max(initial=0) <= limit:
        return prompts
    _warn(prompts, lengths, limit)
    length = prompts.length - np.maximum(lengths - limit, 0)
    return prompts._replace(length=length.astype(np.int32))


def check_lengths(prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int) -> None:
    """Raises a UserError that names the longest prompt if it exceeds `limit` embeddings."""
    lengths = count_embeddings(prompts, image_tokens)
    longest = int(np.argmax(lengths))
    if lengths[longest] > limit:
        raise UserError(
            f"question {longest} takes {lengths[longest]} embeddings with all visual tokens, more "
            f"than {limit}: its end would be truncated"
        )


def _warn(prompts: Prompts, lengths: Int[np.ndarray, "q"], limit: int) -> None:
    """Warns that prompts lose their ends."""
    number, num_further = prompts.number[np.argmax(lengths)], int((lengths > limit).sum()) - 1
    further = f"; so were {num_further} other prompts" if num_further else ""
    warnings.warn(
        f"prompt {number} of {lengths.max()} embeddings was truncated to its first {limit}: its "
        f"end, and so the question, may be lost{further}",
        stacklevel=4,
    )
