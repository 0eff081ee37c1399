import dataclasses
import json

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from visual import preprocess_clip

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.models.llava import images
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.stack import lay_out
from stepprune_jax.parallel import sharding


def _reference(folder):
    """The model of `transformers` on a folder, which must fit without remainder."""
    model, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    return model.eval()


def _logits(model):
    random = np.random.default_rng(0)
    image = model.config.image_token_id
    ids = torch.tensor([[1, 300, 301, *[image] * 9, 20, 300, 310]])
    pixels = torch.tensor(random.standard_normal((1, 3, 24, 24)), dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=pixels.to(model.dtype)).logits.float().numpy()


@pytest.mark.parametrize("layers", ["stacked", "apart"])
def test_sharded_bfloat16_weights_survive_a_round_trip(tmp_path, layers):
    source = testing.tiny_llava(tmp_path / "source", text={"vocab_size": 448})
    mesh = sharding.build_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    model = load_vlm(source, mesh, layers=layers, progress=False)
    save_vlm(model, tmp_path / "saved")
    again = load_vlm(tmp_path / "saved", progress=False)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        lay_out(again.params, layers),
        model.params,
    )
    assert again.config == model.config and again.image_settings == model.image_settings
    assert _reference(tmp_path / "saved").dtype == torch.bfloat16


def test_an_original_model_gains_an_image_token_that_greedy_never_picks(tmp_path):
    source = layouts.original_llava(tmp_path / "source")
    model = load_vlm(source, dtype=jnp.float32, progress=False)
    assert model.config.image_token_id is None
    assert len(model.tokenizer) == model.config.text.vocab_size
    save_vlm(model, tmp_path / "saved")
    saved = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    assert saved.config.image_token_id == saved.tokenizer.convert_tokens_to_ids("<image>")
    assert saved.config.text.vocab_size == model.config.text.vocab_size + 1
    logits = _logits(_reference(tmp_path / "saved"))
    np.testing.assert_array_equal(logits[..., -1], logits[..., 0])
    text = "USER: What is this? ASSISTANT:"
    assert saved.tokenizer(text).input_ids == model.tokenizer(text).input_ids
    assert "<image>" not in model.tokenizer.get_vocab()


def test_an_unused_row_of_the_vocabulary_becomes_the_image_token(tmp_path):
    source = layouts.original_llava(tmp_path / "source", text={"vocab_size": 448})
    model = load_vlm(source, dtype=jnp.float32, progress=False)
    save_vlm(model, tmp_path / "saved")
    saved = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    assert saved.config.text.vocab_size == 448
    assert saved.config.image_token_id == len(model.tokenizer)
    save_vlm(model._replace(tokenizer=None, image_settings=None), tmp_path / "bare")
    bare = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert bare["image_token_index"] == 448 and bare["text_config"]["vocab_size"] == 449


def test_the_saved_processor_gives_the_same_ids_and_pixels(tmp_path, llava_model):
    model = llava_model
    save_vlm(model, tmp_path / "saved")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "saved")
    text = "A chat. USER: What is in this picture? ASSISTANT:"
    assert processor.tokenizer(text).input_ids == model.tokenizer(text).input_ids
    pixels = np.random.default_rng(0).integers(0, 256, (31, 52, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    theirs = processor.image_processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(theirs, preprocess_clip(image, model.image_settings))


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("scaling", [None, SCALING, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("tied", [False, True])
def test_the_config_survives_both_readers(scaling, tied):
    raw = testing.tiny_hf_config(text={"rope_scaling": scaling, "rope_theta": 5e5, "head_dim": 8})
    config = LlavaConfig.from_hf(raw | {"tie_word_embeddings": tied, "eos_token_id": [2, 7]})
    written = config.to_hf("float32")
    assert LlavaConfig.from_hf(json.loads(json.dumps(written))) == config
    theirs = transformers.LlavaConfig.from_dict(written)
    assert theirs.text_config.rope_parameters["rope_theta"] == 5e5
    assert theirs.tie_word_embeddings == tied
    assert LlavaConfig.from_hf(theirs.to_dict()) == config


def test_what_cannot_be_saved_is_refused(tmp_path, llava_model):
    model = llava_model
    with pytest.raises(FileExistsError, match=r"already holds model\.safetensors"):
        save_vlm(model, model.folder)
    text = dataclasses.replace(model.config.text, hidden_size=64, tie_embeddings=True)
    other = VLM(model.params, dataclasses.replace(model.config, text=text))
    with pytest.raises(ValueError, match=r"norm/scale is \[48\], expected \[64\]") as error:
        save_vlm(other, tmp_path / "other")
    assert "language/head/kernel is not part of this model" in str(error.value)


def test_a_model_given_smaller_images_is_saved_as_it_was_trained(llava_folder, tmp_path):
    model = load_vlm(llava_folder, dtype=jnp.float32, max_pixels=300, progress=False)
    assert (model.config.grid, model.config.max_image_tokens) == ((2, 2), 4)  # of 8 pixels each
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    pixels = model.config.family.preprocess(model.config, model.image_settings, [image])
    small = model.image_settings._replace(resize_to=16, crop_to=16)
    expected = images.normalise(images.resize(image, small), small)
    np.testing.assert_array_equal(pixels[0], expected)
    save_vlm(model, tmp_path / "saved")
    again = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    whole = load_vlm(llava_folder, dtype=jnp.float32, progress=False)
    assert again.config == whole.config
    for bad in (63, 24 * 24 + 1, 0):
        with pytest.raises(ValueError, match=rf"max_pixels is {bad}, expected an integer from 64"):
            load_vlm(llava_folder, max_pixels=bad)
    same = load_vlm(llava_folder, dtype=jnp.float32, max_pixels=24 * 24, progress=False)
    assert same.config == whole.config
