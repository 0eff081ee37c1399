"""Synthetic model folders without weights, and data in LLaVA's format, for timing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.testing import llava_encoder, tiny_tokenizer

# As most images of COCO, which most of LLaVA's are from.
_WIDTH, _HEIGHT = 640, 480
# Patches of colour, in pixels, under noise of a few grey levels: files of about 140 kB.
_PATCH, _NOISE = 40, 12.0
_QUESTION_WORDS = 16


def write_model(folder: Path, fields: dict[str, Any]) -> Path:
    """Writes the files of a model that are read before its weights.

    Args:
        folder: created.
        fields: fields of `config.json`, in the Hugging Face layout.

    Returns:
        The folder: configuration, image processor and a small tokenizer.
    """
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


def write_conversations(folder: Path, count: int, questions: int, ids: int) -> Path:
    """Writes conversations of equal length, each about its own image.

    Args:
        folder: created.
        count: conversations, each with a JPEG file of 640 x 480.
        questions: questions of each conversation, with answers of equal length.
        ids: ids of each conversation, with the image as one; met up to one per question.

    Returns:
        The folder: train.json and images/.

    Raises:
        ValueError: too few ids for answers.
    """
    encoder, random = llava_encoder(tiny_tokenizer()), np.random.default_rng(0)
    bare = len(encoder.encode(_turns(questions, 1), 1).ids)
    words = 1 + (ids - bare) // questions
    if words < 1:
        raise ValueError(f"{questions} questions alone take {bare} ids, expected more than {ids}")
    turns = _turns(questions, words)
    said = [
        {"from": ("human", "gpt")[number % 2], "value": turn} for number, turn in enumerate(turns)
    ]
    said[0]["value"] = f"{IMAGE_MARK}\n{said[0]['value']}"
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        _image(random).save(folder / "images" / f"{number}.jpg", quality=90)
    samples = [
        {"id": number, "image": f"{number}.jpg", "conversations": said} for number in range(count)
    ]
    (folder / "train.json").write_text(json.dumps(samples))
    return folder


def _turns(questions: int, words: int) -> list[str]:
    """Builds questions and answers of words that are one token each."""
    question, answer = " ".join(["two"] * _QUESTION_WORDS), " ".join(["red"] * words)
    return [question, answer] * questions


def _image(random: np.random.Generator) -> Image.Image:
    coarse = random.integers(0, 256, (_HEIGHT // _PATCH, _WIDTH // _PATCH, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + _NOISE * random.standard_normal((_HEIGHT, _WIDTH, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
