"""Safetensors files, read slice by slice and written tensor by tensor.

The format is a little-endian 64-bit header length, a JSON header, and the raw tensors. Reading it
here, instead of through the ``safetensors`` package, provides three things the loader needs:
bfloat16 without torch, a slice of a tensor without the rest of it, and reads into private buffers
(not a memory map), so that host memory is limited to what the loader requests.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stepprune_jax.data.json_files import as_object, file_named, parse_json, read_json_object
from stepprune_jax.settings import is_count

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
    """Location of a tensor.

    Attributes:
        path: the file.
        name: the tensor's name in that file.
        dtype: its numpy dtype (bfloat16 and float8 from ``ml_dtypes``).
        shape: its shape.
        offset: byte at which it starts, counted from the start of the file.
    """

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
    """Reads the table of contents of one safetensors file.

    Args:
        path: the file.

    Returns:
        A dict from tensor name to entry.

    Raises:
        ValueError: the file is not a safetensors file, is truncated, or its header contradicts
            itself. The message names the file and, if possible, the tensor.
    """
    return read_contents(path)[0]


def read_contents(path: str | Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads the table of contents and the free-form metadata of one safetensors file.

    Args:
        path: the file.

    Returns:
        A dict from tensor name to entry, and the metadata, empty if there is none.

    Raises:
        ValueError: as `read_header`.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file (corrupt or truncated header)")
        raw = file.read(length)
    if len(raw) < length:
        raise ValueError(f"{path} is truncated: its header needs {8 + length} bytes, it has {size}")
    where = f"{path}: corrupt safetensors header"
    header = as_object(parse_json(raw, where, unique=True), where)
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(text, str) for text in as_object(metadata, where).values()):
        raise ValueError(f"{where}: __metadata__ holds values other than strings")
    entries = {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    _check_apart(entries.values())
    return entries, metadata


def _entry(path: Path, name: str, info: Any, data_start: int, file_size: int) -> TensorEntry:
    """Checks one header record and converts it to an entry."""
    try:
        dtype = DTYPES.get(info["dtype"])
        shape, (begin, end) = tuple(info["shape"]), info["data_offsets"]
        whole = all(is_count(number, 0) for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: the header record of {name!r} is corrupt: {str(info)[:200]}")
    if dtype is None:
        raise ValueError(
            f"{path}: {name!r} has dtype {info['dtype']!r}; supported: {', '.join(DTYPES)}"
        )
    entry = TensorEntry(path, name, dtype, shape, data_start + begin)
    if end - begin != entry.nbytes:
        raise ValueError(
            f"{path}: {name!r} is corrupt: {info['dtype']}{list(shape)} needs {entry.nbytes} bytes,"
            f" the header gives it {end - begin}"
        )
    if data_start + end > file_size:
        raise ValueError(
            f"{path} is truncated: {name!r} ends at byte {data_start + end}, the file has "
            f"{file_size}; download it again"
        )
    return entry


def _check_apart(entries: Iterable[TensorEntry]) -> None:
    """Rejects tensors that share bytes."""
    ordered = sorted((e for e in entries if e.nbytes), key=lambda entry: entry.offset)
    for one, next_one in itertools.pairwise(ordered):
        if one.offset + one.nbytes > next_one.offset:
            raise ValueError(
                f"{one.path}: corrupt safetensors header: {one.name!r} and {next_one.name!r} "
                "overlap"
            )


def read_folder(folder: str | Path) -> dict[str, TensorEntry]:
    """Reads the tables of contents of a folder's weights: one file, or shards with an index.

    Args:
        folder: a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Returns:
        A dict from tensor name to entry, over all shards.

    Raises:
        FileNotFoundError: the folder has no safetensors weights (for pickled ones the message
            explains how to convert them), or shards named by the index are absent.
        ValueError: an index or shard is corrupt, the index names a file outside the folder, two
            shards hold the same name, or a name is not in the shard given by the index.
    """
    folder = Path(folder)
    index, weight_map = folder / INDEX_NAME, {}
    if index.is_file():
        weight_map = read_weight_map(index)
    elif not (folder / SINGLE_NAME).is_file():
        raise FileNotFoundError(_no_weights(folder))
    paths = [folder / name for name in sorted(set(weight_map.values()))] or [folder / SINGLE_NAME]
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise ValueError(f"{name!r} is both in {entries[name].path} and in {path}")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].path.name != file:
            there = f"in {entries[name].path.name}" if name in entries else "in no shard"
            raise ValueError(f"{index}: weight_map has {name!r} in {file}, but it is {there}")
    return entries


def read_weight_map(index: Path) -> dict[str, str]:
    """Reads the file of each tensor from an index.

    Args:
        index: index of safetensors or pickle shards.

    Returns:
        A dict from tensor name to the name of an existing file.

    Raises:
        FileNotFoundError: a file is absent.
        ValueError: it is not a shard index, or names a file outside its folder.
    """
    weight_map = as_object(read_json_object(index).get("weight_map"), f"{index}: weight_map")
    if not weight_map:
        raise ValueError(f"{index}: weight_map is empty")
    for name, file in weight_map.items():
        # A link in the folder may lead elsewhere, as in the hub's own folders.
        if not isinstance(file, str) or file in ("", ".", "..") or PurePath(file).name != file:
            raise ValueError(
                f"{index}: weight_map has {name!r} in {file!r}, expected the name of a file "
                "in the same folder"
            )
    missing = [f for f in sorted(set(weight_map.values())) if not (index.parent / f).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names {len(missing)} shard(s) that are not in {index.parent}: "
            + ", ".join(missing)
        )
    return weight_map


def _no_weights(folder: Path) -> str:
    """Returns the reason why a folder has no readable weights, and a remedy."""
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds pickled weights ({', '.join(pickles[:4])}), which are never unpickled "
            "here because a pickle can run any code. Convert them once (needs torch): "
            f"python -m stepprune_jax.checkpoints.convert {folder} NEW_FOLDER"
        )
    return (
        f"{folder} has no weights: expected {SINGLE_NAME}, or {INDEX_NAME} with its shards. "
        "If they exist elsewhere only as .bin or .pt files, download them and run "
        "python -m stepprune_jax.checkpoints.convert SRC DST (needs torch)"
    )


def read_tensor(
    entry: TensorEntry, index: tuple[slice, ...] | None = None, dtype: np.dtype | None = None
) -> np.ndarray:
    """Reads a tensor, or a block of it, into a new array.

    Only the bytes of the block are read: one read for whole rows, one per row for a block of
    columns.

    Args:
        entry: the tensor.
        index: a slice with step 1 per axis; only the first two axes may be restricted. None reads
            everything.
        dtype: floating dtype that the numbers will be converted to; None for the file's own.

    Returns:
        A contiguous array of the file's dtype.

    Raises:
        ValueError: the file ends before the block, or a number is NaN, infinite, or too large for
            `dtype`.
    """
    shape = entry.shape
    spans = [slice(None).indices(size)[:2] for size in shape]
    for axis, cut in enumerate(index or ()):
        spans[axis] = cut.indices(shape[axis])[:2]
    local = tuple(max(stop - start, 0) for start, stop in spans)
    # Read as bytes: numpy rejects a buffer of the ml_dtypes types.
    buffer = np.empty(math.prod(local) * entry.dtype.itemsize, np.uint8)
    if buffer.size:
        view, position = memoryview(buffer), 0
        with open(entry.path, "rb", buffering=0) as file:
            for start, length in _runs(shape, spans, entry.dtype.itemsize):
                _read_into(
                    file.fileno(), view[position : position + length], entry, entry.offset + start
                )
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
            raise ValueError(
                f"{entry.path}: {entry.name!r} holds {what}, expected finite numbers: the "
                "file is damaged, or is the result of a failed run"
            )


def _runs(
    shape: tuple[int, ...], spans: list[tuple[int, int]], itemsize: int
) -> Iterable[tuple[int, int]]:
    """Yields contiguous byte runs (start, length) of a block of a row-major tensor."""
    if not shape:
        return [(0, itemsize)]
    if any(span != (0, size) for span, size in zip(spans[2:], shape[2:], strict=True)):
        raise ValueError("only the first two axes of a tensor can be sliced")
    (first, last), row = spans[0], math.prod(shape[1:]) * itemsize
    if len(shape) == 1 or spans[1] == (0, shape[1]):
        return [(first * row, (last - first) * row)]
    cell = math.prod(shape[2:]) * itemsize
    left, right = spans[1]
    return [(i * row + left * cell, (right - left) * cell) for i in range(first, last)]


def _read_into(descriptor: int, view: memoryview, entry: TensorEntry, offset: int) -> None:
    """Fills a buffer from a file position, with pread, which is safe for threads."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(
                f"{entry.path} is truncated: {entry.name!r} ends at byte "
                f"{entry.offset + entry.nbytes}, the file at {offset + done}"
            )
        done += count


