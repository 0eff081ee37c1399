"""Saving of parameters in the Hugging Face layout, one tensor in host memory at a time."""

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
from stepprune_jax.user_input import UserError, local_path, require


def save_vlm(model: VLM, folder: str | Path) -> None:
    """Writes a model as a folder that `transformers` and `load_vlm` read.

    Names are those of the family's published files. A model that came from the original LLaVA-v1.5
    layout has no image token in its vocabulary; it gets one, with an embedding and a head row
    copied from token 0, so that greedy answers do not change.

    Args:
        model: result of `load_vlm`, or a `VLM` built from parameters and a backbone; tokenizer and
            image settings are written if present.
        folder: folder to write; created if needed, must not hold weights yet.

    Raises:
        FileExistsError: the folder already holds weights.
        ValueError: a parameter's shape does not fit the config, or weights are int8.
    """
    folder = local_path(folder)
    leaves = weights.flatten(model.params).values()
    full = not any(isinstance(leaf, Int8Kernel) for leaf in leaves)
    require(full, "the model's weights are int8, expected those loaded with weights='full'")
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
    """Checks all parameters against the config, in one error."""
    expected = weights.flatten(abstract)
    wrong = [f"{path} is absent" for path in expected if path not in flat]
    wrong += [
        f"{path} is {list(leaf.shape)}, expected {list(expected[path].shape)}"
        for path, leaf in flat.items()
        if path in expected and leaf.shape != expected[path].shape
    ]
    wrong += [f"{path} is not part of this model" for path in flat if path not in expected]
    if wrong:
        raise UserError("the parameters do not fit the config:\n  " + "\n  ".join(wrong))


def _write_weights(
    folder: Path, flat: Mapping[str, Array | np.ndarray], targets: list[WeightTarget]
) -> None:
    """Writes the weights under their names in the files."""
    sources: dict[str, tuple[WeightTarget, int]] = {}
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for target in targets:
        for layer, name in enumerate(target.names):
            sources[name] = (target, layer)
            specs[name] = (np.dtype(flat[target.path].dtype), target.tensor_shape)

    def read(name: str) -> np.ndarray:
        target, layer = sources[name]
        tensor = file_tensor(target, flat[target.path], layer)
        # Only a completed vocabulary has more rows than the weights.
        more = target.tensor_shape[0] - len(tensor)
        return np.concatenate([tensor, np.repeat(tensor[:1], more, axis=0)]) if more else tensor

    safetensors.write_file(folder / safetensors.SINGLE_NAME, specs, map(read, specs))


def file_tensor(target: WeightTarget, leaf: Array | np.ndarray, layer: int) -> np.ndarray:
    """Returns one tensor of a weight in the file's axes, inverting the loader's transforms."""
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
