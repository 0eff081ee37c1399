"""A folder's weights in other files than `stepprune_jax.testing` writes."""

import json

import torch

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.weight_files import read_folder


def write_index(folder, weight_map, name=safetensors.INDEX_NAME):
    """Writes the index of shards."""
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def to_pickles(folder, count=1):
    """Replaces a folder's safetensors by one or more files of `torch.save`."""
    entries = list(read_folder(folder).values())
    size, weight_map = -(-len(entries) // count), {}
    for number in range(count):
        shard = f"pytorch_model-{number + 1:05d}-of-{count:05d}.bin"
        file = "pytorch_model.bin" if count == 1 else shard
        part = entries[number * size : (number + 1) * size]
        tensors = {entry.name: torch.tensor(safetensors.read_tensor(entry)) for entry in part}
        torch.save(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if count > 1:
        write_index(folder, weight_map, "pytorch_model.bin.index.json")
    for path in folder.glob("*.safetensors"):
        path.unlink()
