import json
import sys

import jax
import numpy as np
import pytest
import torch

from stepprune_jax import testing
from stepprune_jax.checkpoints import convert, safetensors
from stepprune_jax.checkpoints.load import load_vlm


def _to_pickles(folder, shards):
    """Replaces a folder's safetensors by pickles of the same tensors."""
    entries = list(safetensors.read_folder(folder).items())
    size = -(-len(entries) // shards)
    weight_map = {}
    for number in range(shards):
        file = "pytorch_model.bin"
        if shards > 1:
            file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = dict(entries[number * size : (number + 1) * size])
        tensors = {
            name: torch.tensor(safetensors.read_tensor(entry)).to(torch.bfloat16)
            for name, entry in part.items()
        }
        torch.save(tensors, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    for path in folder.glob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize("shards", [1, 3])
def test_converted_folders_load_like_the_weights_they_held(tmp_path, shards):
    folder = testing.tiny_llava(tmp_path / "source")
    expected = load_vlm(folder, progress=False).params
    _to_pickles(folder, shards)
    with pytest.raises(FileNotFoundError, match=r"checkpoints\.convert"):
        load_vlm(folder, progress=False)
    files = convert.convert(folder, tmp_path / "new", progress=False)
    assert len(files) == shards
    assert not list((tmp_path / "new").glob("pytorch*"))
    got = load_vlm(tmp_path / "new", progress=False).params
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_name_in_two_files_is_refused_before_the_second_is_written(tmp_path):
    folder = testing.tiny_llava(tmp_path / "source")
    _to_pickles(folder, 3)
    first, second, _ = sorted(folder.glob("*.bin"))
    torch.save(torch.load(second) | torch.load(first), second)
    with pytest.raises(ValueError, match=f"both in {first} and in {second}"):
        convert.convert(folder, tmp_path / "new", progress=False)
    assert not list((tmp_path / "new").glob("*00002-of*"))


def test_the_command_converts_and_reports_errors(tmp_path, capsys):
    folder = testing.tiny_llava(tmp_path / "source")
    with pytest.raises(SystemExit, match="2"):  # no pickles
        convert.main([str(folder), str(tmp_path / "new")])
    assert capsys.readouterr().err.count("\n") == 1
    _to_pickles(folder, 1)
    for status in (0, 2):  # the second time it is already there
        with pytest.raises(SystemExit) as end:
            sys.exit(convert.main([str(folder), str(tmp_path / "new")]))
        assert end.value.code == status


class _Spy:
    def __reduce__(self):
        return (print, ("unpickled!",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, capsys):
    torch.save({"w": _Spy()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin could not be read as plain tensors"):
        convert.convert(tmp_path, tmp_path / "new", progress=False)
    assert "unpickled!" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"PK\x03\x04 cut short"])
def test_other_files_are_refused_by_name(tmp_path, value):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(value) if isinstance(value, bytes) else torch.save(value, path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin could not be read"):
        convert.convert(tmp_path, tmp_path / "new", progress=False)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
    with pytest.raises(FileNotFoundError, match=r"gone\.bin"):
        convert.convert(tmp_path, tmp_path / "new", progress=False)


def test_files_from_before_archives_and_shared_tensors_convert(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save(
        {"a": shared, "b": shared.T},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    convert.convert(tmp_path, tmp_path, progress=False)
    entries = safetensors.read_folder(tmp_path)
    np.testing.assert_array_equal(safetensors.read_tensor(entries["b"]), shared.T.numpy())
