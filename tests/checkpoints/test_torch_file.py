"""Files of torch.save beside torch, and files that are not."""

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


def test_tensors_of_every_kind_equal_those_of_torch(tmp_path):
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
    tree = {str(kind): 9 * torch.randn(3, 4).to(kind) for kind in kinds}
    tree["module"] = torch.nn.Linear(2, 3).state_dict()  # which has attributes of its own
    whole = torch.randn(6, 2)
    tree |= {"part": whole[2:5], "empty": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    tree |= {"column": whole[:1].T, "none": torch.zeros(5, 0).T}  # other strides, the same order
    tree["parameter"] = torch.nn.Parameter(whole).data
    torch.save(tree, tmp_path / "x.pt")
    found = read_tensors(tmp_path / "x.pt")
    module = {f"module.{name}": leaf for name, leaf in tree.pop("module").items()}
    flat = tree | module
    assert found.keys() == flat.keys()
    for name, tensor in flat.items():
        ours = read_tensor(found[name])
        assert ours.shape == tuple(tensor.shape) and ours.dtype.itemsize == tensor.itemsize
        np.testing.assert_array_equal(np.float64(ours), tensor.double().numpy(), err_msg=name)


class Command:
    def __reduce__(self):
        return os.system, ("exit 3",)


def archive(tree=None, compression=STORED, **members):
    """A file as torch writes it, of any pickle and members."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", compression) as file:
        if tree is not None:
            file.writestr("x/data.pkl", pickle.dumps(tree, protocol=2))
        for name, value in members.items():
            file.writestr(f"x/{name}", value)
    return raw.getvalue()


def members_of(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def saved(tree, **how):
    raw = io.BytesIO()
    torch.save(tree, raw, **how)
    return raw.getvalue()


def pickled(body):
    """A file with a pickle of protocol 2, written by hand."""
    return archive(**{"data.pkl": b"\x80\x02" + body})


def state_of(name, state):
    """A pickle that names an object, sets its state, and is an empty dict."""
    return pickled(b"c" + name + b"\n" + pickle.dumps(state, 2)[2:-1] + b"b0}.")


VALUES = {"a": torch.arange(1000.0)}
TWICE = {"a": {}}
for _ in range(60):
    TWICE = {"a": TWICE, "b": TWICE}


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
        # What would take memory or time without end, or change what other code uses.
        (pickled(b"}r\xff\xff\xff\x7f."), "its pickle is damaged"),
        (archive(TWICE), "'a.* is another of its dicts"),
        (archive({"a" * 2000: {}}), "a name is too long"),
        (saved({"a": torch.zeros([1] * 40)}), "too many axes"),
        (archive({}, byteorder=b"little" * 100), "big-endian"),
    ],
)
def test_anything_else_is_refused(tmp_path, content, message):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_tensors(path)
    assert str(path) in str(error.value)


def test_a_storage_lies_within_the_file(tmp_path):
    """Its claimed size, and the place of a tensor in it, are checked."""
    path, members = tmp_path / "x.pt", members_of(saved({"a": torch.zeros(5)}))
    content = members["data.pkl"]
    assert content.count(b"K\x05") == 2  # the storage's numbers, and the tensor's
    for number in (b"M\x00\x02", b"K\x06"):  # 512 and 6 in place of 5
        path.write_bytes(archive(**members | {"data.pkl": content.replace(b"K\x05", number)}))
        with pytest.raises(ValueError, match="it has not all of its tensor 0"):
            read_tensors(path)
    storage, _, rest = content.rpartition(b"K\x05")  # the tensor alone is larger
    path.write_bytes(archive(**members | {"data.pkl": storage + b"K\x06" + rest}))
    with pytest.raises(ValueError, match=r"shape \(6,\) is not one piece of its storage"):
        read_tensors(path)


def test_a_pickle_changes_no_object_of_others(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(state_of(b"torch._utils\n_rebuild_tensor_v2", (None, {"__defaults__": (1,)})))
    assert read_tensors(path) == {}
    assert torch_file._tensor.__defaults__ is None
    state = (3, ">", None, None, None, 2, 1, 63)  # of a dtype, with another byte order and flags
    path.write_bytes(state_of(b"torch\nBFloat16Storage", state))
    with pytest.raises(ValueError, match="is not a file of tensors"):
        read_tensors(path)
    assert DTYPES["BF16"].byteorder == "=" and not DTYPES["BF16"].hasobject
