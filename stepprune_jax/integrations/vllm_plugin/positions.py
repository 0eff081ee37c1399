"""Original position ids of kept tokens in vLLM's Qwen models.

vLLM can prune videos. Its model appends channels to the embeddings of an item, and vLLM passes the
channels to `recompute_mrope_positions` when the tokens enter the language model. vLLM's rules for
these channels derive the positions of the following text from the kept tokens, which is wrong for
images. This module computes the positions of text from the grids of the images, before the tower
runs. The positions of text therefore also hold if an image comes from the prefix cache. The
channels carry the row and the column of each kept token.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Numbers up to 256 are exact in bfloat16, so a row or a column is two digits of this base.
_BASE = 256
# Two digits of the row, two digits of the column, and whether the token has a new position.
NUM_CHANNELS = 5


def append_places(tokens: torch.Tensor, place: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Appends the row and the column of each token as channels.

    Args:
        tokens: [k, w] kept tokens of an image.
        place: [k] raster index of each token.
        num_columns: columns of the image's tokens.

    Returns:
        [k, w + NUM_CHANNELS]
    """
    row, column = place // num_columns, place % num_columns
    digits = [row // _BASE, row % _BASE, column // _BASE, column % _BASE, torch.ones_like(row)]
    return torch.cat([tokens, torch.stack(digits, 1).to(tokens)], 1)


def append_nothing(tokens: torch.Tensor) -> torch.Tensor:
    """Appends channels that leave positions unchanged: for items that are not pruned."""
    return torch.cat([tokens, tokens.new_zeros(len(tokens), NUM_CHANNELS)], 1)


def prompt_positions(
    unpruned_positions: Callable[[list[int], list[Any]], tuple[torch.Tensor, int]],
    token_ids: list[int],
    features: Sequence[Any],
    num_tokens: Callable[[Any], int],
) -> tuple[torch.Tensor, int]:
    """Computes the positions of a prompt with pruned images.

    Args:
        unpruned_positions: vLLM's rule for prompts without pruning.
        token_ids: ids of the prompt, with one placeholder for each kept token.
        features: vLLM's items of the prompt: images and videos with their places in `token_ids`.
        num_tokens: maps an item to its number of tokens without pruning.

    Returns:
        [3, N] positions, and the position of the next token minus N. The positions of text and of
        videos are final. All tokens of an image have the position of its first token;
        `add_offsets` adds the row and the column.
    """
    # The rule reads the prompt with all tokens of each image. `column` lists the columns of its
    # result that belong to the N tokens of this prompt.
    all_ids: list[int] = []
    column: list[int] = []
    all_features, end = [], 0
    for feature in sorted(features, key=lambda item: item.mm_position.offset):
        place = feature.mm_position
        text = token_ids[end : place.offset]
        column += range(len(all_ids), len(all_ids) + len(text))
        all_ids += text
        offset, end = len(all_ids), place.offset + place.length
        if feature.modality == "image":
            total = num_tokens(feature)
            all_ids += [token_ids[place.offset]] * total
            column += [offset] * place.length
            place = dataclasses.replace(place, length=total)
        else:
            all_ids += token_ids[place.offset : end]
            column += range(offset, len(all_ids))
        place = dataclasses.replace(place, offset=offset)
        all_features.append(dataclasses.replace(feature, mm_position=place))
    column += range(len(all_ids), len(all_ids) + len(token_ids) - end)
    all_ids += token_ids[end:]
    positions, _ = unpruned_positions(all_ids, all_features)
    return positions[:, column].contiguous(), int(positions.max()) + 1 - len(token_ids)


def add_offsets(
    positions: torch.Tensor,
    is_visual: torch.Tensor,
    first: int,
    channels: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Adds rows and columns to the positions of the visual tokens that vLLM computes now.

    Args:
        positions: [3, N] positions from `prompt_positions`, or from an earlier call.
        is_visual: [N] True at visual tokens of the prompt.
        first: index of the first token that is computed now.
        channels: [k, NUM_CHANNELS] channels of the visual tokens from `first` on, by item.

    Returns:
        [3, N] positions.
    """
    digits = torch.cat(list(channels)).to(positions)
    index = is_visual[first:].nonzero()[: len(digits), 0] + first
    is_image = digits[:, 4] > 0
    index, digits = index[is_image], digits[is_image]
    positions = positions.clone()
    # The first axis is time. All tokens of an image have the same time, the start of the image.
    start = positions[0, index]
    positions[1, index] = start + digits[:, 0] * _BASE + digits[:, 1]
    positions[2, index] = start + digits[:, 2] * _BASE + digits[:, 3]
    return positions