def write_file(
    path: str | Path,
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Writes one safetensors file atomically, taking the tensors one at a time.

    Args:
        path: the file to write.
        specs: (dtype, shape) by name, in the order of ``tensors``.
        tensors: the arrays, for instance from a generator, so that one is in memory at a time.
        metadata: strings to store in the header.

    Returns:
        The bytes of tensor data written.

    Raises:
        ValueError: an array does not have its declared dtype and shape, or the counts differ.
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
            for (name, (dtype, shape)), tensor in zip(specs.items(), tensors, strict=True):
                if tensor.dtype != dtype or tensor.shape != shape:
                    raise ValueError(
                        f"{name!r} is {tensor.dtype}{list(tensor.shape)}, "
                        f"declared {dtype}{list(shape)}"
                    )
                flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
                file.write(memoryview(flat))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return end


def plan_shards(
    sizes: Mapping[str, int], max_shard_bytes: int
) -> list[tuple[str, tuple[str, ...]]]:
    """Splits tensors over files, in order, each below a size unless one tensor alone exceeds it.

    Args:
        sizes: bytes by tensor name.
        max_shard_bytes: bytes of tensor data one file may hold.

    Returns:
        (file name, tensor names) per shard: ``model.safetensors`` alone, or
        ``model-00001-of-0000N.safetensors`` and so on.
    """
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > max_shard_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    if len(groups) == 1:
        return [(SINGLE_NAME, tuple(groups[0]))]
    return [
        (f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, start=1)
    ]


def write_index(folder: str | Path, shards: list[tuple[str, tuple[str, ...]]], total: int) -> None:
    """Writes the shard index next to the shards.

    Args:
        folder: the folder of the shards.
        shards: as returned by `plan_shards`.
        total: bytes of tensor data over all shards.
    """
    weight_map = {name: file for file, names in shards for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (Path(folder) / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
