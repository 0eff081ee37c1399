"""Reads weights of trained selectors as their authors publish them.

VisionSelector publishes a complete Qwen2.5-VL checkpoint. Four of its tensors are the selector, and
only these are read. GlimpsePrune publishes one file of `torch.save` and a `config.json`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.checkpoints import hub, safetensors, torch_file
from stepprune_jax.checkpoints.weight_files import read_shards, read_weight_map
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.selectors import GlimpsePruneConfig, SelectorConfig, VisionSelectorConfig
from stepprune_jax.user_input import UserError, expect, naming

# Start of the names of VisionSelector's tensors in a Qwen2.5-VL checkpoint.
PREFIX = "visual.importance_scorer."
GLIMPSE_FILE, GLIMPSE_CONFIG = "new_modules_gp.pt", "config.json"
_VISION_SELECTOR_PATHS = {
    f"{PREFIX}{letter}_proj.{kind}": f"{module}/{leaf}"
    for letter, module in (("q", "query"), ("k", "key"))
    for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
}
# Fields of GlimpsePrune's configuration that have one value in all published files. No other value
# is supported.
_FIXED = {
    "attn_fuse_type": "AttnFuserV1",
    "attn_fuse_hidden_act": "silu",
    "deep_supervision": False,
    "le_length": 1,
}
# Fixed fields by model type.
_GLIMPSE_TYPES = {
    "llava_llama_gp": _FIXED,
    "qwen2_5_vl_gp": _FIXED | {"le_norm_type": "rmsnorm", "attn_fuse_global": True},
}
# Linear layers of a GlimpsePrune block: our name by the published name.
_BLOCK_LAYERS = {f"attn.{name[0]}_proj": name for name in ("query", "key", "value", "out")}
_BLOCK_LAYERS |= {f"mlp.{name}_proj": name for name in ("gate", "up", "down")}


def find_published(folder: Path) -> Path | None:
    """Finds the published weights of a selector in a folder.

    Returns:
        GlimpsePrune's file, or the single file or the index of VisionSelector's checkpoint. None if
        the folder has no such file.

    Raises:
        ValueError: VisionSelector's weights for LLaVA-OneVision-1.5, which are not supported.
    """
    config_path = folder / GLIMPSE_CONFIG
    config = read_json_object(config_path) if config_path.is_file() else {}
    model_type = str(config.get("model_type"))
    if "onevision" in model_type.lower():
        raise UserError(
            f"{config_path}: model_type is {model_type!r}; of VisionSelector's weights only those "
            "for Qwen2.5-VL are supported"
        )
    if (folder / GLIMPSE_FILE).is_file():
        return folder / GLIMPSE_FILE
    index, single_file = folder / safetensors.INDEX_NAME, folder / safetensors.SINGLE_NAME
    if single_file.is_file():  # preferred to an index, as for a model
        return single_file if is_published(safetensors.read_header(single_file)) else None
    has_selector = index.is_file() and read_weight_map(index, PREFIX, stored=False)
    return index if has_selector else None


def download_published(source: hub.Repository, folder: Path) -> Path | None:
    """Completes the download of published selector weights.

    For VisionSelector, this downloads the shards that the index names. GlimpsePrune's weights are a
    single file, so the download is already complete.

    Args:
        source: the repository.
        folder: local folder with the repository's index, or with GlimpsePrune's file.

    Returns:
        The path that `find_published` finds in the folder, or None.
    """
    path = find_published(folder)
    if path is not None and path.name == safetensors.INDEX_NAME:
        shards = read_weight_map(path, PREFIX, stored=False).values()
        hub.download(source, sorted({*shards}))
    return path


def is_published(names: Iterable[str]) -> bool:
    """Returns whether a checkpoint's tensors include VisionSelector's."""
    return any(name.startswith(PREFIX) for name in names)


def read_published(path: Path) -> tuple[SelectorConfig, dict[str, np.ndarray]]:
    """Reads published weights from a file, or from the shards that an index names.

    Args:
        path: the file or the index.

    Returns:
        The selector's configuration, and its arrays by parameter path, such as "query/kernel".
        Arrays without a place among the parameters keep their published names.

    Raises:
        FileNotFoundError: a shard, or GlimpsePrune's configuration, is missing.
        ValueError: a damaged file or index, or a configuration that is not supported.
    """
    if path.name == GLIMPSE_FILE:
        return _read_glimpseprune(path)
    if path.name == safetensors.INDEX_NAME:
        entries = read_shards(path, PREFIX)
    else:
        entries = safetensors.read_header(path)
    entries = {name: entry for name, entry in entries.items() if name.startswith(PREFIX)}
    matrix_shapes = [entry.shape for entry in entries.values() if len(entry.shape) == 2]
    # Without a matrix, the sizes do not matter, because the caller reports the missing tensors.
    hidden_dim, feature_width = matrix_shapes[0] if matrix_shapes else (1, 1)
    with naming(path, TypeError, ValueError):
        config = VisionSelectorConfig(feature_width, hidden_dim=hidden_dim)
    return config, _read_tensors(entries, _VISION_SELECTOR_PATHS)


def _read_tensors(
    entries: Mapping[str, safetensors.TensorEntry], paths: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Reads published tensors as arrays of our parameter tree.

    Args:
        entries: location of each tensor by published name.
        paths: our parameter path by published name. A tensor without a path keeps its published
            name, and the caller reports it as unused.

    Returns:
        Arrays by parameter path. Their numbers fit float32. Matrices are transposed to [in, out].
    """
    arrays = {
        paths.get(name, name): safetensors.read_tensor(entry, dtype=np.dtype(np.float32))
        for name, entry in entries.items()
    }
    return {path: array.T if array.ndim == 2 else array for path, array in arrays.items()}


