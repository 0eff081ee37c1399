"""One file of weights, or shards with an index, of either kind."""

import jax
import numpy as np
import pytest
import torch
from shards import to_pickles, write_index

from stepprune_jax import testing
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.weight_files import read_folder


def _write(path, **tensors):
    specs = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write_file(path, specs, tensors.values())


def test_a_folder_with_a_bad_index_is_refused(tmp_path):
    for weight_map in (None, {}, {"a": 5}, {"a": ["b"]}, {"a": "../one.safetensors"}, {"a": ".."}):
        write_index(tmp_path, weight_map)
        with pytest.raises(ValueError, match=r"index\.json: weight_map"):
            read_folder(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    _write(tmp_path / "one.safetensors", a=np.zeros(1, np.float32))
    with pytest.raises(FileNotFoundError, match=r"1 shard\(s\) .* two\.safetensors"):
        read_folder(tmp_path)
    for one, two in (("a", "a"), ("b", "a"), ("c", "b")):  # twice, elsewhere, nowhere
        _write(tmp_path / "one.safetensors", **{one: np.zeros(1, np.float32)})
        _write(tmp_path / "two.safetensors", **{two: np.zeros(1, np.float32)})
        with pytest.raises(ValueError, match=r"index\.json: "):
            read_folder(tmp_path)
    for name, wanted in (("one", "a"), ("two", "b")):  # a tensor that no index names, in both
        tensors = dict.fromkeys((wanted, "c"), np.zeros(1, np.float32))
        _write(tmp_path / f"{name}.safetensors", **tensors)
    with pytest.raises(ValueError, match=r"index\.json: .*'c'"):
        read_folder(tmp_path)


def test_a_link_in_the_folder_may_lead_elsewhere(tmp_path):
    """As in the hub's own folders."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    _write(tmp_path / "blobs" / "1", a=np.zeros(1, np.float32))
    (folder / "one.safetensors").symlink_to("../blobs/1")
    write_index(folder, {"a": "one.safetensors"})
    assert list(read_folder(folder)) == ["a"]


def test_a_folder_without_weights_is_named_with_what_it_should_hold(tmp_path):
    (tmp_path / "consolidated.pth").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"has no weights: .*safetensors.*model\.bin"):
        read_folder(tmp_path)


@pytest.mark.parametrize("count", [1, 3])
def test_pickles_load_like_the_weights_they_held(tmp_path, count):
    folder = testing.tiny_llava(tmp_path)
    expected = load_vlm(folder, progress=False).params
    to_pickles(folder, count)
    assert len(list(folder.glob("*.bin"))) == count
    got = load_vlm(folder, progress=False).params
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_safetensors_come_before_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    _write(tmp_path / "model.safetensors", a=np.zeros(1, np.float32))
    assert list(read_folder(tmp_path)) == ["a"]


def test_the_pickles_of_an_index_hold_each_tensor_once(tmp_path):
    folder = testing.tiny_llava(tmp_path)
    to_pickles(folder, 3)
    first, second, third = sorted(folder.glob("*.bin"))
    torch.save(torch.load(second) | torch.load(first), second)
    with pytest.raises(ValueError, match=r"model\.bin\.index\.json: .* the one place of"):
        load_vlm(folder, progress=False)
    third.unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 shard\(s\) .* {third.name}"):
        load_vlm(folder, progress=False)


class _Spy:
    def __reduce__(self):
        return (print, ("unpickled!",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, capsys):
    torch.save({"w": _Spy()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*print'.* not loaded"):
        read_folder(tmp_path)
    assert "unpickled!" not in capsys.readouterr().out
