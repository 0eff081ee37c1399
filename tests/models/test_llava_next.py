"""LLaVA-NeXT beside `transformers`: pixels, the order of tokens, logits and answers."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import assert_close, randomise
from tiny_llava_next import SIZES, tiny_llava_next
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from visual import noise

from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.models.llava_next.images import best_size

# Height and width of images: of each plan of tiles, enlarged and reduced, with bars on either side,
# and so narrow that no patch of the tiles remains.
SHAPES = ((50, 70), (20, 90), (9, 8), (64, 31), (47, 48), (24, 50), (4, 400))
STEPS = 6


class Pair(NamedTuple):
    """The reference and ours, with the same weights."""

    torch: Any
    folder: Path
    model: VLM


def make_pair(folder, **changes):
    folder = tiny_llava_next(folder, **changes)
    published = (folder / "config.json").read_text()
    model = randomise(
        transformers.LlavaNextForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager"
        )
    )
    model.save_pretrained(folder)
    (folder / "config.json").write_text(published)  # not as this version writes it
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("next"))


def image(number):
    """That of `SHAPES`."""
    return noise(number, SHAPES[number])


def processed(pair, images):
    """The reference's pixels of some images."""
    return LlavaNextImageProcessorPil.from_pretrained(pair.folder)(images, return_tensors="pt")


@pytest.fixture(scope="module")
def encode(pair):
    return jax.jit(pair.model.backbone.encode_image, static_argnames="taps")


def test_pixels_and_tokens_equal_the_reference(pair, encode):
    backbone, settings = pair.model.backbone, pair.model.image_settings
    project = jax.jit(backbone.project)
    for number in range(len(SHAPES)):
        theirs = processed(pair, [image(number)])
        ours = backbone.preprocess(settings, [image(number)])
        np.testing.assert_array_equal(ours.values, theirs["pixel_values"])
        found = pair.torch.model.get_image_features(**theirs).pooler_output[0]
        tokens = project(pair.model.params, encode(pair.model.params, ours)[0])
        assert backbone.num_tokens(backbone.grids(ours)).tolist() == [len(found)]
        assert tokens.shape[1] == backbone.padded_tokens(ours)
        assert_close(tokens[0, : len(found)], found, what=f"image {number}")
    assert encode._cache_size() == 3  # of 3, 4 and 5 tiles, whatever the aspect ratio


@hypothesis.settings(max_examples=200)
@hypothesis.given(height=st.integers(1, 3000), width=st.integers(1, 3000))
def test_sizes_equal_the_reference(height, width):
    theirs = select_best_resolution((height, width), SIZES)
    assert best_size(height, width, tuple(map(tuple, SIZES))) == tuple(theirs)


# Prompt, and numbers of its images.
ASKED = (
    *(("What is this?", (number,)) for number in range(6)),
    ("red", (0, 1)),
    ("is the red dog in <image> or in <image>?", (3, 2)),
    ("two", (4, 4)),
    ("What is in this picture? " * 3, (1,)),
    ("yes or no", ()),
    ("a dog?", ()),
)


def answer_of_reference(pair, prompt, numbers):
    """Greedy ids after the prompt of ours, with as many places as its image has tokens."""
    backbone, tokenizer = pair.model.backbone, pair.model.tokenizer
    text = backbone.conversation([backbone.place_images(prompt, len(numbers))])
    images = [processed(pair, [image(number)]) for number in numbers]
    counts = iter([len(pair.torch.model.get_image_features(**x).pooler_output[0]) for x in images])
    ids = []
    for token in tokenize_with_images(tokenizer, text, len(numbers)):
        place = [pair.model.config.image_token_id]
        ids += place * next(counts) if token == IMAGE_TOKEN else [token]
    inputs = processed(pair, [image(number) for number in numbers]) if numbers else {}
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    made = pair.torch.generate(input_ids=ids, attention_mask=mask, **inputs, **options)
    return made[0, ids.shape[1] :].tolist()


def answers(model, asked, *arguments, **options):
    prompts = [prompt for prompt, _ in asked]
    shown = [list(map(image, numbers)) for _, numbers in asked]
    return generate(
        model,
        prompts,
        shown,
        *arguments,
        sampling=Sampling(stop_ids=()),
        options=RunOptions(STEPS),
        **options,
    )


def test_answers_equal_the_reference(pair):
    """All in one batch, of which each row is as if alone."""
    found = answers(pair.model, ASKED)
    for (prompt, numbers), answer in zip(ASKED, found, strict=True):
        assert list(answer.token_ids) == answer_of_reference(pair, prompt, numbers), prompt
