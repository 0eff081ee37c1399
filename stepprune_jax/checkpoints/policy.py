"""Reads and writes trained policies as single safetensors files.

The tensors are the weights and the feature statistics. A tensor's name is its parameter path, such
as "encoder/block_0/mlp/up/kernel" or "stats/mean". The header's metadata holds method,
configuration, stop bias and calibration as JSON, so the file is complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.checkpoints import hub, safetensors
from stepprune_jax.checkpoints.published import (
    GLIMPSE_CONFIG,
    GLIMPSE_FILE,
    download_published,
    find_published,
    is_published,
    read_published,
)
from stepprune_jax.checkpoints.shipped import find_shipped_policy, or_shipped, policy_names
from stepprune_jax.data.json_files import as_object, parse_json
from stepprune_jax.models import weights
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.registry import selector_of, weighted
from stepprune_jax.selectors import SelectorConfig, TrainedPruner
from stepprune_jax.selectors.calibration import read_calibration
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import (
    UserError,
    expect,
    expect_type,
    local_path,
    naming,
)
from stepprune_jax.version import version

POLICY_FILE = "policy.safetensors"  # in a run's folder, and in a repository of the hub
FORMAT = "stepprune_policy"
VERSION = 1
# Longer lists of tensors would hide the first line of an error message.
_MAX_LISTED = 40


def config_metadata(config: SelectorConfig) -> dict[str, str]:
    """Returns the metadata entries "method" and "config" of a policy's file."""
    fields: Any = config
    method = selector_of(config).name
    return {"method": method, "config": json.dumps(dataclasses.asdict(fields))}


