"""Reads safetensors files slice by slice, and writes them tensor by tensor.

The format is a little-endian 64-bit header length, a JSON header, and the raw tensors. This module
replaces the ``safetensors`` package because the loader needs three things: bfloat16 without torch,
single slices of a tensor, and reads into private buffers. A memory map would let host memory grow
beyond the bytes that the loader requests.
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
from stepprune_jax.user_input import UserError

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
# Numbers that `_check_finite` compares at once: 256 to 512 KiB, which stay in a core's L2 cache.
_CHECKED_NUMBERS = 1 << 17
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format limits headers to 100 MB; anything longer is a file of another kind.
MAX_HEADER_BYTES = 100_000_000


class TensorEntry(NamedTuple):
    """Location of a tensor in a file, without its numbers.

    Attributes:
        path: the file.
        name: name of the tensor in the file.
        dtype: dtype in the file.
        shape: shape in the file.
        offset: position of the first number, in bytes from the start of the file.
    """

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str | Path) -> dict[str, TensorEntry]:
    """Reads the location of every tensor in one safetensors file, by name."""
    return read_contents(path)[0]


def read_contents(path: str | Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads the header of one safetensors file.

    Args:
        path: the file.

    Returns:
        The entries of its tensors by name, and its free-form metadata. Every entry lies inside the
        file, and no two entries overlap.

    Raises:
        ValueError: the file has another format or is damaged.
    """
    path = Path(path)
    file_size = path.stat().st_size
    with open(path, "rb") as file:
        length_bytes = file.read(8)
        length = int.from_bytes(length_bytes, "little")
        if len(length_bytes) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
            is_pointer = length_bytes.startswith(b"version ")
            reason = "a Git LFS pointer, run `git lfs pull`" if is_pointer else "or it is truncated"
            raise UserError(f"{path} is not a safetensors file ({reason})")
        header_bytes = file.read(length)
    place = f"{path}: corrupt safetensors header"
    header = as_object(parse_json(header_bytes, place, unique=True), place)
    metadata = as_object(header.pop("__metadata__", {}), place)
    data_start = 8 + length
    entries = {
        name: _parse_entry(path, name, record, data_start) for name, record in header.items()
    }
    last_stop = data_start  # position after the last byte of all tensors before `entry`
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.nbytes and entry.offset < last_stop:
            raise UserError(f"{place}: {entry.name!r} overlaps another tensor")
        last_stop = max(last_stop, entry.offset + entry.nbytes)
    if last_stop > file_size:
        raise UserError(
            f"{path} is truncated: it has {file_size} of {last_stop} bytes; download it again"
        )
    return entries, {name: str(text) for name, text in metadata.items()}


def _parse_entry(path: Path, name: str, record: Any, data_start: int) -> TensorEntry:
    """Converts one record of a header to an entry.

    Args:
        path: the file.
        name: name of the tensor.
        record: a dict of "dtype", "shape" and "data_offsets", or any value if it is corrupt.
        data_start: number of bytes in the file before the data of the tensors.

    Raises:
        ValueError: the record is corrupt.
    """
    entry = None
    try:
        dtype, shape = DTYPES[record["dtype"]], tuple(record["shape"])
        start, stop = record["data_offsets"]  # relative to `data_start`
        entry = TensorEntry(path, name, dtype, shape, data_start + start)
        are_counts = all(is_count(number, 0) for number in (*shape, start, stop))
        is_valid = are_counts and stop - start == entry.nbytes
    except (LookupError, TypeError, ValueError):
        is_valid = False
    if entry is None or not is_valid:
        raise UserError(
            f"{path}: the header record of {name!r} is corrupt, or its dtype is none of "
            f"{', '.join(DTYPES)}: {str(record)[:200]}"
        )
    return entry


def read_tensor(
    entry: TensorEntry, index: tuple[slice, ...] | None = None, dtype: np.dtype | None = None
) -> np.ndarray:
    """Reads a tensor or a block of a tensor.

    Only the bytes of the block are read. Complete rows take one read. A block of columns takes one
    read per row.

    Args:
        entry: location of the tensor.
        index: one slice per axis with step 1, or None for the complete tensor. Only the first two
            axes may be restricted.
        dtype: dtype that the caller will convert the numbers to. It is only used to check that the
            numbers fit. None checks for NaN and infinity only.

    Returns:
        A new array of the file's dtype.

    Raises:
        ValueError: a number is NaN, infinite or too large for `dtype`, or the file is truncated.
    """
    shape = entry.shape
    slices = [*(index or ()), *[slice(None)] * len(shape)]
    sized_slices = zip(slices, shape, strict=False)  # `slices` may be longer than `shape`
    spans = [axis_slice.indices(size)[:2] for axis_slice, size in sized_slices]
    block_shape = tuple(max(stop - start, 0) for start, stop in spans)
    # The buffer has bytes because numpy rejects a buffer of the ml_dtypes types.
    buffer = np.empty(math.prod(block_shape) * entry.dtype.itemsize, np.uint8)
    if buffer.size:
        view, position = buffer.data, 0
        with open(entry.path, "rb", buffering=0) as file:
            for start, length in _byte_runs(shape, spans, entry.dtype.itemsize):
                _read_into(file, view[position : position + length], entry, entry.offset + start)
                position += length
    if entry.dtype in _FLOATING:
        _check_finite(buffer, entry, entry.dtype if dtype is None else dtype)
    return buffer.view(entry.dtype).reshape(block_shape)


