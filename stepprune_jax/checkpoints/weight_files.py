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
    shard_of_tensor = read_weight_map(index, prefix)
    entries: dict[str, TensorEntry] = {}
    misplaced_names: set[str] = set()
    for shard in sorted(set(shard_of_tensor.values())):
        for name, entry in _read_file(index.parent / shard).items():
            is_in_two_shards = name in entries
            is_in_wrong_shard = shard_of_tensor.get(name, shard) != shard
            if is_in_two_shards or is_in_wrong_shard:
                misplaced_names.add(name)
            entries[name] = entry
    misplaced_names |= shard_of_tensor.keys() - entries.keys()
    if misplaced_names:
        raise UserError(
            f"{index}: weight_map and shards disagree about the file of {min(misplaced_names)!r}; "
            "download the folder again"
        )
    return entries


def _read_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the entries of one weight file. The suffix decides the format."""
    if path.suffix == ".bin":
        return torch_file.read_tensors(path)
    return safetensors.read_header(path)


def read_weight_map(index: Path, prefix: str = "", stored: bool = True) -> dict[str, str]:
    """Reads the name of each tensor's shard from an index.

    Args:
        index: the index file.
        prefix: only tensors whose names start with this text are returned.
        stored: True raises an error for a shard that does not exist. False is for an index whose
            shards are not downloaded yet.

    Returns:
        Names of files in the folder of the index, by tensor name.

    Raises:
        FileNotFoundError: a shard is missing, and `stored` is True.
        ValueError: the index names a file outside its folder, or no file at all.
    """
    weight_map = as_object(read_json_object(index).get("weight_map"), f"{index}: weight_map")
    weight_map = {name: shard for name, shard in weight_map.items() if name.startswith(prefix)}
    shards = sorted({str(shard) for shard in weight_map.values()})
    # The check is on names, not on resolved paths: the hub's cache folders hold symbolic links.
    are_plain_names = all(isinstance(shard, str) for shard in weight_map.values()) and all(
        PurePath(shard).name == shard and shard.isprintable() for shard in shards
    )
    is_empty = not shards and not prefix
    if is_empty or not are_plain_names or {"", ".."} & {*shards}:
        raise UserError(f"{index}: weight_map should name files in the same folder, got {shards}")
    missing_shards = [shard for shard in shards if not os.path.isfile(index.parent / shard)]
    if missing_shards and stored:
        raise FileNotFoundError(
            f"{index} names {len(missing_shards)} shard(s) that are not in {index.parent}: "
            + ", ".join(missing_shards)
        )
    return weight_map
