"""Writes models in the Hugging Face layout, with one tensor in host memory at a time."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.models import vlm, weights
from stepprune_jax.models.config import Json
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.models.stack import Params
from stepprune_jax.models.weights import WeightTarget
from stepprune_jax.user_input import UserError, local_path


def save_vlm(model: VLM, folder: str | Path) -> None:
    """Writes a model as a folder that `transformers` and `load_vlm` read.

    Tensors get the names of the family's published files. A model from the original LLaVA-v1.5
    layout has no image token in its vocabulary. The token is added, and its rows of the embedding
    and of the head are copies of token 0, so greedy answers do not change.

    Args:
        model: a result of `load_vlm`, or a `VLM` built from parameters and a backbone. Tokenizer
            and image settings are written if present.
        folder: the folder to write; created if needed. It must not hold weights yet.

    Raises:
        FileExistsError: the folder already holds weights.
        ValueError: a parameter's shape does not fit the config, or the weights are int8.
    """
    folder = local_path(folder)
    leaves = weights.flatten(model.params).values()
    if any(isinstance(leaf, Int8Kernel) for leaf in leaves):
        raise UserError("the model's weights are int8, expected a model loaded with weights='full'")
    abstract = vlm.abstract_params(model.backbone)
    flat = weights.flatten(weights.separate_kernels(model.params, abstract))
    safetensors.make_empty(folder)
    _check_shapes(flat, abstract)
    backbone, tokenizer = model.backbone.complete_vocabulary(model.tokenizer)
    config = backbone.config
    targets = backbone.weight_targets(vlm.abstract_params(backbone))
    _write_weights(folder, flat, targets)
    dtype = jax.tree.leaves(model.params)[0].dtype
    _write_json(folder / "config.json", config.to_hf(str(dtype)))
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    generation = {**ids, "eos_token_id": list(config.eos_token_ids)}
    if model.repetition_penalty != 1:
        generation["repetition_penalty"] = model.repetition_penalty
    _write_json(folder / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if model.image_settings is not None:
        for name, value in backbone.hf_processor(model.image_settings).items():
            _write_json(folder / name, value)


def _check_shapes(flat: Mapping[str, Array | np.ndarray], abstract: Params) -> None:
    """Raises one error that lists all parameters that do not fit the config.

    Args:
        flat: weights by parameter path.
        abstract: the parameter tree of the config, with shapes instead of arrays.
    """
    expected = weights.flatten(abstract)
    problems = [f"{path} is absent" for path in expected if path not in flat]
    problems += [
        f"{path} is {list(leaf.shape)}, expected {list(expected[path].shape)}"
        for path, leaf in flat.items()
        if path in expected and leaf.shape != expected[path].shape
    ]
    problems += [f"{path} is not part of this model" for path in flat if path not in expected]
    if problems:
        raise UserError("the parameters do not fit the config:\n  " + "\n  ".join(problems))


def _write_weights(
    folder: Path, flat: Mapping[str, Array | np.ndarray], targets: list[WeightTarget]
) -> None:
    """Writes the weights to one safetensors file, under their published names.

    Args:
        folder: folder of the file.
        flat: weights by parameter path.
        targets: names and shapes of each weight's tensors in the file. A target may have more rows
            than its weight, because the vocabulary was extended. Copies of row 0 fill the new rows.
    """
    sources: dict[str, tuple[WeightTarget, int]] = {}  # target and layer by tensor name
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for target in targets:
        for layer, name in enumerate(target.names):
            sources[name] = (target, layer)
            specs[name] = (np.dtype(flat[target.path].dtype), target.tensor_shape)

    def make_tensor(name: str) -> np.ndarray:
        """Returns a tensor of the file. Called for one tensor at a time, to save host memory."""
        target, layer = sources[name]
        tensor = file_tensor(target, flat[target.path], layer)
        num_new_rows = target.tensor_shape[0] - len(tensor)
        if not num_new_rows:
            return tensor
        return np.concatenate([tensor, np.repeat(tensor[:1], num_new_rows, axis=0)])

    safetensors.write_file(folder / safetensors.SINGLE_NAME, specs, map(make_tensor, specs))


def file_tensor(target: WeightTarget, leaf: Array | np.ndarray, layer: int) -> np.ndarray:
    """Returns one tensor of a weight in the axis order of the file.

    Args:
        target: names, shape and transform of the weight's tensors.
        leaf: the weight, with a leading layer axis if `target.is_stacked`.
        layer: index of the layer; ignored for a weight that is not stacked.
    """
    array = np.asarray(leaf[layer] if target.is_stacked else leaf)
    if target.transform == "transpose":
        return array.T
    if target.transform == "patches":
        d, channels, *window = target.tensor_shape
        return np.moveaxis(array.reshape(*window, channels, d), (-1, -2), (0, 1))
    return array


def _write_json(path: Path, value: Json) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")
