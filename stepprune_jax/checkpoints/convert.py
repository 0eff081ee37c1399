"""Pickled torch weights to safetensors: ``python -m stepprune_jax.checkpoints.convert SRC DST``.

This is the only module that needs torch. Files are opened with torch's weights-only reader, which
accepts tensors only, and written shard by shard; configuration and tokenizer files are copied.
"""

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.command_line import Parser, exit_with

_LOG = logging.getLogger(__name__)

_COPIED = (".json", ".model", ".txt", ".jinja", ".md")
# By torch's names.
_DTYPES = {
    dtype.name: dtype for name, dtype in safetensors.DTYPES.items() if not name.startswith("F8")
}
_PATTERNS = ("pytorch_model*.bin", "consolidated*.pth", "model*.pt", "model*.bin")


def convert(source: str | Path, target: str | Path, *, progress: bool = True) -> list[Path]:
    """Converts a folder's pickled weights; returns the safetensors files.

    Args:
        source: a folder with ``pytorch_model.bin``, or with shards and their index.
        target: the folder to write; must hold no safetensors weights. May be the source itself.
        progress: whether to report each shard on stderr.

    Raises:
        FileNotFoundError: the source has no pickled weights, or lacks a shard.
        FileExistsError: the target already holds safetensors weights.
        ImportError: torch is not installed.
        ValueError: a file holds objects other than tensors or is damaged, or a name occurs twice.
    """
    source, target = Path(source), Path(target)
    pickles = _pickles(source)
    safetensors.make_empty(target)
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
        specs = {name: (_dtype(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
        size = safetensors.write_file(target / file, specs, map(_as_array, tensors.values()))
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
        f"no pickled weights in {source}: expected pytorch_model.bin, or "
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
        for tensor in tensors.values():
            _dtype(tensor)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe pickle
        raise ValueError(
            f"{path} could not be read as plain tensors (damaged, or it holds other objects, which "
            f"are rejected): {error!r}"
        ) from error
    return tensors


def _dtype(tensor: Any) -> np.dtype:
    """Returns numpy's dtype of a torch tensor; a KeyError if there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES[name]


def _as_array(tensor: Any) -> np.ndarray:
    """Returns a torch tensor's values."""
    import torch

    # Through bytes: torch does not know numpy's bfloat16.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(_dtype(tensor)).reshape(tuple(tensor.shape))


def _copy_rest(source: Path, target: Path) -> None:
    """Copies configuration, tokenizer and text files, but not the index of the pickles."""
    if source.resolve() == target.resolve():
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; reports user errors in one line and exits with status 2."""
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
