"""Files that `torch.save` writes, read without torch and without running any code they name.

Such a file is a zip archive of tensors, which are not compressed, and of a pickle. A pickle names
functions, which Python imports and calls; here the few that torch writes for tensors and dicts
resolve to stand-ins in this module, and any other name is an error. As a pickle may also set the
state of what it has been given, that is never an object that others use.
"""

import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from stepprune_jax.checkpoints.safetensors import DTYPES, TensorEntry
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, require

_MOST_PICKLE = 1 << 24  # bytes; it has names and shapes alone
_MOST_NAME = 1000  # characters
_MOST_AXES = 32
_LOCAL_HEADER = 30  # bytes of a member in front of its name


class _Dict(dict):
    """Stands in for `OrderedDict`, without the attributes that modules of torch give theirs."""

    def __setstate__(self, _: Any) -> None:
        pass


def read_tensors(path: Path) -> dict[str, TensorEntry]:
    """Reads the table of contents of a file of nested dicts of tensors.

    Args:
        path: the file.

    Returns:
        The tensors by name, which joins the keys by dots; `safetensors.read_tensor` reads them.

    Raises:
        ValueError: a file of another kind, or one that is damaged or holds anything else.
    """
    with path.open("rb") as raw:
        try:
            archive = zipfile.ZipFile(raw)
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            order = members.get("byteorder")
            little = order is None or (order.file_size == 6 and archive.read(order) == b"little")
            require(little, "it is big-endian")
            require(members["data.pkl"].file_size <= _MOST_PICKLE, "its pickle is too long")
            data = archive.read(members["data.pkl"])
            for opcode, number, _ in pickletools.genops(data):  # of the memo, which is an array
                require("PUT" not in opcode.name or number <= len(data), "its pickle is damaged")
            return _flatten(_Unpickler(data, path, raw, members).load(), "", set())
        except Exception as error:  # a damaged file may raise any kind
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"{path} is not a file of tensors, as torch.save writes it: {reason}"
            raise UserError(message) from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows tensors and dicts alone."""

    def __init__(self, data: bytes, path: Path, raw: Any, members: dict[str, zipfile.ZipInfo]):
        super().__init__(io.BytesIO(data))
        self._path, self._raw, self._members = path, raw, members

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module}.{name}"
        require(known in _KNOWN, f"it names {known!r}, which is not loaded: it could run any code")
        # A function of its own for each time it is named.
        return _KNOWN[known] or (lambda *values: _tensor(*values))

    def persistent_load(self, pid: Any) -> TensorEntry:
        """Finds a storage, as a tensor with one axis."""
        _, kind, key, _, count = pid
        member = self._members[f"data/{key}"]
        require(member.compress_type == zipfile.ZIP_STORED, "a tensor is compressed")
        self._raw.seek(member.header_offset + _LOCAL_HEADER - 4)
        name, extra = (int.from_bytes(self._raw.read(2), "little") for _ in range(2))
        offset = member.header_offset + _LOCAL_HEADER + name + extra
        storage = TensorEntry(self._path, key, DTYPES[kind], (count,), offset)
        good = is_count(count, 0) and storage.nbytes <= member.file_size
        good = good and offset + member.file_size <= self._path.stat().st_size
        require(good, f"it has not all of its tensor {key}")
        return storage


def _tensor(
    storage: TensorEntry, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> TensorEntry:
    """Stands in for torch's function of the same arguments."""
    require(len(shape) <= _MOST_AXES, "a tensor has too many axes")
    good = all(is_count(number, 0) for number in (first, *shape))
    good = good and first + math.prod(shape) <= storage.shape[0]
    rows = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    moved = any(n > 1 and a != b for n, a, b in zip(shape, strides, rows, strict=True))
    good = good and (0 in shape or not moved)
    require(good, f"a tensor of shape {shape} is not one piece of its storage")
    offset = storage.offset + first * storage.dtype.itemsize
    return storage._replace(shape=shape, offset=offset)


_KNOWN = {
    "collections.OrderedDict": _Dict,
    "torch._utils._rebuild_tensor_v2": None,  # `_tensor`
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",  # older models store positions so
}


def _flatten(tree: Any, name: str, seen: set[int]) -> dict[str, TensorEntry]:
    """Returns the tensors of nested dicts, each of them met once, by their joined keys."""
    require(len(name) <= _MOST_NAME, "a name is too long")
    if isinstance(tree, TensorEntry):
        return {name: tree._replace(name=name)}
    require(isinstance(tree, dict), f"{name!r} is a {type(tree).__name__}")
    require(id(tree) not in seen, f"{name!r} is another of its dicts")
    seen.add(id(tree))
    named = [(f"{name}.{key}" if name else str(key), part) for key, part in tree.items()]
    parts = [_flatten(part, name, seen) for name, part in named]
    return {key: entry for part in parts for key, entry in part.items()}
