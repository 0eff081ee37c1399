"""Writes a tiny LLaVA-NeXT with random weights as a checkpoint folder."""

from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from stepprune_jax.models.config import Json
from stepprune_jax.models.llava_next import LlavaNext
from stepprune_jax.testing import random_tensors, tiny_hf_config, tiny_tokenizer, write_folder

# (height, width) in pixels, with the published numbers of tiles. A tile is 24 x 24 pixels, or 3 x 3
# patches.
SIZES = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
MISTRAL = {"model_type": "mistral", "sliding_window": None}


def tiny_next_config(vocab_size: int = 512, mistral: bool = False, **changes: object) -> Json:
    """Returns the ``config.json`` of the model; `changes` replace its fields."""
    raw = tiny_hf_config(vocab_size, text=MISTRAL if mistral else {})
    kind = {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
    return raw | kind | {"image_grid_pinpoints": SIZES, **changes}


def tiny_llava_next(
    folder: str | Path,
    *,
    mistral: bool = False,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Writes the checkpoint folder; `changes` replace fields of ``config.json``."""
    tokenizer = tiny_tokenizer()
    raw = tiny_next_config(len(tokenizer), mistral, **changes)
    processor = {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 24},
        "crop_size": {"height": 24, "width": 24},
        "image_grid_pinpoints": raw["image_grid_pinpoints"],
        "do_pad": True,
    }
    tensors = random_tensors(LlavaNext.read(raw, None), dtype, seed)
    return write_folder(folder, raw, processor, tensors, tokenizer)
