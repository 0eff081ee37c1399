"""Selectors as their authors publish them, in files of the same layout."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hub_server import serving
from shards import write_index

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.evaluation.settings import find_policy
from stepprune_jax.pruning import VisionSelectorConfig

D, H = 6, 3


def tensors():
    """What the authors' program saves, in bfloat16, and a tensor of the model's own."""
    random = np.random.default_rng(0)
    shapes = {
        "q_proj.weight": (H, D),
        "q_proj.bias": (H,),
        "k_proj.weight": (H, D),
        "k_proj.bias": (H,),
    }
    made = {f"visual.importance_scorer.{name}": shape for name, shape in shapes.items()}
    made |= {"lm_head.weight": (4, D), "visual.blocks.0.norm1.weight": (D,)}
    return {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in made.items()
    }


def write(path, arrays):
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_file(path, specs, arrays.values())


def write_sharded(folder, arrays):
    """One tensor a file; the language model's is not there, as after a download of the scorer."""
    folder.mkdir()
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(arrays)}
    for name, file in weight_map.items():
        if name != "lm_head.weight":
            write(folder / file, {name: arrays[name]})
    write_index(folder, weight_map)


def check(policy, arrays):
    assert policy.config == VisionSelectorConfig(D, hidden_dim=H) and policy.stats is None
    for layer, theirs in (("query", "q_proj"), ("key", "k_proj")):
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            ours = policy.params[layer][kind]
            expected = arrays[f"visual.importance_scorer.{theirs}.{name}"].astype(np.float32).T
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, expected)
    assert len(jax.tree.leaves(policy.params)) == 4


def test_one_file_its_folder_and_shards_are_read(tmp_path):
    arrays = tensors()
    write(tmp_path / "model.safetensors", arrays)
    write_sharded(tmp_path / "sharded", arrays)
    for path in ("model.safetensors", ".", "sharded", "sharded/model.safetensors.index.json"):
        check(load_policy(tmp_path / path), arrays)
        assert find_policy(tmp_path / path).is_file()


def test_a_weight_that_float32_does_not_hold_is_refused(tmp_path):
    arrays = {name: array.astype(np.float64) for name, array in tensors().items()}
    arrays["visual.importance_scorer.q_proj.bias"][0] = 1e300
    write(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"'visual.*q_proj\.bias' holds numbers too large"):
        load_policy(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_every_weight_is_there_and_used(tmp_path, sharded):
    arrays, prefix = tensors(), "visual.importance_scorer"
    del arrays[f"{prefix}.k_proj.bias"]
    arrays[f"{prefix}.q_proj.bias"] = arrays[f"{prefix}.q_proj.bias"][:2]
    arrays[f"{prefix}.v_proj.weight"] = np.ones(3, np.float32)
    path = tmp_path / ("folder" if sharded else "model.safetensors")
    (write_sharded if sharded else write)(path, arrays)
    with pytest.raises(ValueError, match="do not fit their VisionSelectorConfig") as error:
        load_policy(path)
    for line in (
        "missing: key/bias",
        "wrong shape: query/bias is [2], expected [3]",
        f"unused: {prefix}.v_proj.weight",
    ):
        assert line in str(error.value)
    assert str(path) in str(error.value)


def test_a_shard_that_is_gone_is_named(tmp_path):
    write_sharded(tmp_path / "folder", tensors())
    (tmp_path / "folder" / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"not in .*: model-2\.safetensors"):
        load_policy(tmp_path / "folder")


def test_another_checkpoint_is_no_policy(tmp_path):
    others = {"lm_head.weight": tensors()["lm_head.weight"]}
    write(tmp_path / "model.safetensors", others)
    with pytest.raises(ValueError, match="is a folder, expected a policy file"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="is not a policy of format"):
        load_policy(tmp_path / "model.safetensors")


def test_only_the_shards_that_hold_it_come_from_the_hub(tmp_path, monkeypatch):
    arrays = tensors()
    write_sharded(tmp_path / "folder", arrays)
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "cache", monkeypatch) as server:
        server.commit("org/selector", files | {"model-4.safetensors": b"the language model"})
        check(load_policy("org/selector"), arrays)
        asked = {path.rpartition("/")[2] for path in server.asked}
        assert {f"model-{i}.safetensors" for i in range(4)} < asked
        assert not {"model-4.safetensors", "model-5.safetensors"} & asked
