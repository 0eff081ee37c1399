"""Reading of files of `torch.save`, compared with torch, and refusal of malicious files."""

import collections
import io
import os
import pickle
import zipfile
from zipfile import ZIP_DEFLATED as DEFLATED
from zipfile import ZIP_STORED as STORED

import numpy as np
import pytest
import torch

from stepprune_jax.checkpoints import torch_file
from stepprune_jax.checkpoints.safetensors import DTYPES, read_tensor
from stepprune_jax.checkpoints.torch_file import read_tensors


def test_tensors_of_all_dtypes_and_layouts_are_read_as_by_torch(tmp_path):
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
    tree = {str(dtype): 9 * torch.randn(3, 4).to(dtype) for dtype in dtypes}
    tree["module"] = torch.nn.Linear(2, 3).state_dict()  # a dict with attributes
    base = torch.randn(6, 2)
    tree |= {"slice": base[2:5], "empty": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    # Transposed tensors whose numbers are still in row-major order.
    tree |= {"column": base[:1].T, "empty column": torch.zeros(5, 0).T}
    tree["parameter"] = torch.nn.Parameter(base).data
    torch.save(tree, tmp_path / "x.pt")
    entries = read_tensors(tmp_path / "x.pt")
    module = {f"module.{name}": leaf for name, leaf in tree.pop("module").items()}
    tensors = tree | module
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        array = read_tensor(entries[name])
        assert array.shape == tuple(tensor.shape) and array.dtype.itemsize == tensor.itemsize
        np.testing.assert_array_equal(np.float64(array), tensor.double().numpy(), err_msg=name)


class Command:
    def __reduce__(self):
        return os.system, ("exit 3",)


def archive(tree=None, compression=STORED, **members):
    """Returns the bytes of an archive as torch writes it, with any pickle and members."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", compression) as file:
        if tree is not None:
            file.writestr("x/data.pkl", pickle.dumps(tree, protocol=2))
        for name, value in members.items():
            file.writestr(f"x/{name}", value)
    return raw.getvalue()


def members_of(raw):
    """Returns the members of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def saved(tree, **options):
    """Returns the bytes of a file of `torch.save`."""
    raw = io.BytesIO()
    torch.save(tree, raw, **options)
    return raw.getvalue()


def pickled(body):
    """Returns an archive whose pickle of protocol 2 has these opcodes."""
    return archive(**{"data.pkl": b"\x80\x02" + body})


def state_of(name, state):
    """Returns an archive whose pickle sets the state of a named object, and holds an empty dict."""
    return pickled(b"c" + name + b"\n" + pickle.dumps(state, 2)[2:-1] + b"b0}.")


VALUES = {"a": torch.arange(1000.0)}
# 60 shared dicts, which describe a tree of 2**60 leaves.
SHARED = {"a": {}}
for _ in range(60):
    SHARED = {"a": SHARED, "b": SHARED}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "is not a file of tensors.*zip"),
        (archive(), "data.pkl"),
        (archive({"a": Command()}), "names 'posix.system', which is not loaded"),
        (archive({"a": [1]}), "'a' is a list"),
        (archive(collections.OrderedDict(a=torch.Size([2]))), "names 'torch.Size'"),
        (archive({}, byteorder=b"big"), "big-endian"),
        (saved({"a": torch.tensor([True])}), "names 'torch.BoolStorage'"),
        (saved({"a": torch.zeros(2, 3).T}), r"shape \(3, 2\) is not one piece"),
        (saved(VALUES, _use_new_zipfile_serialization=False), "is not a file of tensors"),
        (saved(VALUES)[:-2000], "is not a file of tensors"),
        (archive(None, DEFLATED, **members_of(saved(VALUES))), "a tensor is compressed"),
        # Files that would exhaust memory or time.
        (pickled(b"}r\xff\xff\xff\x7f."), "its pickle is damaged"),
        (archive(SHARED), "the dict 'a.*' occurs twice"),
        (archive({"a" * 2000: {}}), "a name is too long"),
        (saved({"a": torch.zeros([1] * 40)}), "too many axes"),
        (archive({}, byteorder=b"little" * 100), "big-endian"),
    ],
)
def test_other_files_and_other_objects_are_refused(tmp_path, content, message):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_tensors(path)
    assert str(path) in str(error.value)


def test_storages_and_tensors_must_lie_inside_the_file(tmp_path):
    path, members = tmp_path / "x.pt", members_of(saved({"a": torch.zeros(5)}))
    content = members["data.pkl"]
    assert content.count(b"K\x05") == 2  # the sizes of the storage and of the tensor
    for number in (b"M\x00\x02", b"K\x06"):  # 512 and 6 in place of 5
        path.write_bytes(archive(**members | {"data.pkl": content.replace(b"K\x05", number)}))
        with pytest.raises(ValueError, match="tensor 0 is truncated"):
            read_tensors(path)
    start, _, end = content.rpartition(b"K\x05")  # only the tensor becomes larger
    path.write_bytes(archive(**members | {"data.pkl": start + b"K\x06" + end}))
    with pytest.raises(ValueError, match=r"shape \(6,\) is not one piece of its storage"):
        read_tensors(path)


def test_a_pickle_cannot_change_objects_of_other_code(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(state_of(b"torch._utils\n_rebuild_tensor_v2", (None, {"__defaults__": (1,)})))
    assert read_tensors(path) == {}
    assert torch_file._rebuild_tensor.__defaults__ is None
    state = (3, ">", None, None, None, 2, 1, 63)  # state of a dtype with another byte order
    path.write_bytes(state_of(b"torch\nBFloat16Storage", state))
    with pytest.raises(ValueError, match="is not a file of tensors"):
        read_tensors(path)
    assert DTYPES["BF16"].byteorder == "=" and not DTYPES["BF16"].hasobject
