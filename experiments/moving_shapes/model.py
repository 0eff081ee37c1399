"""The small Qwen3-VL of the world: its shape, its vocabulary, and the layout of its prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from experiments.moving_shapes.draw import NUM_PATCHES, NUM_TOKENS
from experiments.moving_shapes.scene import (
    CELL,
    COLORS,
    COUNTED_KINDS,
    DIRECTIONS,
    FRAME_RATE,
    GRID,
    NUM_FRAMES,
    RING,
    SIDE,
    Query,
)
from experiments.pretrain.vocabulary import Template, build_tokenizer
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.images import Clip
from stepprune_jax.models.qwen2_5_vl.images import QwenImageSettings, VideoSettings
from stepprune_jax.models.qwen3_vl import Qwen3_VL, Qwen3Config
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig

_MERGE = 2  # patches along an edge of a visual token
_PATCH = CELL // _MERGE
_FRAMES_PER_PATCH = NUM_FRAMES // NUM_PATCHES
# Mean time of the two frames of each temporal patch, in seconds.
TIMES = tuple((2 * patch + 0.5) / FRAME_RATE for patch in range(NUM_PATCHES))
_TEMPLATE = Template(
    special=("<unk>", "<|endoftext|>", "<|im_end|>"),
    start=None,
    end="<|im_end|>",
    words="user assistant 0 1 2 3 4 5 6 7 8 9 < > . seconds",
    system=None,
    added=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


def make_tokenizer() -> Any:
    """Returns a tokenizer with one token for each word, and for the time of each temporal patch."""
    texts = ["Which color enters first?", f"What color was the {RING} before?"]
    texts += [
        f"Which way does the {color} {kind} move?" for kind in COUNTED_KINDS for color in COLORS
    ]
    texts += [f"How many {kind}s pass?" for kind in COUNTED_KINDS] + list(DIRECTIONS)
    template = _TEMPLATE._replace(
        added=(*_TEMPLATE.added, *(f"<{time:.1f} seconds>" for time in TIMES))
    )
    return build_tokenizer(texts, template)


def make_backbone(tokenizer: Any) -> Qwen3_VL:
    """Returns the model for the vocabulary of a tokenizer."""
    token, width = tokenizer.convert_tokens_to_ids, 96
    vision = Qwen3VisionConfig(
        hidden_size=48,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        patch_size=_PATCH,
        out_size=width,
        positions=(GRID * _MERGE) ** 2,
        deepstack_blocks=(),
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=224,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=width // 4,
        rope_theta=5000.0,
        rope_sections=(4, 4, 4),
        rope_interleaved=True,
        qk_norm=True,
        tie_embeddings=True,
    )
    return Qwen3_VL(
        Qwen3Config(
            vision=vision,
            text=text,
            image_token_id=token("<|image_pad|>"),
            eos_token_ids=(token("<|im_end|>"), token("<|endoftext|>")),
            pad_token_id=token("<|endoftext|>"),
            min_pixels=SIDE * SIDE,
            max_pixels=SIDE * SIDE,
        )
    )


def image_settings() -> QwenImageSettings:
    """Returns settings that read a clip of the world at its own size."""
    area = NUM_FRAMES * SIDE * SIDE
    return QwenImageSettings(video=VideoSettings(SIDE * SIDE, area, FRAME_RATE, 2, NUM_FRAMES))


def cut_patches(
    frames: UInt8[np.ndarray, "i frames side side 3"],
) -> UInt8[np.ndarray, "p m v"]:
    """Cuts the frames of i clips into patches in the order of the tower.

    Returns:
        [p, m, v] bytes of the m patches of each of the p = i * `NUM_PATCHES` temporal patches.
    """
    rows = (GRID, _MERGE, _PATCH)
    parts = frames.reshape(len(frames), NUM_PATCHES, _FRAMES_PER_PATCH, *rows, *rows, 3)
    # (clip, patch in time, row and column of the token, row and column of the patch in the token,
    # frame, channel, row and column of the pixel)
    parts = parts.transpose(0, 1, 3, 6, 4, 7, 2, 9, 5, 8)
    num_patches = (GRID * _MERGE) ** 2
    return np.ascontiguousarray(parts).reshape(len(frames) * NUM_PATCHES, num_patches, -1)


class PromptLayout(NamedTuple):
    """The common beginning of all prompts: the user's role and a complete clip.

    Attributes:
        ids: [p] token ids; 0 at visual tokens.
        positions: [3, p] position ids of time, row and column.
        visual_slots: [n] slots of the visual tokens.
        text_slots: [p - n] slots of the text.
        next_position: position id of the first token after the clip.
    """

    ids: Int[np.ndarray, "p"]
    positions: Int[np.ndarray, "3 p"]
    visual_slots: Int[np.ndarray, "n"]
    text_slots: Int[np.ndarray, "q"]
    next_position: int


def encode_query(
    tokenizer: Any, backbone: Qwen3_VL, query: Query
) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokenizes a prompt with a question and its answer.

    Returns:
        The ids before each temporal patch, with the end mark of the patch before; the ids after the
        clip without the answer; and the ids of the answer.
    """
    clip = Clip(None, TIMES, 0.0)
    message = backbone.place_images(query.text, 1)
    prompt = backbone.place_videos(backbone.conversation([message, None]), [clip])
    full = backbone.place_videos(backbone.conversation([message, query.answer]), [clip])
    *pieces, last = (tokenizer(piece).input_ids for piece in prompt.split(IMAGE_MARK))
    full_last = tokenizer(full.split(IMAGE_MARK)[-1]).input_ids
    return pieces, last, full_last[len(last) :]


def make_layout(pieces: Sequence[Sequence[int]], last_id: int) -> PromptLayout:
    """Returns the layout of the prompts' beginning, up to the end mark of the last patch.

    Args:
        pieces: ids before each temporal patch.
        last_id: the end mark of a temporal patch.
    """
    ids, positions, is_visual, next_position = [], [], [], 0
    row, column = np.divmod(np.arange(GRID * GRID), GRID)
    for number, piece in enumerate([*pieces, [last_id]]):
        ids += piece
        positions += [(next_position + offset,) * 3 for offset in range(len(piece))]
        is_visual += [False] * len(piece)
        next_position += len(piece)
        if number < len(pieces):
            ids += [0] * (GRID * GRID)
            places = np.stack([np.zeros_like(row), row, column], axis=1) + next_position
            positions += [tuple(place) for place in places.tolist()]
            is_visual += [True] * (GRID * GRID)
            next_position += GRID
    visual_slots = np.flatnonzero(is_visual)
    assert len(visual_slots) == NUM_TOKENS
    return PromptLayout(
        np.array(ids, np.int32),
        np.array(positions, np.int32).T,
        visual_slots.astype(np.int32),
        np.flatnonzero(~np.array(is_visual)).astype(np.int32),
        next_position,
    )


def count_weights(params: Any) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def normalize(backbone: Qwen3_VL, values: UInt8[Array, "p m v"]) -> Float[Array, "p m v"]:
    """Normalizes bytes of patches, whose values run over (frame, channel, row, column)."""
    shape, area = values.shape, _PATCH * _PATCH
    values = values.reshape(*shape[:2], _FRAMES_PER_PATCH, 3, area).astype(np.float32)
    mean, std = (
        np.asarray(constant, np.float32)[:, None]
        / np.float32(backbone.config.normalisation.rescale)
        for constant in (backbone.config.normalisation.mean, backbone.config.normalisation.std)
    )
    return ((values - mean) / std).reshape(shape)
