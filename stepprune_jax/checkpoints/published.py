"""Weights of trained selectors as their authors publish them.

VisionSelector's are four tensors of a whole Qwen2.5-VL checkpoint, whose other weights are those of
the model it was trained for.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stepprune_jax.checkpoints import hub, safetensors
from stepprune_jax.pruning import VisionSelectorConfig
from stepprune_jax.user_input import errors_named

PREFIX = "visual.importance_scorer."
_NAMES = {
    f"{PREFIX}{theirs}_proj.{kind}": f"{ours}/{name}"
    for theirs, ours in (("q", "query"), ("k", "key"))
    for kind, name in (("weight", "kernel"), ("bias", "bias"))
}


def find_published(folder: Path) -> Path | None:
    """Finds the file or the index of a folder's checkpoint, if it has such weights."""
    index, single = folder / safetensors.INDEX_NAME, folder / safetensors.SINGLE_NAME
    if index.is_file() and safetensors.read_weight_map(index, PREFIX, stored=False):
        return index
    known = safetensors.read_header(single) if single.is_file() else ()
    return single if is_published(known) else None


def download_published(source: hub.Repository, folder: Path) -> Path | None:
    """Downloads the shards that have such weights, after their index; returns the index."""
    index = find_published(folder)
    if index is not None:
        shards = safetensors.read_weight_map(index, PREFIX, stored=False).values()
        hub.download(source, sorted({*shards}))
    return index


def is_published(names: Iterable[str]) -> bool:
    """Returns whether tensors' names are those of a published checkpoint."""
    return any(name.startswith(PREFIX) for name in names)


def read_published(path: Path) -> tuple[VisionSelectorConfig, dict[str, np.ndarray]]:
    """Reads published weights from a file, or from the shards that an index names.

    Args:
        path: the file or the index.

    Returns:
        The configuration, and tensors by our names; those that have none keep theirs.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a damaged file or index.
    """
    if path.name == safetensors.INDEX_NAME:
        entries = safetensors.read_folder(path.parent, PREFIX)
    else:
        entries = safetensors.read_header(path)
    own = {name: entry for name, entry in entries.items() if name.startswith(PREFIX)}
    shapes = [entry.shape for entry in own.values() if len(entry.shape) == 2]
    h, d = shapes[0] if shapes else (1, 1)
    with errors_named(path):
        config = VisionSelectorConfig(d, hidden_dim=h)
    arrays = {_NAMES.get(x, x): safetensors.read_tensor(entry).T for x, entry in own.items()}
    return config, arrays
