"""Reads files of `torch.save` without torch and without running code that they name.

Such a file is a zip archive of uncompressed tensors and a pickle. A pickle names Python functions
that a normal unpickler imports and calls. This module replaces the few functions that torch writes
for tensors and dicts, and refuses all other names. A pickle may also set attributes of any object
that it receives, so every object handed to it is new and used nowhere else.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stepprune_jax.checkpoints.safetensors import DTYPES, TensorEntry
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError

# A pickle holds names and shapes only, so 16 MiB are enough for any checkpoint.
_MAX_PICKLE_BYTES = 1 << 24
# Joined keys and axes of real models stay far below these. The limits bound the work on a file
# that was made to exhaust memory.
_MAX_NAME_LENGTH = 1000
_MAX_AXES = 32
# Size of a zip member's local header before the member's name.
_LOCAL_HEADER_BYTES = 30


class _Dict(dict):
    """Replaces `OrderedDict`. Ignores the attributes that torch modules store on their dicts."""

    def __setstate__(self, _: Any) -> None:
        pass


def read_tensors(path: Path) -> dict[str, TensorEntry]:
    """Reads the location of every tensor in a file of nested dicts of tensors.

    Args:
        path: the file.

    Returns:
        Entries by name, with the keys of nested dicts joined by dots. `safetensors.read_tensor`
        reads their numbers.

    Raises:
        ValueError: the file has another format, is damaged, or holds other objects than tensors.
    """
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            _check_byte_order(archive, members.get("byteorder"))
            if members["data.pkl"].file_size > _MAX_PICKLE_BYTES:
                raise UserError("its pickle is too long")
            data = archive.read(members["data.pkl"])
            # The argument of PUT is an index into an array that the unpickler allocates.
            for opcode, argument, _ in pickletools.genops(data):
                if "PUT" in opcode.name and isinstance(argument, int) and argument > len(data):
                    raise UserError("its pickle is damaged")
            tree = _Unpickler(data, path, file, members).load()
            return _flatten(tree, "", set())
        except Exception as error:  # a damaged file may raise any type of error
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"{path} is not a file of tensors, as torch.save writes it: {reason}"
            raise UserError(message) from error


def _check_byte_order(archive: zipfile.ZipFile, member: zipfile.ZipInfo | None) -> None:
    """Refuses a big-endian file. Older files have no such member and are little-endian."""
    if member is None:
        return
    if member.file_size != len(b"little") or archive.read(member) != b"little":
        raise UserError("it is big-endian")


class _Unpickler(pickle.Unpickler):
    """An unpickler that builds only dicts and `TensorEntry` values."""

    def __init__(
        self, data: bytes, path: Path, file: BinaryIO, members: Mapping[str, zipfile.ZipInfo]
    ):
        super().__init__(io.BytesIO(data))
        self._path, self._file, self._members = path, file, members

    def find_class(self, module: str, name: str) -> Any:
        """Returns the replacement of a function or type that the pickle names."""
        full_name = f"{module}.{name}"
        if full_name not in _REPLACEMENTS:
            raise UserError(f"it names {full_name!r}, which is not loaded: it could run any code")
        return _REPLACEMENTS[full_name]()

    def persistent_load(self, pid: Any) -> TensorEntry:
        """Locates a storage. A storage is a flat array, and tensors are views of it.

        Args:
            pid: the pickle's description of a storage: the word "storage", the dtype's name from
                `_REPLACEMENTS`, the name of the zip member in the folder data/, a device, and the
                number of elements.

        Returns:
            The entry of the storage, with one axis.

        Raises:
            ValueError: the storage is compressed or truncated.
        """
        _, dtype_name, key, _, size = pid
        member = self._members[f"data/{key}"]
        if member.compress_type != zipfile.ZIP_STORED:
            raise UserError("a tensor is compressed")
        # The last four bytes of the local header are the lengths of the name and an extra field.
        self._file.seek(member.header_offset + _LOCAL_HEADER_BYTES - 4)
        name_length, extra_length = (int.from_bytes(self._file.read(2), "little") for _ in range(2))
        offset = member.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length
        storage = TensorEntry(self._path, key, DTYPES[dtype_name], (size,), offset)
        is_complete = (
            is_count(size, 0)
            and storage.nbytes <= member.file_size
            and offset + member.file_size <= self._path.stat().st_size
        )
        if not is_complete:
            raise UserError(f"tensor {key} is truncated")
        return storage


def _rebuild_tensor(
    storage: TensorEntry, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> TensorEntry:
    """Replaces `torch._utils._rebuild_tensor_v2`: locates a tensor in its storage.

    Args:
        storage: entry of the storage, with one axis.
        start: index of the tensor's first number in the storage.
        shape: shape of the tensor.
        strides: stride of each axis, in numbers. Only row-major tensors are supported.

    Returns:
        The entry of the tensor, without a name.
    """
    if len(shape) > _MAX_AXES:
        raise UserError("a tensor has too many axes")
    is_inside = all(is_count(number, 0) for number in (start, *shape))
    is_inside = is_inside and start + math.prod(shape) <= storage.shape[0]
    row_major_strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # The stride of an axis of size 1 has no effect, so any value is accepted.
    is_row_major = 0 in shape or all(
        size <= 1 or stride == row_major_stride
        for size, stride, row_major_stride in zip(shape, strides, row_major_strides, strict=True)
    )
    if not (is_inside and is_row_major):
        raise UserError(f"a tensor of shape {shape} is not one piece of its storage")
    offset = storage.offset + start * storage.dtype.itemsize
    return storage._replace(shape=shape, offset=offset)


# Builders of replacements, by the names in a pickle. A builder returns a new function each time,
# because a pickle may set attributes of a function.
_REPLACEMENTS: dict[str, Callable[[], Any]] = {
    "collections.OrderedDict": lambda: _Dict,
    "torch._utils._rebuild_tensor_v2": lambda: lambda *values: _rebuild_tensor(*values),
    "torch.DoubleStorage": lambda: "F64",
    "torch.FloatStorage": lambda: "F32",
    "torch.HalfStorage": lambda: "F16",
    "torch.BFloat16Storage": lambda: "BF16",
    "torch.LongStorage": lambda: "I64",  # position ids of older models
}


def _flatten(tree: Any, prefix: str, visited: set[int]) -> dict[str, TensorEntry]:
    """Returns the tensors of nested dicts by name. A name is the keys joined by dots.

    Args:
        tree: a tensor's entry, or a dict of trees.
        prefix: joined keys that lead to `tree`; "" for the root.
        visited: ids of the dicts that were already flattened. A dict may occur only once, because
            a small pickle could otherwise describe an endless tree.
    """
    if len(prefix) > _MAX_NAME_LENGTH:
        raise UserError("a name is too long")
    if isinstance(tree, TensorEntry):
        return {prefix: tree._replace(name=prefix)}
    if not isinstance(tree, dict):
        raise UserError(f"{prefix!r} is a {type(tree).__name__}, expected a tensor or a dict")
    if id(tree) in visited:
        raise UserError(f"the dict {prefix!r} occurs twice")
    visited.add(id(tree))
    tensors: dict[str, TensorEntry] = {}
    for key, child in tree.items():
        tensors |= _flatten(child, f"{prefix}.{key}" if prefix else str(key), visited)
    return tensors
