"""The weights of a folder: one file, or shards with an index, of safetensors or of `torch.save`."""

import os
from pathlib import Path, PurePath

from stepprune_jax.checkpoints import safetensors, torch_file
from stepprune_jax.checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, TensorEntry
from stepprune_jax.data.json_files import as_object, read_json_object
from stepprune_jax.user_input import UserError, require

# In the order of `transformers`: the first that a folder has is read.
WEIGHT_NAMES = (SINGLE_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
# Endings of files that may hold weights under other names.
_KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def find_weights(folder: Path) -> Path | None:
    """Finds the file of a folder's weights, or the index of their shards, if it has any."""
    return next((folder / name for name in WEIGHT_NAMES if (folder / name).is_file()), None)


def read_folder(folder: str | Path) -> dict[str, TensorEntry]:
    """Reads the tables of contents of a folder's weights."""
    folder = Path(folder)
    found = find_weights(folder)
    if found is None:
        other = sorted(x.name for x in folder.iterdir() if x.suffix in _KINDS and x.is_file())
        raise FileNotFoundError(
            f"{folder} has no weights: expected one of {', '.join(WEIGHT_NAMES)}"
            + f"; it holds {', '.join(other[:8])}" * bool(other)
        )
    return read_shards(found) if found.suffix == ".json" else _read_file(found)


def read_shards(index: Path, prefix: str = "") -> dict[str, TensorEntry]:
    """Reads the tables of contents of the files that an index names.

    With a prefix, only shards that hold a name that starts with it are read, and have to exist.
    """
    weight_map = read_weight_map(index, prefix)
    files = sorted(set(weight_map.values()))
    stored = [entry for file in files for entry in _read_file(index.parent / file).values()]
    entries = {entry.name: entry for entry in stored}
    wrong = {e.name for e in stored if weight_map.get(e.name, e.path.name) != e.path.name}
    wrong |= {e.name for e in stored if entries[e.name] is not e}  # in two shards
    wrong |= weight_map.keys() - entries.keys()
    named = min(wrong, default="")
    require(not wrong, f"{index}: weight_map does not have the one place of {named!r}")
    return entries


def _read_file(path: Path) -> dict[str, TensorEntry]:
    """Reads the table of contents of one file, of the kind that its name says."""
    read = torch_file.read_tensors if path.suffix == ".bin" else safetensors.read_header
    return read(path)


def read_weight_map(index: Path, prefix: str = "", stored: bool = True) -> dict[str, str]:
    """Reads the file of each tensor from an index.

    Only of names that start with the prefix; the files have to exist if they are `stored`.
    """
    weight_map = as_object(read_json_object(index).get("weight_map"), f"{index}: weight_map")
    weight_map = {name: file for name, file in weight_map.items() if name.startswith(prefix)}
    files = sorted({str(file) for file in weight_map.values()})
    # A link in the folder may lead elsewhere, as in the hub's own folders.
    plain = all(isinstance(file, str) for file in weight_map.values())
    plain = plain and all(PurePath(name).name == name and name.isprintable() for name in files)
    if not (files or prefix) or not plain or {"", ".."} & {*files}:
        raise UserError(f"{index}: weight_map should name files in the same folder, got {files}")
    missing = [file for file in files if not os.path.isfile(index.parent / file)]
    if missing and stored:
        raise FileNotFoundError(
            f"{index} names {len(missing)} shard(s) that are not in {index.parent}: "
            + ", ".join(missing)
        )
    return weight_map