def _check_finite(buffer: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> None:
    """Raises an error about NaN, infinity and numbers too large for `dtype`, at memory bandwidth.

    The magnitudes of floating-point numbers have the same order as their bits without the sign bit,
    read as an integer. Infinity and NaN come after all finite numbers in this order. One integer
    comparison per number is therefore enough.

    Args:
        buffer: bytes of the numbers, uint8.
        entry: the tensor, which has the dtype of the numbers.
        dtype: dtype that the numbers will be converted to.

    Raises:
        ValueError: a number is NaN, infinite or too large.
    """
    bits_dtype = np.dtype(f"u{entry.dtype.itemsize}")
    largest_stored = np.array(ml_dtypes.finfo(entry.dtype).max, entry.dtype)
    dtype_limit = float(ml_dtypes.finfo(dtype).max)
    limit = np.array(min(float(largest_stored), dtype_limit), entry.dtype)
    with np.errstate(over="ignore"):
        # False if the limit was rounded up to a number that `dtype` cannot hold.
        is_limit_allowed = np.isfinite(limit.astype(dtype))
    smallest_invalid = limit.view(bits_dtype) + bits_dtype.type(is_limit_allowed)
    magnitude_mask = bits_dtype.type(np.iinfo(bits_dtype).max >> 1)
    bits = buffer.view(bits_dtype)
    for start in range(0, bits.size, _CHECKED_NUMBERS):
        magnitudes = bits[start : start + _CHECKED_NUMBERS] & magnitude_mask
        if (largest := magnitudes.max()) >= smallest_invalid:
            is_finite = largest <= largest_stored.view(bits_dtype)
            problem = f"numbers too large for {dtype}" if is_finite else "NaN or infinity"
            raise UserError(
                f"{entry.path}: {entry.name!r} holds {problem}, expected finite numbers: the "
                "file is damaged, or is the result of a failed run"
            )


def _byte_runs(
    shape: tuple[int, ...], spans: list[tuple[int, int]], itemsize: int
) -> list[tuple[int, int]]:
    """Returns the runs of consecutive bytes that a block of a row-major tensor consists of.

    Args:
        shape: shape of the tensor.
        spans: start and stop index per axis. Axes from the third on must be complete.
        itemsize: bytes of a number.

    Returns:
        Pairs (start, length) in bytes, relative to the start of the tensor.
    """
    if not shape:
        return [(0, itemsize)]
    row_start, row_stop = spans[0]
    row_bytes = math.prod(shape[1:]) * itemsize
    if len(shape) == 1 or spans[1] == (0, shape[1]):  # complete rows are consecutive
        return [(row_start * row_bytes, (row_stop - row_start) * row_bytes)]
    column_start, column_stop = spans[1]
    column_bytes = math.prod(shape[2:]) * itemsize
    length = (column_stop - column_start) * column_bytes
    return [
        (row * row_bytes + column_start * column_bytes, length)
        for row in range(row_start, row_stop)
    ]


def _read_into(file: io.FileIO, view: memoryview, entry: TensorEntry, offset: int) -> None:
    """Fills a buffer with consecutive bytes of a file.

    Args:
        file: the open file. No other thread may use it, because its position changes.
        view: the buffer.
        entry: the tensor that contains the bytes, for messages.
        offset: position of the first byte in the file.

    Raises:
        ValueError: the file ends before the buffer is full.
    """
    file.seek(offset)
    num_read = 0
    while num_read < len(view):
        num_new = file.readinto(view[num_read:])  # may be less than requested
        if num_new == 0:
            raise UserError(
                f"{entry.path} is truncated: {entry.name!r} ends at byte "
                f"{entry.offset + entry.nbytes}, the file at {offset + num_read}"
            )
        num_read += num_new


def write_file(
    path: str | Path,
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one safetensors file atomically.

    Args:
        path: the file.
        specs: dtype and shape of each tensor, by name.
        tensors: the tensors in the order of `specs`. With a generator, only one tensor is in memory
            at a time.
        metadata: free-form text entries of the header.
    """
    path = Path(path)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    stop = 0
    for name, (dtype, shape) in specs.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    # Padding aligns the data to 8 bytes, so other readers can map the file without a copy.
    header_bytes += b" " * (-len(header_bytes) % 8)
    temporary_path = path.with_name(path.name + ".partial")
    try:
        with file_named(temporary_path), open(temporary_path, "wb") as file:
            file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
            for _, tensor in zip(specs, tensors, strict=True):
                flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
                file.write(flat.data)
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def make_empty(folder: Path) -> None:
    """Creates a folder for weights.

    Raises:
        FileExistsError: the folder already holds weights.
    """
    patterns = ("*.safetensors*", "pytorch_model*")
    names = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if names:
        raise FileExistsError(f"{folder} already holds {names[0]}; choose an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
