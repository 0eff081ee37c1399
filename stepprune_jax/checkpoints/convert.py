"""Pickled torch weights to safetensors: ``python -m stepprune_jax.checkpoints.convert SRC DST``.

This is the only module that needs torch. Files are opened with torch's weights-only reader, which
accepts tensors only, and written shard by shard; configuration and tokenizer files are copied.
"""

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.command_line import Parser, exit_with

_LOG = logging.getLogger(__name__)

_COPIED = (".json", ".model", ".txt", ".jinja", ".md")
_PATTERNS = ("pytorch_model*.bin", "consolidated*.pth", "model*.pt", "model*.bin")


def convert(source: str | Path, target: str | Path, *, progress: bool = True) -> list[Path]:
    """Converts a folder's pickled weights.

    Args:
        source: a folder with ``pytorch_model.bin``, or with shards and their index.
        target: the folder to write; created if needed, must hold no safetensors weights. May be
            the source itself.
        progress: whether to report each shard on stderr.

    Returns:
        The safetensors files written.

    Raises:
        FileNotFoundError: the source is not a folder, has no pickled weights, or lacks a shard.
        FileExistsError: the target already holds safetensors weights.
        ImportError: torch is not installed.
        ValueError: a file holds objects other than tensors or is damaged, or a name occurs twice.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise FileNotFoundError(f"no folder {source}")
    pickles = _pickles(source)
    present = sorted(p.name for p in target.glob("*.safetensors*")) if target.is_dir() else []
    if present:
        raise FileExistsError(f"{target} already holds {present[0]}; choose an empty folder")
    target.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[str, tuple[str, ...]]] = []
    seen: dict[str, Path] = {}
    total = 0
    for number, path in enumerate(pickles, start=1):
        tensors = _read_pickle(path)
        for name in tensors:
            if name in seen:
                raise ValueError(f"{name!r} is both in {seen[name]} and in {path}")
            seen[name] = path
        file = safetensors.SINGLE_NAME
        if len(pickles) > 1:
            file = f"model-{number:05d}-of-{len(pickles):05d}.safetensors"
        size = safetensors.write_file(target / file, *_as_arrays(tensors, path))
        shards.append((file, tuple(tensors)))
        total += size
        if progress:
            place = f"[{number}/{len(pickles)}]"
            _LOG.info("%s %s -> %s (%.2f GB)", place, path.name, file, size / 1e9)
    if len(shards) > 1:
        safetensors.write_index(target, shards, total)
    _copy_rest(source, target)
    return [target / file for file, _ in shards]


def _pickles(source: Path) -> list[Path]:
    """Lists a folder's pickled weight files, from its index or by their usual names."""
    index = source / "pytorch_model.bin.index.json"
    if index.is_file():
        return [source / file for file in sorted(set(safetensors.read_weight_map(index).values()))]
    for pattern in _PATTERNS:
        files = sorted(source.glob(pattern))
        if files:
            return files
    raise FileNotFoundError(
        f"{source} has no pickled weights: expected pytorch_model.bin, or "
        "pytorch_model.bin.index.json with its shards"
    )


def _read_pickle(path: Path) -> dict[str, Any]:
    """Opens one file with the weights-only reader; tensors stay on disk until they are used."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "converting pickled weights needs torch: pip install torch (the CPU build suffices)"
        ) from error
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as error:
            if "mmap" not in str(error):
                raise
            # Files from before torch 1.6 are not archives and cannot be mapped.
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe pickle
        raise ValueError(
            f"{path} could not be read as plain tensors (damaged, or it holds other objects, which "
            f"are rejected): {error}"
        ) from error
    if not isinstance(tensors, dict):
        raise ValueError(f"{path} holds a {type(tensors).__name__}, expected a dict of tensors")
    odd = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ValueError(f"{path} holds entries that are not tensors: {', '.join(map(str, odd))}")
    return tensors


def _as_arrays(
    tensors: dict[str, Any], path: Path
) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...]]], Iterator[np.ndarray]]:
    """Returns dtypes and shapes of torch tensors, and an iterator over their values."""
    specs = {}
    for name, tensor in tensors.items():
        dtype = safetensors.DTYPES.get(_dtype_name(tensor))
        if dtype is None:
            raise ValueError(f"{path}: {name!r} has unsupported dtype {tensor.dtype}")
        specs[name] = (dtype, tuple(tensor.shape))

    def values() -> Iterator[np.ndarray]:
        import torch

        for name, tensor in tensors.items():
            dtype, shape = specs[name]
            # Through bytes: torch does not know numpy's bfloat16.
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield flat.view(dtype).reshape(shape)

    return specs, values()


def _dtype_name(tensor: Any) -> str:
    """Returns the safetensors name of a torch dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    known = {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }
    return known.get(name, name)


def _copy_rest(source: Path, target: Path) -> None:
    """Copies configuration, tokenizer and text files, but not the index of the pickles."""
    if source.resolve() == target.resolve():
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: command-line arguments; None for those of the process.

    Returns:
        The exit status, 0; after a message on stderr the command exits with 2.
    """
    parser = Parser(
        prog="stepprune_jax.checkpoints.convert",
        description="Convert a folder's pickled torch weights to safetensors (needs torch).",
    )
    parser.add_argument("source", help="folder with pytorch_model.bin or its shards")
    parser.add_argument("target", help="folder to write")
    given = parser.parse_args(arguments)
    try:
        files = convert(given.source, given.target)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(f"wrote {len(files)} file(s) to {given.target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    exit_with("stepprune_jax.checkpoints.convert", main)
