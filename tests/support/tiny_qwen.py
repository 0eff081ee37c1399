"""Writes a tiny Qwen2.5-VL or Qwen3-VL with random weights as a checkpoint folder."""

from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from stepprune_jax.models.config import Json, LlamaConfig, Tokenizer
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.qwen3_vl import Qwen3_VL, Qwen3Config
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.testing import random_tensors, write_folder

_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def qwen_tokenizer() -> Tokenizer:
    """Builds a small tokenizer with Qwen's rules: bytes, followed by the template's tokens."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    return tokenizer


def tiny_qwen_config(tokenizer: Tokenizer, **changes: object) -> Json:
    """Returns the ``config.json`` of a Qwen2.5-VL, with the ids of `qwen_tokenizer`."""
    ids = _template_ids(tokenizer)
    language = LlamaConfig(
        len(tokenizer), 48, 96, 3, 4, 2, 12, 1e6, 1e-6, max_positions=512, rope_sections=(2, 2, 2)
    )
    vision = QwenVisionConfig(32, 52, 3, 2, 4, window_size=16, full_blocks=(0, 2), out_size=48)
    raw = QwenConfig(vision, language, ids["image_pad"], eos_token_ids=_stop_ids(ids)).to_hf(
        "float32"
    )
    return _as_published(raw, ids) | changes


def tiny_qwen3_config(tokenizer: Tokenizer, **changes: object) -> Json:
    """Returns the ``config.json`` of a Qwen3-VL with DeepStack features of the blocks 0 and 1."""
    ids = _template_ids(tokenizer)
    language = LlamaConfig(
        len(tokenizer), 48, 96, 3, 4, 2, 16, 1e6, 1e-6, max_positions=512, rope_sections=(4, 2, 2)
    )
    vision = Qwen3VisionConfig(32, 52, 3, 2, 4, out_size=48, positions=25, deepstack_blocks=(0, 1))
    raw = Qwen3Config(vision, language, ids["image_pad"], eos_token_ids=_stop_ids(ids)).to_hf(
        "float32"
    )
    return _as_published(raw, ids) | changes


def _template_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {name.strip("<|>"): tokenizer.convert_tokens_to_ids(name) for name in _TOKENS}


def _stop_ids(ids: dict[str, int]) -> tuple[int, ...]:
    return ids["im_end"], ids["endoftext"]


def _as_published(raw: Json, ids: dict[str, int]) -> Json:
    """Adds the fields of published files that `to_hf` does not write."""
    del raw["dtype"]
    marks = {f"{name}_token_id": ids[name] for name in ("vision_start", "vision_end")}
    return {**raw, **marks, "video_token_id": ids["video_pad"]}


def tiny_qwen(
    folder: str | Path,
    *,
    min_pixels: int = 256,
    max_pixels: int = 2304,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Writes the folder of a Qwen2.5-VL; `changes` replace fields of ``config.json``.

    A visual token covers 64 pixels of a resized image, whose area is limited by `min_pixels` and
    `max_pixels`.
    """
    tokenizer = qwen_tokenizer()
    raw = tiny_qwen_config(tokenizer, **changes)
    processor = {"min_pixels": min_pixels, "max_pixels": max_pixels} | _processor_fields(raw)
    tensors = random_tensors(Qwen2_5_VL.read(raw, None), dtype, seed)
    return write_folder(folder, raw, processor, tensors, tokenizer)


def tiny_qwen3(
    folder: str | Path,
    *,
    min_pixels: int = 256,
    max_pixels: int = 2304,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Writes the folder of a Qwen3-VL; the processor has the fields of the published files."""
    tokenizer = qwen_tokenizer()
    raw = tiny_qwen3_config(tokenizer, **changes)
    processor = _processor_fields(raw) | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    tensors = random_tensors(Qwen3_VL.read(raw, None), dtype, seed)
    return write_folder(folder, raw, processor, tensors, tokenizer)


def _processor_fields(raw: Json) -> Json:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": raw["vision_config"]["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
