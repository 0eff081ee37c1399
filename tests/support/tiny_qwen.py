"""A tiny Qwen2.5-VL with random weights, as a checkpoint folder or its parts."""

from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from stepprune_jax.models.config import Json, LlamaConfig, Tokenizer
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
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
    """Builds a small tokenizer with the rules of Qwen's: bytes, and the template's tokens last."""
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
    """Its ``config.json`` as published files have it, with the ids of `qwen_tokenizer`."""
    ids = {name.strip("<|>"): tokenizer.convert_tokens_to_ids(name) for name in _TOKENS}
    language = LlamaConfig(
        len(tokenizer), 48, 96, 3, 4, 2, 12, 1e6, 1e-6, max_positions=512, rope_sections=(2, 2, 2)
    )
    vision = QwenVisionConfig(32, 52, 3, 2, 4, window_size=16, full_blocks=(0, 2), out_size=48)
    ends = (ids["im_end"], ids["endoftext"])
    raw = QwenConfig(vision, language, ids["image_pad"], eos_token_ids=ends).to_hf("float32")
    del raw["dtype"]
    marks = {f"{name}_token_id": ids[name] for name in ("vision_start", "vision_end")}
    return {**raw, **marks, "video_token_id": ids["video_pad"], **changes}


def tiny_qwen(
    folder: str | Path,
    *,
    min_pixels: int = 256,
    max_pixels: int = 2304,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Writes the folder; a token is 64 pixels of a resized image, of which there are bounds."""
    tokenizer = qwen_tokenizer()
    raw = tiny_qwen_config(tokenizer, **changes)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "patch_size": raw["vision_config"]["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    tensors = random_tensors(Qwen2_5_VL.read(raw, None), dtype, seed)
    return write_folder(folder, raw, processor, tensors, tokenizer)
