"""Reading of weights from one file or from shards with an index, in both formats."""

import shutil

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from shards import to_pickles, write_index

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.weight_files import read_folder

ONE = np.zeros(1, np.float32)


def test_a_folder_with_a_bad_index_is_refused(tmp_path):
    for weight_map in (None, {}, {"a": 5}, {"a": ["b"]}, {"a": "../one.safetensors"}, {"a": ".."}):
        write_index(tmp_path, weight_map)
        with pytest.raises(ValueError, match=r"index\.json: weight_map"):
            read_folder(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": ONE}, tmp_path / "one.safetensors")
    with pytest.raises(FileNotFoundError, match=r"1 shard\(s\) .* two\.safetensors"):
        read_folder(tmp_path)
    # A tensor in two shards, in the wrong shard, in no shard.
    for first, second in (("a", "a"), ("b", "a"), ("c", "b")):
        save_file({first: ONE}, tmp_path / "one.safetensors")
        save_file({second: ONE}, tmp_path / "two.safetensors")
        with pytest.raises(ValueError, match=r"index\.json: "):
            read_folder(tmp_path)
    for file, name in (("one", "a"), ("two", "b")):  # both shards have a tensor outside the index
        save_file({name: ONE, "c": ONE}, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match=r"index\.json: .*'c'"):
        read_folder(tmp_path)


def test_shards_may_be_links_out_of_the_folder_as_in_the_hubs_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save_file({"a": ONE}, tmp_path / "blobs" / "1")
    (folder / "one.safetensors").symlink_to("../blobs/1")
    write_index(folder, {"a": "one.safetensors"})
    assert list(read_folder(folder)) == ["a"]


@pytest.mark.parametrize("count", [1, 3])
def test_pickles_load_like_the_weights_they_held(tmp_path, llava_folder, count):
    folder = shutil.copytree(llava_folder, tmp_path / "model")
    to_pickles(folder, count)
    assert len(list(folder.glob("*.bin"))) == count
    params, expected = (load_vlm(path, progress=False).params for path in (folder, llava_folder))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_of_several_weight_files_the_one_that_transformers_reads_is_read(tmp_path):
    """Each file that this test adds takes precedence over all earlier ones."""
    ignored_names = ("consolidated", "adapter_model", "model.fp16", "model-00001-of-00001")
    (tmp_path / "consolidated.pth").write_bytes(b"")
    for name in ignored_names:
        save_file({name: ONE}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has no weights: .*safetensors.*model\.bin"):
        read_folder(tmp_path)
    write_index(tmp_path, {"shard": "lost.bin"}, "pytorch_model.bin.index.json")
    with pytest.raises(FileNotFoundError, match=r"1 shard\(s\) .* lost\.bin"):
        read_folder(tmp_path)
    torch.save({"pickle": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(read_folder(tmp_path)) == ["pickle"]
    shard = ignored_names[-1]
    write_index(tmp_path, {shard: f"{shard}.safetensors"})
    assert list(read_folder(tmp_path)) == [shard]
    save_file({"single": ONE}, tmp_path / "model.safetensors")
    assert list(read_folder(tmp_path)) == ["single"]
    write_index(tmp_path, {"a": "lost.safetensors"})
    assert list(read_folder(tmp_path)) == ["single"]


class _Spy:
    def __reduce__(self):
        return (print, ("unpickled!",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, capsys):
    torch.save({"w": _Spy()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*print'.* not loaded"):
        read_folder(tmp_path)
    assert "unpickled!" not in capsys.readouterr().out
