import json

import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import pytest
from shards import to_shards

from stepprune_jax import testing
from stepprune_jax.checkpoints import load, safetensors
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.models.llava import LLAVA
from stepprune_jax.parallel import sharding

EVEN = {"text": {"vocab_size": 448, "num_key_value_heads": 2}}  # divisible by four devices


def _load(folder, mesh=None, dtype=jnp.float32, **options):
    return load.load_params(inspect_folder(folder), mesh, dtype, progress=False, **options)


def _rewrite(folder, change):
    """Changes the tensors of a folder with one weight file."""
    entries = read_folder(folder)
    tensors = {name: safetensors.read_tensor(entry) for name, entry in entries.items()}
    change(tensors)
    testing.write_tensors(folder, tensors)


def _assert_same(left, right):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right
    )


def test_every_dialect_gives_the_same_parameters(tmp_path, llava_folder):
    new = layouts.new_llava(tmp_path / "new")
    to_shards(new, 4)
    _assert_same(_load(new), _load(llava_folder))
    # The original's vocabulary has no image token, so its files are made to the same size here.
    original = layouts.original_llava(tmp_path / "original", text={"vocab_size": 448})
    plain = testing.tiny_llava(tmp_path / "again", text={"vocab_size": 448})
    _assert_same(_load(original), _load(plain))
    assert inspect_folder(original).config.image_token_id is None


def test_a_tower_inside_the_original_files_is_preferred_to_the_clip_folder(tmp_path):
    folder = layouts.original_llava(tmp_path)
    tower = read_folder(folder / "clip")
    kept = {name: safetensors.read_tensor(entry) + 1 for name, entry in tower.items()}

    def add_tower(tensors):
        tensors.update({f"model.vision_tower.vision_tower.{k}": v for k, v in kept.items()})

    _rewrite(folder, add_tower)
    loaded = _load(folder)["vision"]["class_embedding"]
    np.testing.assert_array_equal(
        np.asarray(loaded), kept["vision_model.embeddings.class_embedding"]
    )


def test_the_clip_folder_may_hold_a_whole_clip_and_lie_elsewhere(tmp_path):
    folder = layouts.original_llava(tmp_path / "model")
    before = _load(folder)

    def add_text_half(tensors):
        tensors["text_model.final_layer_norm.weight"] = np.ones(3, np.float32)
        tensors["text_projection.weight"] = np.ones((3, 3), np.float32)
        tensors["logit_scale"] = np.float32(1)
        tensors["vision_model.embeddings.position_ids"] = np.arange(10)

    _rewrite(folder / "clip", add_text_half)
    (folder / "clip").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"mm_vision_tower of .* vision_folder="):
        inspect_folder(folder)
    source = inspect_folder(folder, tmp_path / "elsewhere")
    _assert_same(load.load_params(source, dtype=jnp.float32, progress=False), before)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_rounded_to_the_wanted_dtype(tmp_path, stored):
    folder = testing.tiny_llava(tmp_path, dtype=stored)
    exact = _load(folder)
    half = _load(folder, dtype=jnp.bfloat16)
    _assert_same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_sharded_weights_equal_those_of_one_device(tmp_path, sizes):
    folder = testing.tiny_llava(tmp_path, **EVEN)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.build_mesh(sizes, devices)
    params = _load(folder, mesh)
    _assert_same(params, _load(folder))
    wanted = sharding.shardings(params, LLAVA.SHARDING_RULES, mesh)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(), params, wanted
    )


def test_each_byte_is_read_once_and_only_by_who_needs_it(tmp_path, monkeypatch):
    folder = testing.tiny_llava(tmp_path, **EVEN)
    total = sum(entry.nbytes for entry in read_folder(folder).values())
    reads = []

    def recorded(entry, index=None, dtype=None):
        data = read_tensor(entry, index)
        reads.append((entry.name, data.nbytes, entry.nbytes))
        return data

    read_tensor = safetensors.read_tensor
    monkeypatch.setattr(safetensors, "read_tensor", recorded)
    mesh = sharding.build_mesh({"data": 2, "tensor": 4}, jax.devices())
    _load(folder, mesh)
    assert sum(count for _, count, _ in reads) == total
    kernels = [read for read in reads if read[0].endswith("mlp.up_proj.weight")]
    assert len(kernels) == 8 and all(count * 4 == whole for _, count, whole in kernels)


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
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


def test_known_extras_are_harmless_and_others_are_not(tmp_path):
    folder = testing.tiny_llava(tmp_path)

    def add(tensors):
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6)
        tensors["vision_tower.vision_model.embeddings.position_ids"] = np.arange(10)

    _rewrite(folder, add)
    _load(folder)
    _rewrite(folder, lambda tensors: tensors.update(adapter=np.ones(1)))
    with pytest.raises(ValueError, match=r"unused \(1\):\n    adapter in"):
        _load(folder)


def test_tied_embeddings_need_no_head_and_ignore_a_stored_one(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "head" not in _load(folder)["language"]
    _rewrite(folder, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    assert "head" not in _load(folder)["language"]


def test_load_vlm_brings_tokenizer_and_image_settings(tmp_path, capsys):
    folder = testing.tiny_llava(tmp_path / "a")
    model = load.load_vlm(folder)
    assert model.params["language"]["norm"]["scale"].dtype == jnp.bfloat16
    assert model.image_settings.resize_to == model.image_settings.crop_to == 24
    assert model.tokenizer("▁").input_ids[0] == model.config.bos_token_id == 1
    assert model.folder == folder
    assert "loading a: 100%" in capsys.readouterr().err
    original = layouts.original_llava(tmp_path / "b")
    assert load.load_vlm(original, progress=False).image_settings == model.image_settings
    assert capsys.readouterr().err == ""


def test_a_dtype_that_cannot_hold_the_weights_is_refused(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    for dtype in (jnp.int8, "int8"):
        with pytest.raises(ValueError, match=r"dtype is .*, expected a floating one"):
            _load(folder, dtype=dtype)
    _rewrite(folder, lambda tensors: tensors["language_model.lm_head.weight"].fill(1e5))
    _load(folder)
    with pytest.raises(ValueError, match=r"'language_model\.lm_head\.weight' holds .* float16"):
        _load(folder, dtype=jnp.float16)


def test_without_the_layers_of_the_language_model(llava_folder, llava_model):
    """What a front reads before an engine; everything else is as it was."""
    params = _load(llava_folder, layers="none")
    assert set(params["language"]) == {"embed", "norm", "head"}
    language = {name: llava_model.params["language"][name] for name in params["language"]}
    _assert_same(params, {**llava_model.params, "language": language})
