"""Selectors as their authors publish them, in files of the same layout."""

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
    """What the authors' program saves, in bfloat16, and tensors of the model's own."""
    random = np.random.default_rng(0)
    shapes = {"q_proj.weight": (H, D), "q_proj.bias": (H,)}
    shapes |= {"k_proj.weight": (H, D), "k_proj.bias": (H,)}
    made = {f"visual.importance_scorer.{name}": shape for name, shape in shapes.items()}
    made |= {"lm_head.weight": (4, D), "visual.blocks.0.norm1.weight": (D,)}
    return {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in made.items()
    }


def write_sharded(folder, arrays):
    """One tensor a file; one of the model's own is not there, as after a download of the scorer."""
    folder.mkdir()
    testing.write_tensors(folder, arrays)
    to_shards(folder, len(arrays))
    (folder / LANGUAGE_MODEL).unlink()


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
    testing.write_tensors(tmp_path, arrays)
    write_sharded(tmp_path / "sharded", arrays)
    for path in ("model.safetensors", ".", "sharded", "sharded/model.safetensors.index.json"):
        check(load_policy(tmp_path / path), arrays)
        assert policy_file(tmp_path / path).is_file()


def test_of_two_checkpoints_in_a_folder_the_single_file_is_read(tmp_path):
    arrays = tensors()
    older = {name: array + 1 for name, array in arrays.items()}
    write_sharded(tmp_path / "folder", older)
    testing.write_tensors(tmp_path / "folder", arrays)
    check(load_policy(tmp_path / "folder"), arrays)
    check(load_policy(tmp_path / "folder" / "model.safetensors.index.json"), older)


def test_those_for_another_model_are_named_as_not_supported(tmp_path):
    testing.write_tensors(tmp_path, {"model.visual.importance_scorer.q_proj.bias": np.ones(3)})
    (tmp_path / "config.json").write_text('{"model_type": "llavaonevision1_5"}')
    with pytest.raises(ValueError, match="'llavaonevision1_5'; of VisionSelector's weights only"):
        load_policy(tmp_path)


def test_every_weight_is_there_and_used(tmp_path):
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


def test_another_checkpoint_is_no_policy(tmp_path):
    others = {"lm_head.weight": tensors()["lm_head.weight"]}
    testing.write_tensors(tmp_path, others)
    with pytest.raises(FileNotFoundError, match=r"the folder .* has no policy.safetensors"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="is not a policy of format"):
        load_policy(tmp_path / "model.safetensors")


def test_only_the_shards_that_hold_it_come_from_the_hub(tmp_path, monkeypatch):
    arrays = tensors()
    write_sharded(tmp_path / "folder", arrays)
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "cache", monkeypatch) as server:
        server.commit("org/selector", files | {LANGUAGE_MODEL: b"the language model"})
        check(load_policy("org/selector"), arrays)
        asked = {path.rpartition("/")[2] for path in server.asked}
        assert {f"model-{i}.safetensors" for i in range(4)} < asked
        assert not {LANGUAGE_MODEL, "model-5.safetensors"} & asked
