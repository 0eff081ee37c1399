"""Rewrites the weights of a checkpoint folder as shards or as files of `torch.save`."""

import json

import torch

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.weight_files import read_folder


def write_index(folder, weight_map, name=safetensors.INDEX_NAME):
    """Writes an index with the file of each tensor."""
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def to_shards(folder, count):
    """Replaces a folder's weight file by `count` safetensors shards with an index."""

    def write(path, tensors):
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        safetensors.write_file(path, specs, tensors.values())

    names = [f"model-{number}.safetensors" for number in range(count)]
    write_index(folder, _divide(folder, names, write))


def to_pickles(folder, count=1):
    """Replaces a folder's weight file by `count` files of `torch.save`."""

    def write(path, tensors):
        torch.save({name: torch.tensor(tensor) for name, tensor in tensors.items()}, path)

    if count == 1:
        _divide(folder, ["pytorch_model.bin"], write)
    else:
        names = [f"pytorch_model-{number}.bin" for number in range(count)]
        write_index(folder, _divide(folder, names, write), "pytorch_model.bin.index.json")


def _divide(folder, names, write):
    """Distributes a folder's weights over new files, and deletes the old ones.

    Args:
        folder: the checkpoint folder.
        names: names of the new files.
        write: `write(path, tensors)` writes a file of arrays by name.

    Returns:
        The new file of each tensor.
    """
    entries = list(read_folder(folder).values())
    size, weight_map = -(-len(entries) // len(names)), {}
    for number, name in enumerate(names):
        part = entries[number * size : (number + 1) * size]
        write(folder / name, {entry.name: safetensors.read_tensor(entry) for entry in part})
        weight_map |= {entry.name: name for entry in part}
    for path in {entry.path for entry in entries}:
        path.unlink()
    return weight_map
