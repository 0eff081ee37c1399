"""A folder's weights in other files than `stepprune_jax.testing` writes."""

import json

import torch

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.weight_files import read_folder


def write_index(folder, weight_map, name=safetensors.INDEX_NAME):
    """Writes the index of shards."""
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def to_shards(folder, count):
    """Splits a folder's weights over several safetensors files."""

    def write(path, tensors):
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        safetensors.write_file(path, specs, tensors.values())

    names = [f"model-{number}.safetensors" for number in range(count)]
    write_index(folder, _divide(folder, names, write))


def to_pickles(folder, count=1):
    """Replaces a folder's safetensors by one or more files of `torch.save`."""

    def write(path, tensors):
        torch.save({name: torch.tensor(tensor) for name, tensor in tensors.items()}, path)

    if count == 1:
        _divide(folder, ["pytorch_model.bin"], write)
    else:
        names = [f"pytorch_model-{number}.bin" for number in range(count)]
        write_index(folder, _divide(folder, names, write), "pytorch_model.bin.index.json")


def _divide(folder, names, write):
    """Writes a folder's weights to files instead, and returns the file of each."""
    entries = list(read_folder(folder).values())
    size, weight_map = -(-len(entries) // len(names)), {}
    for number, name in enumerate(names):
        part = entries[number * size : (number + 1) * size]
        write(folder / name, {entry.name: safetensors.read_tensor(entry) for entry in part})
        weight_map |= {entry.name: name for entry in part}
    for path in {entry.path for entry in entries}:
        path.unlink()
    return weight_map
