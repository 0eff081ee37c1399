"""A trained policy as one safetensors file: weights, configuration, statistics, calibration.

Tensors are named by their paths ("encoder/block_0/mlp/up/kernel", "stats/mean"); the header's
metadata holds the rest as JSON, so that a file can be used without knowing how it was trained.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.checkpoints import hub, safetensors
from stepprune_jax.checkpoints.shipped import find_shipped_policy, or_shipped, policy_names
from stepprune_jax.data.json_files import as_object, parse_json
from stepprune_jax.models import weights
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.policy import FeatureStats
from stepprune_jax.pruning import Policy, TrainedConfig, method_of, trained_methods
from stepprune_jax.pruning.calibration import read_calibration
from stepprune_jax.settings import is_number
from stepprune_jax.version import version

POLICY_FILE = "policy.safetensors"  # in a run's folder, and in a repository of the hub
FORMAT = "stepprune_policy"
VERSION = 1
_LISTED = 40  # tensors that a message names


def config_metadata(config: TrainedConfig) -> dict[str, str]:
    """Returns a policy's method and configuration, as stored in its file's metadata."""
    method = method_of(config).name
    return {"method": method, "config": json.dumps(dataclasses.asdict(config))}


def save_policy(policy: Policy, path: str | Path, about: dict[str, Any] | None = None) -> Path:
    """Writes a policy as one safetensors file, atomically.

    Args:
        policy: the policy; its weights may be sharded.
        path: the file; parent folders are created.
        about: how it was trained, as JSON values; for readers, ignored by `load_policy`.

    Returns:
        The path.

    Raises:
        ValueError: the weights do not fit the configuration, or `stop_bias` is not a number that
            float32 holds.
    """
    path = Path(path)
    if not is_number(float(policy.stop_bias)):
        raise ValueError(f"stop_bias is {policy.stop_bias}, expected a finite number")
    wanted = _wanted(policy.config, policy.stats is not None)
    tensors = weights.flatten(policy.params)
    if policy.stats is not None:
        tensors |= {f"stats/{name}": leaf for name, leaf in policy.stats._asdict().items()}
    problems = _problems(wanted, {name: (leaf.shape, leaf.dtype) for name, leaf in tensors.items()})
    if problems:
        kind = type(policy.config).__name__
        raise ValueError(f"the weights to save do not fit their {kind}:\n{problems}")
    arrays = {name: np.asarray(jax.device_get(tensors[name])) for name in wanted}
    metadata = {
        "kind": FORMAT,
        "version": str(VERSION),
        "package_version": version(),
        "stop_bias": json.dumps(float(policy.stop_bias)),
        **config_metadata(policy.config),
    }
    if policy.calibration is not None:
        metadata["calibration"] = json.dumps(policy.calibration.as_json())
    if about is not None:
        metadata["about"] = json.dumps(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_file(path, specs, arrays.values(), metadata)
    return path


def load_policy(path: str | Path) -> Policy:
    """Reads a policy written by `save_policy`, strictly.

    Fields of `PolicyConfig` that an older file lacks take their defaults.

    Args:
        path: the file, the name of a shipped policy, or "owner/name", as in `policy_file`.

    Returns:
        The policy, with weights of the dtype of `init_policy`.

    Raises:
        FileNotFoundError: there is no such file, here or on the hub.
        ValueError: a file of another kind or of a newer version, a configuration with unknown
            fields or bad values, or weights that do not fit it, all listed in one message.
    """
    path = policy_file(path)
    entries, metadata = safetensors.read_contents(path)
    if metadata.get("kind") != FORMAT:
        raise ValueError(
            f"{path} is a safetensors file but not a policy: expected one written by save_policy "
            f"(metadata kind {FORMAT!r}), found tensors such as {', '.join(list(entries)[:3])}"
        )
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} has format version {metadata.get('version')}, this package reads {VERSION}; "
            f"it was written by version {metadata.get('package_version')} of the package"
        )
    config = read_config(path, metadata)
    stop_bias = parse_json(metadata.get("stop_bias", "0"), f"{path}: stop_bias")
    if not is_number(stop_bias):
        raise ValueError(f"{path}: stop_bias is {stop_bias!r}, expected a finite number")
    calibration = None
    if "calibration" in metadata:
        try:
            calibration = read_calibration(parse_json(metadata["calibration"], "its calibration"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    _check_sizes(path, config, entries)
    has_stats = any(name.startswith("stats/") for name in entries)
    wanted = _wanted(config, has_stats)
    problems = _problems(wanted, {name: (e.shape, e.dtype) for name, e in entries.items()})
    if problems:
        kind = type(config).__name__
        raise ValueError(f"the weights in {path} do not fit its {kind}:\n{problems}")
    tensors = {
        name: jnp.asarray(safetensors.read_tensor(entries[name], dtype=leaf.dtype), leaf.dtype)
        for name, leaf in wanted.items()
    }
    broken = [name for name, leaf in tensors.items() if not np.isfinite(np.asarray(leaf)).all()]
    if broken:
        raise ValueError(f"{path}: {broken[0]!r} has values that are not finite")
    stats = None
    if has_stats:
        stats = FeatureStats(
            **{name: tensors.pop(f"stats/{name}") for name in FeatureStats._fields}
        )
        if (np.asarray(stats.var) < 0).any():
            raise ValueError(f"{path}: 'stats/var' has variances below 0, expected numbers from 0")
    return Policy(weights.unflatten(tensors), config, stats, float(stop_bias), calibration)


def policy_file(path: str | Path) -> Path:
    """Finds a policy's file, downloading it from the hub if requested.

    Args:
        path: the file; or the name of a shipped policy; or the repository of the hub that holds
            `POLICY_FILE`, "owner/name" or "owner/name@revision"; "hub:owner/name" if there is a
            local folder of the owner's name.

    Returns:
        The local file.

    Raises:
        FileNotFoundError: there is no such file, here or on the hub.
        ValueError: the path is a folder.
    """
    file, shipped = Path(path), find_shipped_policy(path)
    if file.is_file():
        return file
    if shipped is not None:
        return shipped
    if file.is_dir():
        raise ValueError(f"{file} is a folder, expected a policy file written by save_policy")
    missing = or_shipped(f"no policy file at {path}", path, "policy", policy_names())
    source = hub.find_repository(path, missing, anyone=True)
    file = hub.download(source, (POLICY_FILE,)) / POLICY_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{source} on the Hugging Face hub has no {POLICY_FILE}")
    return file


def check_fits(policy: Policy, config: ModelConfig) -> None:
    """Checks that a policy fits a model, before anything is compiled.

    Args:
        policy: the policy.
        config: configuration of the model.

    Raises:
        ValueError: a width differs; the message names all that do.
    """
    widths = [("feature_width", policy.config.feature_width, "vision", config.feature_width)]
    if policy.config.text_width:
        widths.append(("text_width", policy.config.text_width, "text", config.text.hidden_size))
    wrong = [
        f"its {name} is {width}, the model's {part} hidden_size {expected}"
        for name, width, part, expected in widths
        if width != expected
    ]
    if wrong:
        raise ValueError("the policy does not fit the model: " + "; ".join(wrong))


def _wanted(config: TrainedConfig, has_stats: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype by name of every tensor in a policy's file."""
    method = method_of(config)
    wanted = weights.flatten(jax.eval_shape(lambda: method.init(jax.random.key(0))))
    if has_stats:
        stats = jax.eval_shape(lambda: FeatureStats.start(config.feature_width))
        wanted |= {f"stats/{name}": leaf for name, leaf in stats._asdict().items()}
    return wanted


