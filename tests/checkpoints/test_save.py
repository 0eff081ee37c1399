import dataclasses
import json

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from visual import noise, preprocess_clip, random_bytes, visual_of

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.weights import join_kernels
from stepprune_jax.parallel import sharding


def _reference(folder):
    """Loads a folder with `transformers`, which must use all weights and miss none."""
    model, problems = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(problems.values()), problems
    return model.eval()


def test_sharded_bfloat16_weights_survive_a_round_trip(tmp_path):
    source = testing.tiny_llava(tmp_path / "source", text={"vocab_size": 448})
    mesh = sharding.build_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    model = load_vlm(source, mesh, progress=False)
    joined_params = join_kernels(jax.tree.map(jnp.copy, model.params))  # as on a GPU
    save_vlm(model._replace(params=joined_params), tmp_path / "saved")
    loaded = load_vlm(tmp_path / "saved", progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
    assert loaded.config == model.config and loaded.image_settings == model.image_settings
    assert _reference(tmp_path / "saved").dtype == torch.bfloat16


def _ids(*image_ids):
    return [1, 300, 301, *image_ids, 20, 300, 310]


def _logits(model, pixels):
    @jax.jit
    def logits(params, pixels):
        features, _ = model.backbone.encode_image(params, pixels)
        tokens = model.backbone.project(params, features)
        ids, length = jnp.array([_ids(IMAGE_TOKEN)]), jnp.array([7])
        visual = visual_of(model.config, tokens[None])
        sequence = assemble(params, model.backbone, ids, length, *visual)
        return vlm.prefill(params, model.config, sequence, 1, all_logits=True).logits

    return logits(model.params, pixels)


def test_an_original_model_has_the_logits_of_the_reference_and_gains_an_image_token(tmp_path):
    source = layouts.original_llava(tmp_path / "source")
    model = load_vlm(source, dtype=jnp.float32, progress=False)
    assert model.config.image_token_id is None
    save_vlm(model, tmp_path / "saved")
    saved = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    token = saved.config.image_token_id
    assert token == saved.tokenizer.convert_tokens_to_ids("<image>")
    assert saved.config.text.vocab_size == model.config.text.vocab_size + 1
    pixels = random_bytes(0, 1, 3, 24, 24)
    pixel_values = torch.tensor(model.backbone.normalise(pixels))
    with torch.no_grad():
        expected = _reference(tmp_path / "saved")(
            input_ids=torch.tensor([_ids(*[token] * 9)]), pixel_values=pixel_values
        ).logits.numpy()
    logits = _logits(model, pixels)[:, : expected.shape[1]]  # without the slots of an answer
    np.testing.assert_allclose(logits, expected[..., :-1], atol=1e-5)
    # The new token has the logits of token 0, so greedy decoding never chooses it.
    np.testing.assert_array_equal(expected[..., -1], expected[..., 0])
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
    save_vlm(model._replace(tokenizer=None, image_settings=None), tmp_path / "no_tokenizer")
    raw = json.loads((tmp_path / "no_tokenizer" / "config.json").read_text())
    assert raw["image_token_index"] == 448 and raw["text_config"]["vocab_size"] == 449


def test_the_saved_processor_gives_equal_ids_and_pixels(tmp_path, llava_model):
    model = llava_model
    save_vlm(model, tmp_path / "saved")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "saved")
    text = "A chat. USER: What is in this picture? ASSISTANT:"
    assert processor.tokenizer(text).input_ids == model.tokenizer(text).input_ids
    image = noise(0, (31, 52))
    pixels = processor.image_processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(pixels, preprocess_clip(image, model.image_settings))


ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("scaling", [None, ROPE_SCALING])
def test_a_written_config_is_read_equally_by_us_and_transformers(scaling):
    raw = testing.tiny_hf_config(text={"rope_scaling": scaling, "rope_theta": 5e5, "head_dim": 8})
    config = LlavaConfig.from_hf(raw | {"tie_word_embeddings": True, "eos_token_id": [2, 7]})
    hf_config = config.to_hf("float32")
    assert LlavaConfig.from_hf(json.loads(json.dumps(hf_config))) == config
    reference = transformers.LlavaConfig.from_dict(hf_config)
    assert reference.text_config.rope_parameters["rope_theta"] == 5e5
    assert reference.tie_word_embeddings
    assert LlavaConfig.from_hf(reference.to_dict()) == config


def test_saving_refuses_occupied_folders_and_unfitting_parameters(tmp_path, llava_model):
    model = llava_model
    with pytest.raises(FileExistsError, match=r"already holds model\.safetensors"):
        save_vlm(model, model.folder)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(FileExistsError, match=r"already holds pytorch_model-00001"):
        save_vlm(model, tmp_path)
    text = dataclasses.replace(model.config.text, hidden_size=64, tie_embeddings=True)
    unfitting = VLM(model.params, model.backbone.replace(text=text))
    with pytest.raises(ValueError, match=r"norm/scale is \[48\], expected \[64\]") as error:
        save_vlm(unfitting, tmp_path / "unfitting")
    assert "language/head/kernel is not part of this model" in str(error.value)


def test_a_model_loaded_with_smaller_images_is_saved_with_its_trained_image_size(
    llava_folder, llava_model, tmp_path
):
    model = load_vlm(llava_folder, dtype=jnp.float32, max_pixels=300, progress=False)
    assert (model.config.grid, model.config.max_image_tokens) == ((2, 2), 4)  # patches of 8 pixels
    image = noise(0, (40, 50))
    pixels = model.backbone.preprocess(model.image_settings, [image])
    small_settings = model.image_settings._replace(resize_to=16, crop_to=16)
    normalised = model.backbone.normalise(pixels)
    np.testing.assert_array_equal(normalised[0], preprocess_clip(image, small_settings))
    save_vlm(model, tmp_path / "saved")
    loaded = load_vlm(tmp_path / "saved", dtype=jnp.float32, progress=False)
    assert loaded.config == llava_model.config
    for bad in (63, 24 * 24 + 1):
        with pytest.raises(ValueError, match=rf"max_pixels is {bad}, expected an integer from 64"):
            load_vlm(llava_folder, max_pixels=bad)
