"""Original position ids of kept tokens in vLLM's Qwen models.

vLLM can prune videos. Its model appends channels to the embeddings of an item, and vLLM passes the
channels to `recompute_mrope_positions` when the tokens enter the language model. vLLM's rules for
these channels derive the positions of the following text from the kept tokens, which is wrong for
images. This module computes the positions of text from the grids of images and videos, before the
tower runs. The positions of text therefore also hold if an item comes from the prefix cache. The
channels carry the position of each kept token relative to the start of its item.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Numbers up to 256 are exact in bfloat16, so an offset is a number of digits of this base. Three
# digits cover the longest context.
_BASE = 256
_NUM_DIGITS = 3
_NUM_AXES = 3
NUM_CHANNELS = _NUM_AXES * _NUM_DIGITS
# Column of a token whose position `add_offsets` still has to set.
_PENDING = -1


def append_offsets(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Appends the position of each token relative to the start of its item as channels.

    Args:
        tokens: [k, w] kept tokens of an image or a video.
        offsets: [3, k] time, row and column of each token.

    Returns:
        [k, w + NUM_CHANNELS]
    """
    digits = [offsets // _BASE**digit % _BASE for digit in range(_NUM_DIGITS)]
    return torch.cat([tokens, torch.cat(digits).T.to(tokens)], 1)


def prompt_positions(
    unpruned_positions: Callable[[list[int], list[Any]], tuple[torch.Tensor, int]],
    token_ids: list[int],
    features: Sequence[Any],
    unpruned_ids: Callable[[Any], list[int]],
) -> tuple[torch.Tensor, int]:
    """Computes the positions of a prompt with pruned images and videos.

    Args:
        unpruned_positions: vLLM's rule for prompts without pruning.
        token_ids: ids of the prompt, with one placeholder for each embedding of an item.
        features: vLLM's items of the prompt: images and videos with their places in `token_ids`.
        unpruned_ids: maps an item to its ids in a prompt without pruning.

    Returns:
        [3, N] positions, and the position of the next token minus N. The positions of text are
        final. The tokens of an item have the time and the row of its start, and the column -1,
        until `add_offsets` sets their positions.
    """
    # The rule reads the prompt with all tokens of each item. `column` lists the columns of its
    # result that belong to the N tokens of this prompt.
    all_ids: list[int] = []
    column: list[int] = []
    all_features, pending, end = [], [], 0
    for feature in sorted(features, key=lambda item: item.mm_position.offset):
        place = feature.mm_position
        text = token_ids[end : place.offset]
        column += range(len(all_ids), len(all_ids) + len(text))
        all_ids += text
        offset, end = len(all_ids), place.offset + place.length
        item_ids = unpruned_ids(feature)
        all_ids += item_ids
        column += [offset] * place.length
        pending += range(place.offset, end)
        place = dataclasses.replace(place, offset=offset, length=len(item_ids))
        all_features.append(dataclasses.replace(feature, mm_position=place))
    column += range(len(all_ids), len(all_ids) + len(token_ids) - end)
    all_ids += token_ids[end:]
    positions, _ = unpruned_positions(all_ids, all_features)
    delta = int(positions.max()) + 1 - len(token_ids)
    positions = positions[:, column]
    positions[-1, pending] = _PENDING
    return positions.contiguous(), delta


def add_offsets(
    positions: torch.Tensor,
    is_visual: torch.Tensor,
    first: int,
    channels: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Sets the positions of the tokens of items that vLLM computes now.

    Args:
        positions: [3, N] positions from `prompt_positions`, or from an earlier call.
        is_visual: [N] True at the tokens of images and videos.
        first: index of the first token that is computed now.
        channels: [k, NUM_CHANNELS] channels of these tokens from `first` on, by item.

    Returns:
        [3, N] positions.
    """
    digits = torch.cat(list(channels)).to(positions).T.unflatten(0, (_NUM_DIGITS, _NUM_AXES))
    weights = positions.new_tensor([_BASE**digit for digit in range(_NUM_DIGITS)])
    offsets = (digits * weights[:, None, None]).sum(0)
    index = is_visual[first:].nonzero()[: offsets.shape[1], 0] + first
    # vLLM computes some tokens twice, and their time already has the offset then.
    is_pending = positions[-1, index] == _PENDING
    start = positions[0, index] - torch.where(is_pending, 0, offsets[0])
    positions = positions.clone()
    positions[:, index] = start + offsets
    return positions
