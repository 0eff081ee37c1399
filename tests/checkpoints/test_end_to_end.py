"""From a picture and a question to logits, against the reference model on the same folder."""

import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from visual import visual_of

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch, tokenize_with_images
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import LLAVA


@functools.partial(jax.jit, static_argnames="config")
def _ours(params, config, ids, length, pixels):
    features, _ = config.family.encode_image(params, config, pixels)
    visual = visual_of(config, config.family.project(params, config, features)[None])
    sequence = vlm.assemble(params, config, ids, length, visual)
    return sequence.length, vlm.prefill(params, config, sequence, 1, all_logits=True).logits[0]


@pytest.mark.parametrize("write", [testing.tiny_llava, layouts.new_llava, layouts.original_llava])
def test_logits_equal_the_reference_whatever_the_layout(tmp_path, write):
    model = load_vlm(write(tmp_path / "source"), dtype=jnp.float32, progress=False)
    random = np.random.default_rng(1)
    paths = [tmp_path / "wide.png", tmp_path / "tall.jpg"]
    for path, shape in zip(paths, [(20, 50, 3), (64, 30, 3)], strict=True):
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(path)
    pixels = LLAVA.preprocess(
        model.config, model.image_settings, [open_image(path) for path in paths]
    )
    prompt = LLAVA.conversation([LLAVA.place_images("What is in this picture?", 2)])
    row = tokenize_with_images(model.tokenizer, prompt, 2)
    ids, lengths = pad_batch([row], multiple=8)
    length, logits = _ours(model.params, model.config, ids, lengths, pixels)

    save_vlm(model, tmp_path / "saved")
    reference = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "saved")
    count, token = model.config.max_image_tokens, reference.config.image_token_index
    expanded = [t for x in row for t in ([token] * count if x == IMAGE_TOKEN else [x])]
    assert len(expanded) == int(length[0])
    with torch.no_grad():
        expected = reference.eval()(
            input_ids=torch.tensor([expanded]), pixel_values=torch.tensor(pixels)
        ).logits[0]
    expected = expected.numpy()[:, : model.config.text.vocab_size]
    error = np.abs(logits[: len(expanded)] - expected).max() / np.abs(expected).max()
    assert error < 1e-5
