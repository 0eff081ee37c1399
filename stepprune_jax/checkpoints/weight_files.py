"""Finds and indexes the weight files of a checkpoint folder.

The weights are one file or several shards with an index, in the safetensors format or in the
format of `torch.save`.
"""

import os
from pathlib import Path, PurePath

from stepprune_jax.checkpoints import safetensors, torch_file
from stepprune_jax.checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, TensorEntry
from stepprune_jax.data.json_files import as_object, read_json_object
from stepprune_jax.user_input import UserError

# The first of these names that exists in a folder is read, as in `transformers`.
WEIGHT_NAMES = (SINGLE_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
# Suffixes of files that may hold weights under other names. An error message lists such files.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def find_weights(folder: Path) -> Path | None:
    """Finds the weight file of a folder, or the index of its shards.

    Returns:
        The path, or None if the folder has no weights.
    """
    return next((folder / name for name in WEIGHT_NAMES if (folder / name).is_file()), None)


def read_folder(folder: str | Path) -> dict[str, TensorEntry]:
    """Reads the location of every tensor in a folder's weight files, without the numbers.

    Args:
        folder: a local checkpoint folder.

    Returns:
        Entries by the tensors' names in the files.

    Raises:
        FileNotFoundError: the folder has no weights, or a shard is missing.
        ValueError: a file or the index is damaged.
    """
    folder = Path(folder)
    weights_path = find_weights(folder)
    if weights_path is None:
        names = sorted(
            file.name
            for file in folder.iterdir()
            if file.suffix in _WEIGHT_SUFFIXES and file.is_file()
        )
        raise FileNotFoundError(
            f"{folder} has no weights: expected one of {', '.join(WEIGHT_NAMES)}"
            + f"; it holds {', '.join(names[:8])}" * bool(names)
        )
    if weights_path.suffix == ".json":
        return read_shards(weights_path)
    return _read_file(weights_path)


def read_shards(index: Path, prefix: str = "") -> dict[str, TensorEntry]:
    """Reads the location of every tensor in the shards that an index lists.

    Args:
        index: the index file.
        prefix: only shards with a tensor whose name starts with this text are read. The other
            shards need not exist.

    Returns:
        Entries of all tensors in these shards, by name.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the index and the shards disagree about where a tensor is stored.
    """
    weight_map = read_weight_map(index, prefix)
    shards = sorted(set(weight_map.values()))
    all_entries = [entry for shard in shards for entry in _read_file(index.parent / shard).values()]
    entries = {entry.name: entry for entry in all_entries}
    misplaced = weight_map.keys() - entries.keys()
    misplaced |= {e.name for e in all_entries if weight_map.get(e.name, e.path.name) != e.path.name}
    misplaced |= {e.name for e in all_entries if entries[e.name] is not e}  # in two shards
    if misplaced:
        raise UserError(
            f"{index}: weight_map and shards disagree about the file of {min(misplaced)!r}; "
            "download the folder again"
        )
    return entries


def _read_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the entries of one weight file. The suffix decides the format."""
    if path.suffix == ".bin":
        return torch_file.read_tensors(path)
    return safetensors.read_header(path)


def read_weight_map(index: Path, prefix: str = "", stored: bool = True) -> dict[str, str]:
    """Reads the shard of each tensor from an index.

    Args:
        index: the index file.
        prefix: only tensors whose names start with this text are returned.
        stored: whether the shards must exist. False before they are downloaded.

    Returns:
        File names in the folder of the index, by tensor name.

    Raises:
        FileNotFoundError: a shard is missing, and `stored` is True.
        ValueError: the index names a file outside its folder, or no file at all.
    """
    weight_map = as_object(read_json_object(index).get("weight_map"), f"{index}: weight_map")
    weight_map = {name: file for name, file in weight_map.items() if name.startswith(prefix)}
    files = sorted({str(file) for file in weight_map.values()})
    # The check is on names, not on resolved paths: the hub's cache folders hold symbolic links.
    are_plain_names = all(isinstance(file, str) for file in weight_map.values()) and all(
        PurePath(file).name == file and file.isprintable() for file in files
    )
    is_empty = not files and not prefix
    if is_empty or not are_plain_names or {"", ".."} & {*files}:
        raise UserError(f"{index}: weight_map should name files in the same folder, got {files}")
    missing = [file for file in files if not os.path.isfile(index.parent / file)]
    if missing and stored:
        raise FileNotFoundError(
            f"{index} names {len(missing)} shard(s) that are not in {index.parent}: "
            + ", ".join(missing)
        )
    return weight_map
