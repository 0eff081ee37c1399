"""Our parameters back to the Hugging Face LLaVA layout, one tensor in host memory at a time."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data import images
from stepprune_jax.models.llava import weights as names
from stepprune_jax.models.llava.config import LlamaConfig, LlavaConfig
from stepprune_jax.models.llava.prompts import IMAGE_MARK


def save_vlm(model: VLM, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes a model as a folder that `transformers` and `load_vlm` read.

    Names are those of the published LLaVA-1.5 files. A model that came from the original layout has
    no image token in its vocabulary; it gets one, with an embedding and a head row copied from
    token 0, so that greedy answers stay as they were.

    Args:
        model: what `load_vlm` returned, or a `VLM` made from parameters and a config; tokenizer and
            image settings are written if present.
        folder: where to write; created if needed, must not hold weights yet.
        max_shard_bytes: above this many bytes the weights are split over several files.

    Raises:
        FileExistsError: the folder already holds weights.
        ValueError: a parameter has another shape than the config says.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(p.name for p in folder.glob("*.safetensors*"))
    if present:
        raise FileExistsError(f"{folder} already holds {present[0]}; choose an empty folder")
    config, tokenizer, extra_rows = _with_image_token(model)
    flat = names.flatten(model.params)
    targets = names.targets(model.params, config)
    _check_shapes(targets, model.config)
    _write_weights(folder, flat, targets, config, extra_rows, max_shard_bytes)
    dtype = flat["language/embed/embedding"].dtype
    _write_json(folder / "config.json", hf_config(config, str(dtype)))
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    generation = {**ids, "eos_token_id": list(config.eos_token_ids)}
    _write_json(folder / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if model.image_settings is not None:
        _write_processor(folder, config, model.image_settings)


def _with_image_token(model: VLM) -> tuple[LlavaConfig, Any, int]:
    """The config and tokenizer with an image token, and the vocabulary rows that it adds."""
    config, tokenizer = model.config, model.tokenizer
    if config.image_token_id is not None:
        return config, tokenizer, 0
    token = config.text.vocab_size
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
        token = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
    extra_rows = max(0, token + 1 - config.text.vocab_size)
    text = dataclasses.replace(config.text, vocab_size=config.text.vocab_size + extra_rows)
    return dataclasses.replace(config, text=text, image_token_id=token), tokenizer, extra_rows


def _check_shapes(targets: list[names.Target], config: LlavaConfig) -> None:
    """Refuses parameters that are not those of the config, all at once."""
    from stepprune_jax.models import vlm  # the only use of the models here

    expected = names.flatten(vlm.abstract_params(config))
    given = {target.path: target.shape for target in targets}
    wrong = [f"{path} is absent" for path in expected if path not in given]
    wrong += [
        f"{path} is {list(shape)}, expected {list(expected[path].shape)}"
        for path, shape in given.items()
        if path in expected and shape != expected[path].shape
    ]
    wrong += [f"{path} is not part of this model" for path in given if path not in expected]
    if wrong:
        raise ValueError("the parameters do not fit the config:\n  " + "\n  ".join(wrong))


def _write_weights(
    folder: Path,
    flat: dict[str, Any],
    targets: list[names.Target],
    config: LlavaConfig,
    extra_rows: int,
    max_shard_bytes: int,
) -> None:
    """Writes the shards, and the index if there is more than one."""
    sources: dict[str, tuple[names.Target, int]] = {}
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for target in targets:
        rows = extra_rows if target.path in _VOCABULARY else 0
        shape = (target.tensor_shape[0] + rows, *target.tensor_shape[1:])
        for layer, name in enumerate(target.names):
            sources[name] = (target, layer)
            specs[name] = (np.dtype(flat[target.path].dtype), shape)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in specs.items()}
    shards = safetensors.plan_shards(sizes, max_shard_bytes)

    def tensors(members: tuple[str, ...]) -> Iterator[np.ndarray]:
        for name in members:
            target, layer = sources[name]
            tensor = _to_file(target, flat[target.path], layer, config)
            if extra_rows and target.path in _VOCABULARY:
                tensor = np.concatenate([tensor, np.repeat(tensor[:1], extra_rows, axis=0)])
            yield tensor

    for file, members in shards:
        chosen = {name: specs[name] for name in members}
        safetensors.write_file(folder / file, chosen, tensors(members))
    if len(shards) > 1:
        safetensors.write_index(folder, shards, sum(sizes.values()))


# Weights with a row per token of the vocabulary.
_VOCABULARY = ("language/embed/embedding", "language/head/kernel")


def _to_file(
    target: names.Target, leaf: Array | np.ndarray, layer: int, config: LlavaConfig
) -> np.ndarray:
    """One tensor in the file's axes: the inverse of the loader's transforms."""
    array = np.asarray(leaf[layer] if target.stacked else leaf)
    if target.transform == "transpose":
        return array.T
    if target.transform == "patches":
        side = config.vision.patch_size
        return array.reshape(side, side, -1, array.shape[-1]).transpose(3, 2, 0, 1)
    return array


def hf_config(config: LlavaConfig, dtype: str) -> dict[str, Any]:
    """Describes a model as a Hugging Face LLaVA ``config.json``.

    Args:
        config: the model; must have an image token id.
        dtype: name of the weights' dtype, such as "bfloat16".

    Returns:
        A dict that `LlavaConfig.from_hf` turns back into ``config``.
    """
    vision = config.vision
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": dtype,
        "image_token_index": config.image_token_id,
        "image_seq_length": config.num_image_tokens,
        "projector_hidden_act": config.projector_activation,
        "multimodal_projector_bias": True,
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": config.feature_select,
        "tie_word_embeddings": config.text.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "hidden_act": vision.activation,
            "projection_dim": vision.hidden_size,
        },
        "text_config": _hf_text_config(config.text, config),
    }


def _hf_text_config(text: LlamaConfig, config: LlavaConfig) -> dict[str, Any]:
    """The language part, in field names that old and new versions of `transformers` read."""
    scaling = None
    if text.rope_scaling is not None:
        rope = text.rope_scaling
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            scaling |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_positions,
            }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "head_dim": text.head_dim,
        "hidden_act": "silu",
        "rope_theta": text.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": text.rms_norm_eps,
        "max_position_embeddings": text.max_positions,
        "tie_word_embeddings": text.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as `transformers` writes them: none, one, or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_processor(folder: Path, config: LlavaConfig, settings: images.ImageSettings) -> None:
    """Writes the image processor, where old and where new versions of `transformers` look."""
    edge, crop = settings.resize_to, settings.crop_to or (336, 336)
    size = {"height": edge[0], "width": edge[1]} if isinstance(edge, tuple) else None
    processor = {
        "image_processor_type": "LlavaImageProcessor",  # CLIP's with a switch for the padding
        "do_convert_rgb": True,
        "do_pad": settings.pad_to_square,
        "do_resize": edge is not None,
        "size": size or {"shortest_edge": edge or config.vision.image_size},
        "resample": settings.resample,
        "do_center_crop": settings.crop_to is not None,
        "crop_size": {"height": crop[0], "width": crop[1]},
        "do_rescale": settings.rescale is not None,
        "rescale_factor": settings.rescale or 1 / 255,
        "do_normalize": settings.mean is not None,
        "image_mean": list(settings.mean or images.CLIP_MEAN),
        "image_std": list(settings.std or images.CLIP_STD),
    }
    _write_json(
        folder / "preprocessor_config.json", {**processor, "processor_class": "LlavaProcessor"}
    )
    combined = {
        "processor_class": "LlavaProcessor",
        "image_processor": processor,
        "image_token": IMAGE_MARK,
        "num_additional_image_tokens": 1,
        "patch_size": config.vision.patch_size,
        "vision_feature_select_strategy": config.feature_select,
    }
    _write_json(folder / "processor_config.json", combined)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file for people to read, too."""
    path.write_text(json.dumps(value, indent=2) + "\n")
