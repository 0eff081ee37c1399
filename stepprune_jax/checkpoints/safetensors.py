"""Safetensors files, read slice by slice and written tensor by tensor.

The format is a little-endian 64-bit header length, a JSON header, and the raw tensors. Reading it
here, instead of through the ``safetensors`` package, provides three things the loader needs:
bfloat16 without torch, a slice of a tensor without the rest of it, and reads into private buffers
(not a memory map), so that host memory is limited to what the loader requests.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stepprune_jax.data.json_files import as_object, file_named, parse_json
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, require

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_FLOATING = frozenset(dtype for name, dtype in DTYPES.items() if "F" in name)
# Numbers checked together: as many as fit into a processor's cache.
_PIECE = 1 << 17
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format limits headers to 100 MB; anything longer is a file of another kind.
MAX_HEADER_BYTES = 100_000_000


class TensorEntry(NamedTuple):
    """A tensor of a file; the offset counts bytes from the start of the file."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str | Path) -> dict[str, TensorEntry]:
    """Reads the table of contents of one safetensors file, by tensor name."""
    return read_contents(path)[0]


def read_contents(path: str | Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads the table of contents of one safetensors file, and its free-form metadata.

    Whatever the file holds, every entry returned lies within it, apart from all others.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            pointer = start.startswith(b"version ")
            said = "a Git LFS pointer, run `git lfs pull`" if pointer else "or it is truncated"
            raise UserError(f"{path} is not a safetensors file ({said})")
        raw = file.read(length)
    where = f"{path}: corrupt safetensors header"
    header = as_object(parse_json(raw, where, unique=True), where)
    metadata = as_object(header.pop("__metadata__", {}), where)
    entries = {name: _entry(path, name, info, 8 + length) for name, info in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        apart = not entry.nbytes or entry.offset >= end
        require(apart, f"{where}: {entry.name!r} overlaps another tensor")
        end = max(end, entry.offset + entry.nbytes)
    require(end <= size, f"{path} is truncated: it has {size} of {end} bytes; download it again")
    return entries, {name: str(text) for name, text in metadata.items()}


def _entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    """Converts one record of a header to an entry."""
    try:
        kind, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        entry = TensorEntry(path, name, DTYPES[kind], shape, data_start + begin)
        good = all(is_count(number, 0) for number in (*shape, begin, end))
        good = good and end - begin == entry.nbytes
    except (LookupError, TypeError, ValueError):
        good = False
    if not good:
        raise UserError(
            f"{path}: the header record of {name!r} is corrupt, or its dtype is none of "
            f"{', '.join(DTYPES)}: {str(info)[:200]}"
        )
    return entry


def read_tensor(
    entry: TensorEntry, index: tuple[slice, ...] | None = None, dtype: np.dtype | None = None
) -> np.ndarray:
    """Reads a tensor, or a block of it, into a new array of the file's dtype.

    Only the bytes of the block are read: one read for whole rows, one per row for a block of
    columns. The index has a slice with step 1 per axis; only the first two may be restricted. It is
    an error if a number is NaN, infinite, or too large for `dtype`, to which it will be converted.
    """
    shape = entry.shape
    cuts = [*(index or ()), *[slice(None)] * len(shape)]
    spans = [cut.indices(size)[:2] for cut, size in zip(cuts, shape, strict=False)]
    local = tuple(max(stop - start, 0) for start, stop in spans)
    # Read as bytes: numpy rejects a buffer of the ml_dtypes types.
    buffer = np.empty(math.prod(local) * entry.dtype.itemsize, np.uint8)
    if buffer.size:
        view, position = memoryview(buffer), 0
        with open(entry.path, "rb", buffering=0) as file:
            for start, length in _runs(shape, spans, entry.dtype.itemsize):
                _read_into(file, view[position : position + length], entry, entry.offset + start)
                position += length
    if entry.dtype in _FLOATING:
        _check_finite(buffer, entry, entry.dtype if dtype is None else dtype)
    return buffer.view(entry.dtype).reshape(local)


def _check_finite(bits: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> None:
    """Rejects NaN, infinity and numbers too large for `dtype`, at memory bandwidth.

    Apart from the sign, the bits of floating-point numbers are ordered by magnitude, with infinity
    and NaN after all others.
    """
    kind = np.dtype(f"u{entry.dtype.itemsize}")
    most = np.array(ml_dtypes.finfo(entry.dtype).max, entry.dtype)
    largest = np.array(min(float(most), float(ml_dtypes.finfo(dtype).max)), entry.dtype)
    with np.errstate(over="ignore"):
        fits = np.isfinite(largest.astype(dtype))  # not if it was rounded up
    first = largest.view(kind) + kind.type(fits)
    magnitude = kind.type(np.iinfo(kind).max >> 1)
    bits = bits.view(kind)
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE] & magnitude
        if (worst := piece.max()) >= first:
            finite = worst <= most.view(kind)
            what = f"numbers too large for {dtype}" if finite else "NaN or infinity"
            raise UserError(
                f"{entry.path}: {entry.name!r} holds {what}, expected finite numbers: the "
                "file is damaged, or is the result of a failed run"
            )


def _runs(
    shape: tuple[int, ...], spans: list[tuple[int, int]], itemsize: int
) -> Iterable[tuple[int, int]]:
    """Yields contiguous byte runs (start, length) of a block of a row-major tensor."""
    if not shape:
        return [(0, itemsize)]
    (first, last), row = spans[0], math.prod(shape[1:]) * itemsize
    if len(shape) == 1 or spans[1] == (0, shape[1]):
        return [(first * row, (last - first) * row)]
    cell = math.prod(shape[2:]) * itemsize
    left, right = spans[1]
    return [(i * row + left * cell, (right - left) * cell) for i in range(first, last)]


def _read_into(file: io.FileIO, view: memoryview, entry: TensorEntry, offset: int) -> None:
    """Fills a buffer from a position of a file, which no other thread reads."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if count == 0:
            raise UserError(
                f"{entry.path} is truncated: {entry.name!r} ends at byte "
                f"{entry.offset + entry.nbytes}, the file at {offset + done}"
            )
        done += count


def write_file(
    path: str | Path,
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one safetensors file atomically.

    The tensors are taken one at a time, and have the dtypes and shapes of `specs`, in its order.
    """
    path = Path(path)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in specs.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # aligned data lets other readers map it without a copy
    partial = path.with_name(path.name + ".partial")
    try:
        with file_named(partial), open(partial, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for _, tensor in zip(specs, tensors, strict=True):
                flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
                file.write(memoryview(flat))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def make_empty(folder: Path) -> None:
    """Creates a folder for weights, unless it already holds some."""
    kinds = ("*.safetensors*", "pytorch_model*")
    present = sorted(path.name for kind in kinds for path in folder.glob(kind))
    if present:
        raise FileExistsError(f"{folder} already holds {present[0]}; choose an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
