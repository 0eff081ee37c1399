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


def truncate_images(
    prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int
) -> Int[np.ndarray, "q j"]:
    """Counts the tokens of each image that remain if prompts are truncated to `limit` embeddings.

    Args:
        prompts: the prompts.
        image_tokens: [q, j] tokens of each image, 0 where a prompt has no image.
        limit: maximum number of embeddings, of text and images, of a prompt.

    Returns:
        [q, j] tokens of each image among the first `limit` embeddings.

    Warns:
        UserWarning: a prompt has more than `limit` embeddings.
    """
    lengths = prompts.num_text + image_tokens.sum(1)
    if lengths.max() <= limit:
        return image_tokens
    _warn(prompts, lengths, limit)
    truncated = image_tokens.copy()
    for row in np.flatnonzero(lengths > limit):
        has_image = prompts.image_of[row] >= 0
        ids = prompts.ids[row, : prompts.length[row]]
        truncated[row, has_image] = truncated_images(ids, image_tokens[row, has_image], limit)
    return truncated


def check_clips(prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int) -> None:
    """Raises a UserError if a prompt of a batch with videos has more than `limit` embeddings.

    Args:
        prompts: the prompts.
        image_tokens: [q, j] kept tokens of each image or video, 0 for a prompt with fewer images.
        limit: maximum number of embeddings, of text and images, of a prompt.
    """
    lengths = prompts.num_text + image_tokens.sum(1)
    if lengths.max() > limit:
        raise UserError(
            f"prompt {prompts.number[np.argmax(lengths)]} with its videos has {lengths.max():,} "
            f"tokens, more than the context of {limit:,}: sample fewer frames (--fps or "
            "--num_frames) or prune more of their tokens (--budget)"
        )


def truncate_prompts(prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int) -> Prompts:
    """Removes the text after the first `limit` embeddings of each prompt.

    Args:
        prompts: the prompts.
        image_tokens: [q, j] number of all tokens of each image, 0 where a prompt has no image.
        limit: maximum number of embeddings of a prompt. The images of each prompt must fit.

    Returns:
        The prompts with their new lengths.

    Warns:
        UserWarning: a prompt has more than `limit` embeddings.
    """
    lengths = prompts.num_text + image_tokens.sum(1)
    if lengths.max(initial=0) <= limit:
        return prompts
    _warn(prompts, lengths, limit)
    length = prompts.length - np.maximum(lengths - limit, 0)
    return prompts._replace(length=length.astype(np.int32))


def check_lengths(prompts: Prompts, image_tokens: Int[np.ndarray, "q j"], limit: int) -> None:
    """Raises a UserError that names the longest prompt if it exceeds `limit` embeddings."""
    lengths = prompts.num_text + image_tokens.sum(1)
    longest_row = int(np.argmax(lengths))
    if lengths[longest_row] > limit:
        raise UserError(
            f"question {longest_row} takes {lengths[longest_row]} embeddings with all visual "
            f"tokens, more than {limit}: its end would be truncated"
        )


def _warn(prompts: Prompts, lengths: Int[np.ndarray, "q"], limit: int) -> None:
    """Warns that prompts longer than `limit` were truncated; names the longest prompt."""
    number, num_others = prompts.number[np.argmax(lengths)], int((lengths > limit).sum()) - 1
    ending = f"; so were {num_others} other prompts" if num_others else ""
    warnings.warn(
        f"prompt {number} of {lengths.max()} embeddings was truncated to its first {limit}: its "
        f"end, and so the question, may be lost{ending}",
        stacklevel=4,
    )