def _check_sizes(
    path: Path,
    config: TrainedConfig,
    entries: Mapping[str, safetensors.TensorEntry],
) -> None:
    """Rejects sizes beyond those of the tensors, before lists of that size are built."""
    widest = max((size for entry in entries.values() for size in entry.shape), default=0)
    widths = ("feature_width", "text_width", "policy_width", "mlp_ratio")
    limits = dict.fromkeys(("encoder_layers", "decoder_layers"), len(entries))
    for name, most in (dict.fromkeys(widths, widest) | limits).items():
        size = getattr(config, name, 0)
        if size > most:
            raise ValueError(
                f"{path}: its {type(config).__name__}.{name} is {size}, expected at most {most}, "
                "the size of its tensors"
            )


def _problems(wanted: dict[str, Any], stored: dict[str, tuple[tuple, Any]]) -> str:
    """Lists missing, mis-shaped, wrongly typed and unused tensors, one per line."""
    lines = []
    for name, leaf in wanted.items():
        if name not in stored:
            lines.append(f"  missing: {name} {list(leaf.shape)}")
            continue
        shape, dtype = stored[name]
        if tuple(shape) != leaf.shape:
            lines.append(f"  wrong shape: {name} is {list(shape)}, expected {list(leaf.shape)}")
        elif not jnp.issubdtype(dtype, jnp.floating):
            lines.append(f"  wrong dtype: {name} is {dtype}, expected floating point")
    lines += [f"  unused: {name}" for name in stored if name not in wanted]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"  and {len(lines) - _LISTED} more"]
    return "\n".join(lines)


def read_config(path: Path, metadata: Mapping[str, str]) -> TrainedConfig:
    """Reads the configuration of a policy.

    Args:
        path: file of the metadata, for messages.
        metadata: metadata as written by `config_metadata`.

    Returns:
        The configuration.

    Raises:
        ValueError: an unknown method or field, or a bad value; the message names the file.
    """
    method, known = metadata.get("method", "stepprune"), trained_methods()  # absent in older files
    if method not in known:
        raise ValueError(
            f"{path} holds a policy of method {method!r}, expected one of {tuple(known)}"
        )
    kind = known[method].config_type
    where = f"{path}: its {kind.__name__}"
    fields = as_object(parse_json(metadata.get("config", ""), where), where)
    unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(
            f"{path}: its {kind.__name__} has unknown field(s) {', '.join(unknown)}; it may have "
            "been written by a newer version of this package"
        )
    # JSON has no tuples, and lists cannot be hashed.
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
