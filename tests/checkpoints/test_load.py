import json

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from shards import to_shards

from stepprune_jax import testing
from stepprune_jax.checkpoints import load, safetensors, save
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.models import decoder
from stepprune_jax.models.llava import Llava
from stepprune_jax.parallel import sharding


def _load(folder, mesh=None, dtype=jnp.float32, **options):
    return load.load_params(inspect_folder(folder), mesh, dtype, progress=False, **options)


def _rewrite(folder, change):
    """Changes the tensors of a folder with one weight file."""
    entries = read_folder(folder)
    tensors = {name: safetensors.read_tensor(entry) for name, entry in entries.items()}
    change(tensors)
    testing.write_tensors(folder, tensors)


def _assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_all_layouts_give_equal_parameters(tmp_path, llava_folder):
    new = layouts.new_llava(tmp_path / "new")
    to_shards(new, 4)
    _assert_equal(_load(new), _load(llava_folder))
    # The original vocabulary has no image token, so both files are written with one size.
    original = layouts.original_llava(tmp_path / "original", text={"vocab_size": 448})
    published = testing.tiny_llava(tmp_path / "published", text={"vocab_size": 448})
    _assert_equal(_load(original), _load(published))
    assert inspect_folder(original).config.image_token_id is None


def test_a_tower_inside_the_original_files_is_preferred_to_the_clip_folder(tmp_path):
    folder = layouts.original_llava(tmp_path)
    tower = read_folder(folder / "clip")
    trained_tower = {name: safetensors.read_tensor(entry) + 1 for name, entry in tower.items()}
    inside = {f"model.vision_tower.vision_tower.{name}": x for name, x in trained_tower.items()}
    _rewrite(folder, lambda tensors: tensors.update(inside))
    loaded = _load(folder)["vision"]["class_embedding"]
    expected = trained_tower["vision_model.embeddings.class_embedding"]
    np.testing.assert_array_equal(loaded, expected)


def test_the_clip_folder_may_contain_the_text_tower_and_be_given_by_path(tmp_path):
    folder = layouts.original_llava(tmp_path / "model")
    expected = _load(folder)
    text_tower = {
        "text_model.final_layer_norm.weight": np.ones(3, np.float32),
        "logit_scale": np.float32(1),
        "vision_model.embeddings.position_ids": np.arange(10),
    }
    _rewrite(folder / "clip", lambda tensors: tensors.update(text_tower))
    (folder / "clip").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"mm_vision_tower of .* vision_folder="):
        inspect_folder(folder)
    source = inspect_folder(folder, tmp_path / "elsewhere")
    _assert_equal(load.load_params(source, dtype=jnp.float32, progress=False), expected)


def test_weights_are_rounded_to_the_requested_dtype(llava_folder, llava_model):
    params = _load(llava_folder, dtype=jnp.bfloat16)
    _assert_equal(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), llava_model.params))


def test_a_model_is_printed_in_one_line(llava_folder, llava_model):
    weights = sum(leaf.size for leaf in jax.tree.leaves(llava_model.params))
    assert repr(llava_model) == f"VLM(Llava, {weights:,} weights, folder={llava_folder})"


def test_sharded_weights_are_equal_and_each_byte_is_read_once(tmp_path, monkeypatch):
    text = {"vocab_size": 448, "num_key_value_heads": 2}  # divisible by four devices
    folder = testing.tiny_llava(tmp_path, text=text)
    expected = _load(folder)
    reads = []  # (name, bytes read, bytes of the tensor)

    def recording_read(entry, index=None, dtype=None):
        data = read_tensor(entry, index)
        reads.append((entry.name, data.nbytes, entry.nbytes))
        return data

    read_tensor = safetensors.read_tensor
    monkeypatch.setattr(safetensors, "read_tensor", recording_read)
    mesh = sharding.build_mesh({"data": 2, "tensor": 4}, jax.devices())
    params = _load(folder, mesh)
    _assert_equal(params, expected)
    shardings = sharding.shardings(params, Llava.SHARDING_RULES, mesh)
    is_as_ruled = jax.tree.map(
        lambda x, expected: x.sharding.is_equivalent_to(expected, x.ndim), params, shardings
    )
    assert all(jax.tree.leaves(is_as_ruled))
    total = sum(entry.nbytes for entry in read_folder(folder).values())
    assert sum(num_bytes for _, num_bytes, _ in reads) == total
    kernels = [read for read in reads if read[0].endswith("mlp.up_proj.weight")]
    assert len(kernels) == 8
    assert all(num_bytes * 4 == tensor_bytes for _, num_bytes, tensor_bytes in kernels)