def save_policy(
    policy: TrainedPruner, path: str | Path, about: Mapping[str, object] | None = None
) -> Path:
    """Writes a policy as one safetensors file, atomically.

    Args:
        policy: the policy; its weights may be sharded.
        path: the file to write. Missing parent folders are created.
        about: JSON values that describe the training, for readers of the file. The package itself
            reads only "model", the `model_identity` of the model that the policy was trained with.

    Returns:
        The path.

    Raises:
        ValueError: the weights do not fit the configuration, or `stop_bias` is not a float32
            number.
    """
    expect_type("policy", policy, TrainedPruner, "a policy, such as StepPrune.init returns")
    if policy.params is None:
        raise UserError("policy has no weights, expected a policy from init or train")
    path, stop_bias = local_path(path), float(policy.stop_bias)
    if path.is_dir():
        raise UserError(f"{path} is a folder, expected a file such as {path / POLICY_FILE}")
    expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number")
    expected_tensors = _expected_tensors(policy.config, policy.stats is not None)
    tensors = weights.flatten(policy.params)
    if policy.stats is not None:
        tensors |= {f"stats/{name}": leaf for name, leaf in policy.stats._asdict().items()}
    _check_tensors("to save", policy.config, expected_tensors, tensors)  # raises if they do not fit
    arrays = {name: np.asarray(jax.device_get(tensors[name])) for name in expected_tensors}
    metadata = {
        "kind": FORMAT,
        "version": str(VERSION),
        "package_version": version(),
        "stop_bias": json.dumps(stop_bias),
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


def load_policy(path: str | Path) -> TrainedPruner:
    """Loads a policy from a file of `save_policy` or from a published checkpoint.

    Published checkpoints are VisionSelector's and GlimpsePrune's.

    Args:
        path: the file, the name of a shipped policy, or "owner/name", as in `policy_file`.

    Returns:
        The pruning method that the file names, such as a `StepPrune`, with its weights on the
        default device. If the method has a learned stop, this stop ends the selection until
        `with_budget` sets another budget.

    Raises:
        FileNotFoundError: there is no such file, locally or on the hub.
        ValueError: the file has another format or a newer version, its configuration has unknown
            fields or bad values, or its weights do not fit the configuration. One message lists all
            tensors that do not fit.
    """
    path = policy_file(path)
    if path.name in (safetensors.INDEX_NAME, GLIMPSE_FILE):
        return _load_published(path)
    entries, metadata = safetensors.read_contents(path)
    if is_published(entries):
        return _load_published(path)
    if (metadata.get("kind"), metadata.get("version")) != (FORMAT, str(VERSION)):
        raise UserError(
            f"{path} is not a policy of format version {VERSION}, as save_policy writes it: it has "
            f"version {metadata.get('version')}, and tensors such as {', '.join([*entries][:3])}"
        )
    config, calibration = read_config(path, metadata), None
    with naming(path, TypeError, ValueError):
        stop_bias = parse_json(metadata.get("stop_bias", ""), "stop_bias")
        expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number")
        if "calibration" in metadata:
            calibration = read_calibration(parse_json(metadata["calibration"], "calibration"))
    # The sizes are checked first, because `_expected_tensors` builds trees of these sizes.
    _check_sizes(path, config, entries)
    has_stats = any(name.startswith("stats/") for name in entries)
    expected_tensors = _expected_tensors(config, has_stats)
    _check_tensors(f"in {path}", config, expected_tensors, entries)
    tensors = {
        name: jnp.asarray(safetensors.read_tensor(entries[name], dtype=leaf.dtype), leaf.dtype)
        for name, leaf in expected_tensors.items()
    }
    stats = None
    if has_stats:
        stats = FeatureStats(*(tensors.pop(f"stats/{name}") for name in FeatureStats._fields))
        if (np.asarray(stats.var) < 0).any():
            raise UserError(f"{path}: 'stats/var' has variances below 0, expected numbers from 0")
    return selector_of(config).replace(
        params=weights.unflatten(tensors),
        stats=stats,
        stop_bias=float(stop_bias),
        calibration=calibration,
    )


def read_about(path: str | Path) -> dict[str, object]:
    """Reads the description of a policy's training, the `about` of `save_policy`.

    Returns:
        JSON values by name; empty if the file has no description.
    """
    file, about = policy_file(path), f"{path}: about"
    if file.name in (safetensors.INDEX_NAME, GLIMPSE_FILE):
        return {}
    _, metadata = safetensors.read_contents(file)
    return as_object(parse_json(metadata.get("about", "{}"), about), about)


def _load_published(path: Path) -> TrainedPruner:
    """Loads a policy from a published checkpoint, given by a path of `find_published`."""
    config, arrays = read_published(path)
    expected_tensors = _expected_tensors(config, has_stats=False)
    _check_tensors(f"in {path}", config, expected_tensors, arrays)
    tensors = {
        name: jnp.asarray(arrays[name], leaf.dtype) for name, leaf in expected_tensors.items()
    }
    return selector_of(config).replace(params=weights.unflatten(tensors))


def policy_file(path: str | Path) -> Path:
    """Finds a policy's file, and downloads it if the path names a repository of the hub.

    Args:
        path: one of
            a file;
            the name of a shipped policy;
            a folder that holds `POLICY_FILE` or a published checkpoint;
            a repository that holds one of these, as "owner/name" or "owner/name@revision". The
            prefix "hub:" is necessary if a local folder has the owner's name.

    Returns:
        The local file. For a published checkpoint in shards it is the index.

    Raises:
        FileNotFoundError: the path names none of these, or the download failed.
    """
    file_or_folder, shipped_file = local_path(path), find_shipped_policy(path)
    if file_or_folder.is_file():
        return file_or_folder
    if shipped_file is not None:
        return shipped_file
    if file_or_folder.is_dir():
        folder = file_or_folder
        if (folder / POLICY_FILE).is_file():
            return folder / POLICY_FILE
        published_file = find_published(folder)
        if published_file is None:
            raise FileNotFoundError(f"the folder {folder} has no {POLICY_FILE}")
        return published_file
    missing = or_shipped(f"no policy file at {path}", path, "policy", policy_names())
    repository = hub.find_repository(path, missing, allow_any_owner=True)
    # The weights of a published checkpoint in shards are downloaded after its index.
    names = (POLICY_FILE, safetensors.INDEX_NAME, GLIMPSE_FILE, GLIMPSE_CONFIG)
    folder = hub.download(repository, names)
    if (folder / POLICY_FILE).is_file():
        return folder / POLICY_FILE
    published_file = download_published(repository, folder)
    if published_file is None:
        raise FileNotFoundError(f"{repository} on the Hugging Face hub has no {POLICY_FILE}")
    return published_file


def _expected_tensors(config: SelectorConfig, has_stats: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every tensor in a policy's file, by name.

    Args:
        config: configuration of the policy.
        has_stats: whether the file has feature statistics, the tensors "stats/...".
    """
    method = selector_of(config)
    tensors = weights.flatten(jax.eval_shape(lambda: method.init_params(jax.random.key(0))))
    if has_stats:
        stats = jax.eval_shape(lambda: FeatureStats.start(config.feature_width))
        tensors |= {f"stats/{name}": leaf for name, leaf in stats._asdict().items()}
    return tensors


def _check_sizes(
    path: Path,
    config: SelectorConfig,
    entries: Mapping[str, safetensors.TensorEntry],
) -> None:
    """Raises an error if the configuration has sizes that no tensor of the file has.

    A parameter tree of the size in a damaged configuration could exhaust memory.

    Args:
        path: the file, for messages.
        config: configuration of the policy.
        entries: location and shape of each tensor of the file, by name.
    """
    largest_axis = max((size for entry in entries.values() for size in entry.shape), default=0)
    widths = ("feature_width", "text_width", "policy_width", "mlp_ratio")
    limits = dict.fromkeys(widths, largest_axis)
    limits |= dict.fromkeys(("encoder_layers", "decoder_layers"), len(entries))
    for name, limit in limits.items():
        size, field = getattr(config, name, 0), f"{path}: its {type(config).__name__}.{name}"
        expect(field, size, size <= limit, f"at most {limit}, the size of its tensors")


def _check_tensors(
    place: str,
    config: SelectorConfig,
    expected: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, jax.Array | np.ndarray | safetensors.TensorEntry],
) -> None:
    """Raises one error that lists missing, unused, mis-shaped and non-floating tensors.

    Args:
        place: where the tensors are, for the message, such as "in FILE".
        config: configuration of the policy, for the message.
        expected: result of `_expected_tensors`.
        tensors: the tensors to check, by name.
    """
    lines = [f"  missing: {name}" for name in expected if name not in tensors]
    for name, leaf in tensors.items():
        if name not in expected:
            lines.append(f"  unused: {name}")
        elif tuple(leaf.shape) != expected[name].shape:
            shape = list(expected[name].shape)
            lines.append(f"  wrong shape: {name} is {list(leaf.shape)}, expected {shape}")
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            lines.append(f"  wrong dtype: {name} is {leaf.dtype}, expected floating point")
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"  and {len(lines) - _MAX_LISTED} more"]
    if lines:
        config_name = type(config).__name__
        title = f"the weights {place} do not fit their {config_name}:"
        raise UserError("\n".join([title, *lines]))


def read_config(path: Path, metadata: Mapping[str, str]) -> SelectorConfig:
    """Reads the configuration of a policy from its file's metadata.

    Args:
        path: the file, for messages.
        metadata: metadata with the entries of `config_metadata`.

    Returns:
        The configuration.

    Raises:
        ValueError: the method or a field is unknown, or a value is bad.
    """
    methods: dict[str | None, Any] = {**weighted()}
    method = metadata.get("method")
    expect(f"{path}: the method of its policy", method, method in methods, f"one of {(*methods,)}")
    config_type: Any = methods[method].config_type
    config_name = config_type.__name__
    with naming(path, TypeError, ValueError):
        fields = as_object(parse_json(metadata.get("config", ""), config_name), config_name)
        if config_type is PolicyConfig:  # older files name the gate, because there were two gates
            gate = fields.pop("gate", "vp")
            expect(f"{config_name}.gate", gate, gate == "vp", "'vp', the only one")
        field_names = {field.name for field in dataclasses.fields(config_type)}
        unknown_names = sorted(fields.keys() - field_names)
        if unknown_names:
            names = ", ".join(unknown_names)
            raise UserError(f"{config_name} has no {names}: was it written by a newer version?")
        # JSON has no tuples, and a hashable configuration cannot hold lists.
        hashable_fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return config_type(**hashable_fields)
