"""Files that `torch.save` writes, read without torch and without running any code they name.

Such a file is a zip archive of tensors, which are not compressed, and of a pickle. A pickle names
functions, which Python imports and calls; here the few that torch writes for tensors and dicts
resolve to stand-ins in this module, and any other name is an error.
"""

import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

from stepprune_jax.checkpoints.safetensors import DTYPES, TensorEntry
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import check

_MOST_PICKLE = 1 << 24  # bytes; it has names and shapes alone
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
            check((order is None or archive.read(order) == b"little", "it is big-endian"))
            check((members["data.pkl"].file_size <= _MOST_PICKLE, "its pickle is too long"))
            with archive.open(members["data.pkl"]) as pickled:
                tree = _Unpickler(pickled, path, raw, members).load()
            return _flatten(tree, "")
        except Exception as error:  # a damaged file may raise any kind
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"{path} is not a file of tensors, as torch.save writes it: {reason}"
            raise ValueError(message) from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows tensors and dicts alone."""

    def __init__(self, pickled: Any, path: Path, raw: Any, members: dict[str, zipfile.ZipInfo]):
        super().__init__(pickled)
        self._path, self._raw, self._members = path, raw, members

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module}.{name}"
        check((known in _KNOWN, f"it names {known!r}, which is not loaded: it could run any code"))
        return _KNOWN[known]

    def persistent_load(self, pid: Any) -> TensorEntry:
        """Finds a storage, as a tensor with one axis."""
        _, dtype, key, _, count = pid
        member = self._members[f"data/{key}"]
        check((member.compress_type == zipfile.ZIP_STORED, "a tensor is compressed"))
        self._raw.seek(member.header_offset + _LOCAL_HEADER - 4)
        name, extra = (int.from_bytes(self._raw.read(2), "little") for _ in range(2))
        offset = member.header_offset + _LOCAL_HEADER + name + extra
        storage = TensorEntry(self._path, key, dtype, (count,), offset)
        good = is_count(count, 0) and storage.nbytes <= member.file_size
        good = good and offset + member.file_size <= self._path.stat().st_size
        check((good, f"it has not all of its tensor {key}"))
        return storage


def _tensor(
    storage: TensorEntry, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> TensorEntry:
    """Stands in for torch's function of the same arguments."""
    good = all(is_count(number, 0) for number in (first, *shape))
    good = good and first + math.prod(shape) <= storage.shape[0]
    rows = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    check((good and strides == rows, f"a tensor of shape {shape} is not one piece of its storage"))
    offset = storage.offset + first * storage.dtype.itemsize
    return storage._replace(shape=shape, offset=offset)


_KNOWN = {
    "collections.OrderedDict": _Dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.DoubleStorage": DTYPES["F64"],
    "torch.FloatStorage": DTYPES["F32"],
    "torch.HalfStorage": DTYPES["F16"],
    "torch.BFloat16Storage": DTYPES["BF16"],
    "torch.LongStorage": DTYPES["I64"],  # of positions, which older models store
}


def _flatten(tree: Any, name: str) -> dict[str, TensorEntry]:
    """Returns the tensors of nested dicts by their joined keys."""
    if isinstance(tree, TensorEntry):
        return {name: tree._replace(name=name)}
    check((isinstance(tree, dict), f"{name!r} is a {type(tree).__name__}"))
    parts = [_flatten(part, f"{name}.{key}" if name else str(key)) for key, part in tree.items()]
    return {key: entry for part in parts for key, entry in part.items()}
