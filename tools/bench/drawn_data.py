"""Writes model folders without weights, and random data in LLaVA's format, for timing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.testing import llava_encoder, tiny_tokenizer
from stepprune_jax.user_input import UserError

# The most frequent size in COCO, the source of most images of LLaVA's data.
_WIDTH, _HEIGHT = 640, 480
# Size of color patches in pixels, and deviation of noise in gray levels. Files have about 140 kB.
_PATCH, _NOISE = 40, 12.0
# Each word is one token.
_QUESTION, _WORD = " ".join(["two"] * 16), "red"


def write_model(folder: Path, fields: dict[str, Any]) -> Path:
    """Writes all files of a model except for its weights, and returns the folder."""
    tiny_tokenizer().save_pretrained(folder)
    side = fields["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    for name, value in {"config": fields, "preprocessor_config": processor}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_conversations(folder: Path, count: int, ids: int) -> Path:
    """Writes `count` conversations of `ids` tokens, each about a different image."""
    encoder, rng = llava_encoder(tiny_tokenizer()), np.random.default_rng(0)
    min_ids = len(encoder.encode((_QUESTION, _WORD), 1).ids)
    if ids < min_ids:
        raise UserError(f"ids is {ids}, expected at least {min_ids}")
    answer = " ".join([_WORD] * (1 + ids - min_ids))
    turns = [
        {"from": "human", "value": f"{IMAGE_MARK}\n{_QUESTION}"},
        {"from": "gpt", "value": answer},
    ]
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        _random_image(rng).save(folder / "images" / f"{number}.jpg", quality=90)
    samples = [
        {"id": number, "image": f"{number}.jpg", "conversations": turns} for number in range(count)
    ]
    (folder / "train.json").write_text(json.dumps(samples))
    return folder


def _random_image(rng: np.random.Generator) -> Image.Image:
    coarse_pixels = rng.integers(0, 256, (_HEIGHT // _PATCH, _WIDTH // _PATCH, 3), np.uint8)
    smooth = Image.fromarray(coarse_pixels).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + _NOISE * rng.standard_normal((_HEIGHT, _WIDTH, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