def _read_glimpseprune(path: Path) -> tuple[GlimpsePruneConfig, dict[str, np.ndarray]]:
    """Reads GlimpsePrune's configuration and weights.

    Args:
        path: the file of weights. The configuration is in the same folder.

    Returns:
        The configuration, and the arrays by parameter path.
    """
    entries, config_path = torch_file.read_tensors(path), path.with_name(GLIMPSE_CONFIG)
    config = _read_glimpseprune_config(config_path, entries)
    num_blocks = len(config.selected_visual_layers)
    paths = {
        "learnable_embeddings": "glimpse/embeddings",
        "le_norm.weight": "glimpse/scale",
        **_linear_paths("le_proj", "glimpse"),
        **_linear_paths("attn_fuser.attn_in_proj", "attention_in"),
        **_linear_paths(f"attn_fuser.attn_out_projs.{num_blocks - 1}", "out"),
    }
    for i in range(num_blocks):
        paths |= _linear_paths(f"attn_fuser.cond_in_projs.{i}", f"state_{i}")
        for published_name, name in _BLOCK_LAYERS.items():
            paths |= _linear_paths(f"attn_fuser.layers.{i}.{published_name}", f"block_{i}/{name}")
        for norm in ("norm1", "norm2"):
            paths[f"attn_fuser.layers.{i}.{norm}.weight"] = f"block_{i}/{norm}"
    return config, _read_tensors(entries, paths)


def _read_glimpseprune_config(
    path: Path, entries: Mapping[str, safetensors.TensorEntry]
) -> GlimpsePruneConfig:
    """Reads GlimpsePrune's `config.json`.

    Args:
        path: the `config.json`.
        entries: location and shape of each published tensor. They give the width of the vision
            tower, which the file does not contain.

    Returns:
        The configuration.

    Raises:
        ValueError: the configuration is damaged or not supported.
    """
    raw = read_json_object(path)
    model_type: Any = raw.get("model_type")
    is_supported = model_type in [*_GLIMPSE_TYPES]
    expect(f"{path}: model_type", model_type, is_supported, f"one of {', '.join(_GLIMPSE_TYPES)}")
    for name, value in _GLIMPSE_TYPES[model_type].items():
        expect(f"{path}: {name}", raw.get(name), raw.get(name) == value, repr(value))
    anchors = raw.get("anchor_positions")
    expect(f"{path}: anchor_positions", anchors, not anchors, "none")
    is_qwen = model_type.startswith("qwen")
    vision_kernel = entries.get("attn_fuser.cond_in_projs.0.weight")
    # Without this tensor, the width does not matter, because the caller reports it as missing.
    vision_width = 1 if vision_kernel is None else (1, *vision_kernel.shape)[-1]
    field_names = [field.name for field in dataclasses.fields(GlimpsePruneConfig)]
    fields: dict[str, Any] = {name: raw.get(name) for name in field_names}
    fields |= {"text_width": raw.get("hidden_size"), "vision_width": vision_width}
    fields["feature_width"] = fields["text_width"] if is_qwen else vision_width
    with naming(path, TypeError, ValueError):
        # Our layer i is the input of block i. The files for LLaVA count the same way. The files for
        # Qwen2.5-VL count outputs of blocks, and the output of block i is the input of block i + 1.
        visual_layers = fields["selected_visual_layers"]
        fields["selected_visual_layers"] = [layer + is_qwen for layer in visual_layers]
        # JSON has no tuples, and a hashable configuration cannot hold lists.
        hashable_fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return GlimpsePruneConfig(**hashable_fields)


def _linear_paths(published_name: str, path: str) -> dict[str, str]:
    """Returns our paths of a linear layer's kernel and bias, by their published names."""
    return {f"{published_name}.weight": f"{path}/kernel", f"{published_name}.bias": f"{path}/bias"}
