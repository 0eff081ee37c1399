"""Loading of VisionSelector's weights from checkpoints in the layout of its authors."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hub_server import serving
from shards import to_shards

from stepprune_jax import testing
from stepprune_jax.checkpoints.policy import load_policy, policy_file
from stepprune_jax.selectors import VisionSelectorConfig

D, H = 6, 3
LANGUAGE_MODEL = "model-4.safetensors"


def tensors():
    """Returns the tensors of the selector and two tensors of the model, in bfloat16."""
    random = np.random.default_rng(0)
    selector_shapes = {"q_proj.weight": (H, D), "q_proj.bias": (H,)}
    selector_shapes |= {"k_proj.weight": (H, D), "k_proj.bias": (H,)}
    shapes = {f"visual.importance_scorer.{name}": x for name, x in selector_shapes.items()}
    shapes |= {"lm_head.weight": (4, D), "visual.blocks.0.norm1.weight": (D,)}
    return {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def write_sharded(folder, arrays):
    """Writes one tensor per shard, and deletes a shard of the model.

    A download of the selector's shards leaves such a folder.
    """
    folder.mkdir()
    testing.write_tensors(folder, arrays)
    to_shards(folder, len(arrays))
    (folder / LANGUAGE_MODEL).unlink()


def check(policy, arrays):
    """Checks that a policy has the weights of the authors' tensors."""
    assert policy.config == VisionSelectorConfig(D, hidden_dim=H) and policy.stats is None
    for layer, published_layer in (("query", "q_proj"), ("key", "k_proj")):
        for leaf, published_leaf in (("kernel", "weight"), ("bias", "bias")):
            param = policy.params[layer][leaf]
            name = f"visual.importance_scorer.{published_layer}.{published_leaf}"
            assert param.dtype == np.float32
            np.testing.assert_array_equal(param, arrays[name].astype(np.float32).T)
    assert len(jax.tree.leaves(policy.params)) == 4


def test_a_file_its_folder_and_shards_give_equal_policies(tmp_path):
    arrays = tensors()
    testing.write_tensors(tmp_path, arrays)
    write_sharded(tmp_path / "sharded", arrays)
    for path in ("model.safetensors", ".", "sharded", "sharded/model.safetensors.index.json"):
        check(load_policy(tmp_path / path), arrays)
        assert policy_file(tmp_path / path).is_file()


def test_a_single_file_is_preferred_to_shards(tmp_path):
    arrays = tensors()
    sharded_arrays = {name: array + 1 for name, array in arrays.items()}
    write_sharded(tmp_path / "folder", sharded_arrays)
    testing.write_tensors(tmp_path / "folder", arrays)
    check(load_policy(tmp_path / "folder"), arrays)
    check(load_policy(tmp_path / "folder" / "model.safetensors.index.json"), sharded_arrays)


def test_weights_for_llava_onevision_are_refused(tmp_path):
    testing.write_tensors(tmp_path, {"model.visual.importance_scorer.q_proj.bias": np.ones(3)})
    (tmp_path / "config.json").write_text('{"model_type": "llavaonevision1_5"}')
    with pytest.raises(ValueError, match="'llavaonevision1_5'; of VisionSelector's weights only"):
        load_policy(tmp_path)


def test_one_error_lists_missing_misshaped_and_unused_tensors(tmp_path):
    arrays, prefix = tensors(), "visual.importance_scorer"
    del arrays[f"{prefix}.k_proj.bias"]
    arrays[f"{prefix}.q_proj.bias"] = arrays[f"{prefix}.q_proj.bias"][:2]
    arrays[f"{prefix}.v_proj.weight"] = np.ones(3, np.float32)
    write_sharded(tmp_path / "folder", arrays)
    with pytest.raises(ValueError, match="do not fit their VisionSelectorConfig") as error:
        load_policy(tmp_path / "folder")
    for line in (
        "missing: key/bias",
        "wrong shape: query/bias is [2], expected [3]",
        f"unused: {prefix}.v_proj.weight",
        str(tmp_path / "folder"),
    ):
        assert line in str(error.value)


def test_a_checkpoint_without_a_selector_is_refused(tmp_path):
    testing.write_tensors(tmp_path, {"lm_head.weight": tensors()["lm_head.weight"]})
    with pytest.raises(FileNotFoundError, match=r"the folder .* has no policy.safetensors"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="is not a policy of format"):
        load_policy(tmp_path / "model.safetensors")


def test_only_the_shards_of_the_selector_are_downloaded(tmp_path, monkeypatch):
    arrays = tensors()
    write_sharded(tmp_path / "folder", arrays)
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "cache", monkeypatch) as server:
        server.commit("org/selector", files | {LANGUAGE_MODEL: b"the language model"})
        check(load_policy("org/selector"), arrays)
        requested = {path.rpartition("/")[2] for path in server.asked}
        assert {f"model-{i}.safetensors" for i in range(4)} < requested
        assert not {LANGUAGE_MODEL, "model-5.safetensors"} & requested