def test_one_error_lists_all_weights_that_do_not_fit(tmp_path):
    folder = testing.tiny_llava(tmp_path)

    def spoil(tensors):
        del tensors["language_model.model.norm.weight"]
        del tensors["multi_modal_projector.linear_1.bias"]
        tensors["language_model.model.layers.7.mlp.up_proj.weight"] = np.zeros((1,), np.float32)
        tensors["language_model.lm_head.weight"] = tensors["language_model.lm_head.weight"].T
        tensors["vision_tower.vision_model.embeddings.class_embedding"] = np.zeros(32, np.int8)
        tensors["model.language_model.embed_tokens.weight"] = np.zeros(1, np.float32)

    _rewrite(folder, spoil)
    with pytest.raises(ValueError) as error:
        _load(folder)
    message = str(error.value)
    for part in (
        "missing (2):",
        "language_model.model.norm.weight (for language/norm/scale)",
        "unused (1):",
        "language_model.lm_head.weight is [48, ",
        "embeddings.class_embedding is int8",
        "stored twice (1):",
    ):
        assert part in message


QUANTIZED = ("qweight", "weight.absmax", "weight_scale", "weight_scale_inv", "weight_packed", "SCB")
# `save_pretrained` of the model inside a peft model writes such names.
ADAPTERS = [
    f"{part}.weight" for part in ("base_layer", "lora_A.default", "modules_to_save.default")
]


@pytest.mark.parametrize("name", [*QUANTIZED, *ADAPTERS])
def test_quantized_tensors_and_unmerged_adapters_are_refused_in_one_line(tmp_path, name):
    folder, layer = testing.tiny_llava(tmp_path), "language_model.model.layers.1.mlp.up_proj"
    renamed, message = f"{layer}.{name}", "quantized weights .{} in model"

    def add_quantized(tensors):
        tensors[renamed] = np.ones(3, np.int8)

    def rename(tensors):
        tensors[renamed] = tensors.pop(f"{layer}.weight")

    if name in ADAPTERS:
        message = "hold an adapter .{} in model.*merge"
    _rewrite(folder, rename if name in ADAPTERS else add_quantized)
    with pytest.raises(ValueError, match=message.format(renamed)) as error:
        _load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_unknown_tensors_are_refused_except_known_harmless_ones(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    harmless = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6)}
    _rewrite(folder, lambda tensors: tensors.update(harmless))
    _load(folder)
    _rewrite(folder, lambda tensors: tensors.update(adapter=np.ones(1)))
    with pytest.raises(ValueError, match=r"unused \(1\):\n    adapter in"):
        _load(folder)


# Stored tensors: embeddings only, embeddings and an equal head, embeddings and a different head, or
# a head only.
STORED = ("embeddings", "equal head", "different head", "head")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("config_name", ["config", "text_config"])
def test_a_tied_head_is_loaded_as_by_transformers(tmp_path, caplog, stored, config_name):
    """The configuration ties head and embeddings, but the files may store a different head."""
    folder = testing.tiny_llava(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["tie_word_embeddings"] is raw["text_config"]["tie_word_embeddings"] is False
    (raw if config_name == "config" else raw["text_config"])["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(raw))
    head, embed = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"

    def change(tensors):
        if stored == "embeddings":
            del tensors[head]
        elif stored == "equal head":
            tensors[head] = tensors[embed]
        elif stored == "head":
            del tensors[embed]

    _rewrite(folder, change)
    model = load.load_vlm(folder, dtype=jnp.float32, progress=False)
    reference = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    language, decoder_reference = model.params["language"], reference.model.language_model
    embedding = decoder_reference.embed_tokens.weight.detach()
    np.testing.assert_array_equal(language["embed"]["embedding"], embedding)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((2, 48), np.float32))
    logits = decoder.logits(language, model.config.text, hidden)
    with torch.no_grad():
        expected = reference.lm_head(decoder_reference.norm(torch.tensor(np.array(hidden))))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    has_different_head = stored == "different head"
    assert ("head" in language) is has_different_head is not model.config.text.tie_embeddings
    warnings = [record for record in caplog.records if record.name == load.__name__]
    assert [folder.name in record.message for record in warnings] == [True] * has_different_head
    save.save_vlm(model, tmp_path / "saved")
    _assert_equal(_load(tmp_path / "saved"), model.params)
    # The configuration that `inspect_folder` reads gives equal logits with the loaded weights.
    _assert_equal(decoder.logits(language, inspect_folder(folder).config.text, hidden), logits)


def test_a_dtype_that_cannot_hold_the_weights_is_refused(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    with pytest.raises(ValueError, match=r"dtype is .*, expected a floating one"):
        _load(folder, dtype=jnp.int8)
    _rewrite(folder, lambda tensors: tensors["language_model.lm_head.weight"].fill(1e5))
    _load(folder)
    with pytest.raises(ValueError, match=r"'language_model\.lm_head\.weight' holds .* float16"):
        _load(folder, dtype=jnp.float16)


def test_use_embeddings_omits_only_the_layers_of_the_language_model(llava_folder, llava_model):
    params = _load(llava_folder, use="embeddings")
    assert set(params["language"]) == {"embed", "norm", "head"}
    language = {name: llava_model.params["language"][name] for name in params["language"]}
    _assert_equal(params, {**llava_model.params, "language": language})
