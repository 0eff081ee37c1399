"""Weights of trained selectors as their authors publish them.

VisionSelector's are four tensors of a whole Qwen2.5-VL checkpoint, whose other weights are those of
the model it was trained for. GlimpsePrune's are a file of their own beside a `config.json`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from stepprune_jax.checkpoints import hub, safetensors, torch_file
from stepprune_jax.checkpoints.weight_files import read_shards, read_weight_map
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.selectors import GlimpsePruneConfig, SelectorConfig, VisionSelectorConfig
from stepprune_jax.user_input import expect, naming, require

PREFIX = "visual.importance_scorer."
GLIMPSE_FILE, GLIMPSE_CONFIG = "new_modules_gp.pt", "config.json"
_NAMES = {
    f"{PREFIX}{theirs}_proj.{kind}": f"{ours}/{name}"
    for theirs, ours in (("q", "query"), ("k", "key"))
    for kind, name in (("weight", "kernel"), ("bias", "bias"))
}
# Fields of GlimpsePrune's configuration that are the same in all published files, by its kind.
_FIXED = {
    "attn_fuse_type": "AttnFuserV1",
    "attn_fuse_hidden_act": "silu",
    "deep_supervision": False,
    "le_length": 1,
}
_KINDS = {
    "llava_llama_gp": _FIXED,
    "qwen2_5_vl_gp": _FIXED | {"le_norm_type": "rmsnorm", "attn_fuse_global": True},
}
_PARTS = {f"attn.{name[0]}_proj": name for name in ("query", "key", "value", "out")}
_PARTS |= {f"mlp.{name}_proj": name for name in ("gate", "up", "down")}


def find_published(folder: Path) -> Path | None:
    """Finds the file or the index of a folder's checkpoint, if it has such weights.

    Raises:
        ValueError: VisionSelector's weights for LLaVA-OneVision-1.5, which are not supported.
    """
    beside = folder / GLIMPSE_CONFIG
    kind = str(read_json_object(beside).get("model_type")) if beside.is_file() else ""
    only = "of VisionSelector's weights only those for Qwen2.5-VL are supported"
    require("onevision" not in kind.lower(), f"{beside}: model_type is {kind!r}; {only}")
    if (folder / GLIMPSE_FILE).is_file():
        return folder / GLIMPSE_FILE
    index, single = folder / safetensors.INDEX_NAME, folder / safetensors.SINGLE_NAME
    if single.is_file():  # before the index, as for a model
        return single if is_published(safetensors.read_header(single)) else None
    known = index.is_file() and read_weight_map(index, PREFIX, stored=False)
    return index if known else None


def download_published(source: hub.Repository, folder: Path) -> Path | None:
    """Downloads the shards that have such weights, after their index; returns what was found."""
    found = find_published(folder)
    if found is not None and found.name == safetensors.INDEX_NAME:
        shards = read_weight_map(found, PREFIX, stored=False).values()
        hub.download(source, sorted({*shards}))
    return found


def is_published(names: Iterable[str]) -> bool:
    """Returns whether tensors' names are those of a published checkpoint."""
    return any(name.startswith(PREFIX) for name in names)


def read_published(path: Path) -> tuple[SelectorConfig, dict[str, np.ndarray]]:
    """Reads published weights from a file, or from the shards that an index names.

    Args:
        path: the file or the index.

    Returns:
        The configuration, and tensors by our names; those that have none keep theirs.

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
    own = {name: entry for name, entry in entries.items() if name.startswith(PREFIX)}
    shapes = [entry.shape for entry in own.values() if len(entry.shape) == 2]
    h, d = shapes[0] if shapes else (1, 1)
    with naming(path, TypeError, ValueError):
        config = VisionSelectorConfig(d, hidden_dim=h)
    return config, _read_tensors(own, _NAMES)


def _read_tensors(
    entries: Mapping[str, safetensors.TensorEntry], names: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Reads tensors that float32 holds, matrices as [in, out]."""
    kind = np.dtype(np.float32)
    arrays = {names.get(x, x): safetensors.read_tensor(e, dtype=kind) for x, e in entries.items()}
    return {name: array.T if array.ndim == 2 else array for name, array in arrays.items()}


def _read_glimpseprune(path: Path) -> tuple[GlimpsePruneConfig, dict[str, np.ndarray]]:
    """Reads GlimpsePrune's new modules."""
    entries, beside = torch_file.read_tensors(path), path.with_name(GLIMPSE_CONFIG)
    raw = read_json_object(beside)
    kind = raw.get("model_type")
    expect(f"{beside}: model_type", kind, kind in [*_KINDS], f"one of {', '.join(_KINDS)}")
    for name, only in _KINDS[kind].items():
        expect(f"{beside}: {name}", raw.get(name), raw.get(name) == only, repr(only))
    anchors = raw.get("anchor_positions")
    expect(f"{beside}: anchor_positions", anchors, not anchors, "none")
    is_qwen, state = kind.startswith("qwen"), entries.get("attn_fuser.cond_in_projs.0.weight")
    width = state.shape[-1] if state is not None and state.shape else 1
    fields = {x.name: raw.get(x.name) for x in dataclasses.fields(GlimpsePruneConfig)}
    fields |= {"text_width": raw.get("hidden_size"), "vision_width": width}
    fields["feature_width"] = fields["text_width"] if is_qwen else width
    with naming(beside, TypeError, ValueError):
        # LLaVA's are numbered by the blocks before a state, Qwen2.5-VL's by the one that it leaves.
        states = fields["selected_visual_layers"] = [
            state + is_qwen for state in raw.get("selected_visual_layers")
        ]
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        config = GlimpsePruneConfig(**fields)
    names = {
        "learnable_embeddings": "glimpse/embeddings",
        "le_norm.weight": "glimpse/scale",
        **_layer("le_proj", "glimpse"),
        **_layer("attn_fuser.attn_in_proj", "attention_in"),
        **_layer(f"attn_fuser.attn_out_projs.{len(states) - 1}", "out"),
    }
    for i in range(len(states)):
        names |= _layer(f"attn_fuser.cond_in_projs.{i}", f"state_{i}")
        for theirs, ours in _PARTS.items():
            names |= _layer(f"attn_fuser.layers.{i}.{theirs}", f"block_{i}/{ours}")
        for norm in ("norm1", "norm2"):
            names[f"attn_fuser.layers.{i}.{norm}.weight"] = f"block_{i}/{norm}"
    return config, _read_tensors(entries, names)


def _layer(theirs: str, ours: str) -> dict[str, str]:
    """Returns the names of a linear layer's weights."""
    return {f"{theirs}.weight": f"{ours}/kernel", f"{theirs}.bias": f"{ours}/bias"}
