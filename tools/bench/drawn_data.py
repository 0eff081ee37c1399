"""Synthetic model folders without weights, and data in LLaVA's format, for timing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.testing import llava_encoder, tiny_tokenizer
from stepprune_jax.user_input import UserError

# As most images of COCO, which most of LLaVA's are from.
_WIDTH, _HEIGHT = 640, 480
# Patches of colour, in pixels, under noise of a few grey levels: files of about 140 kB.
_PATCH, _NOISE = 40, 12.0
# Words that are one token each.
_QUESTION, _WORD = " ".join(["two"] * 16), "red"


def write_model(folder: Path, fields: dict[str, Any]) -> Path:
    """Writes the files of a model that are read before its weights."""
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
    """Writes conversations of equal length, each a question about its own image."""
    encoder, random = llava_encoder(tiny_tokenizer()), np.random.default_rng(0)
    least = len(encoder.encode((_QUESTION, _WORD), 1).ids)
    if ids < least:
        raise UserError(f"ids is {ids}, expected at least {least}")
    answer = " ".join([_WORD] * (1 + ids - least))
    said = [
        {"from": "human", "value": f"{IMAGE_MARK}\n{_QUESTION}"},
        {"from": "gpt", "value": answer},
    ]
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        _image(random).save(folder / "images" / f"{number}.jpg", quality=90)
    samples = [
        {"id": number, "image": f"{number}.jpg", "conversations": said} for number in range(count)
    ]
    (folder / "train.json").write_text(json.dumps(samples))
    return folder


def _image(random: np.random.Generator) -> Image.Image:
    coarse = random.integers(0, 256, (_HEIGHT // _PATCH, _WIDTH // _PATCH, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + _NOISE * random.standard_normal((_HEIGHT, _WIDTH, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
