"""A trained policy as one safetensors file: weights, configuration, statistics, calibration.

Tensors are named by their paths ("encoder/block_0/mlp/up/kernel", "stats/mean"); the header's
metadata holds the rest as JSON, so that a file can be used without knowing how it was trained.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

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
    require,
)
from stepprune_jax.version import version

POLICY_FILE = "policy.safetensors"  # in a run's folder, and in a repository of the hub
FORMAT = "stepprune_policy"
VERSION = 1
_LISTED = 40  # tensors that a message names


def config_metadata(config: SelectorConfig) -> dict[str, str]:
    """Returns a policy's method and configuration, as stored in its file's metadata."""
    method = selector_of(config).name
    return {"method": method, "config": json.dumps(dataclasses.asdict(config))}


def save_policy(
    policy: TrainedPruner, path: str | Path, about: Mapping[str, object] | None = None
) -> Path:
    """Writes a policy as one safetensors file, atomically.

    Args:
        policy: the policy; its weights may be sharded.
        path: the file; parent folders are created.
        about: how it was trained, as JSON values; of these, only "model" is read again,
            the `model_identity` of the model that it was trained with.

    Returns:
        The path.

    Raises:
        ValueError: the weights do not fit the configuration, or `stop_bias` is not a number that
            float32 holds.
    """
    expect_type("policy", policy, TrainedPruner, "a policy, such as StepPrune.init returns")
    require(
        policy.params is not None, "policy has no weights, expected a policy from init or train"
    )
    path, stop_bias = local_path(path), float(policy.stop_bias)
    require(not path.is_dir(), f"{path} is a folder, expected a file such as {path / POLICY_FILE}")
    expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number")
    wanted = _wanted(policy.config, policy.stats is not None)
    tensors = weights.flatten(policy.params)
    if policy.stats is not None:
        tensors |= {f"stats/{name}": leaf for name, leaf in policy.stats._asdict().items()}
    _check_tensors("to save", policy.config, wanted, tensors)
    arrays = {name: np.asarray(jax.device_get(tensors[name])) for name in wanted}
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
    """Reads a policy written by `save_policy`, or one that a method's authors publish, strictly.

    The latter are VisionSelector's checkpoints, and GlimpsePrune's new modules.

    Args:
        path: the file, the name of a shipped policy, or "owner/name", as in `policy_file`.

    Returns:
        The method with its weights, of the dtype of its parameters: a `StepPrune` if that is what
        the file says. It stops by itself, where it can, until `with_budget` says otherwise.

    Raises:
        FileNotFoundError: there is no such file, here or on the hub.
        ValueError: a file of another kind or of a newer version, a configuration with unknown
            fields or bad values, or weights that do not fit it, all listed in one message.
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
    _check_sizes(path, config, entries)
    wanted = _wanted(config, any(name.startswith("stats/") for name in entries))
    _check_tensors(f"in {path}", config, wanted, entries)
    tensors = {
        name: jnp.asarray(safetensors.read_tensor(entries[name], dtype=leaf.dtype), leaf.dtype)
        for name, leaf in wanted.items()
    }
    stats = {name: tensors.pop(f"stats/{name}", None) for name in FeatureStats._fields}
    stats = None if stats["var"] is None else FeatureStats(**stats)
    good = stats is None or not (np.asarray(stats.var) < 0).any()
    require(good, f"{path}: 'stats/var' has variances below 0, expected numbers from 0")
    return selector_of(config).replace(
        params=weights.unflatten(tensors),
        stats=stats,
        stop_bias=float(stop_bias),
        calibration=calibration,
    )


def read_about(path: str | Path) -> dict[str, object]:
    """Returns what a policy's file says about its training, which may be nothing."""
    file, about = policy_file(path), f"{path}: about"
    if file.name in (safetensors.INDEX_NAME, GLIMPSE_FILE):
        return {}
    _, metadata = safetensors.read_contents(file)
    return as_object(parse_json(metadata.get("about", "{}"), about), about)


def _load_published(path: Path) -> TrainedPruner:
    """Reads a selector's weights from its authors' file, or by the index of a checkpoint."""
    config, arrays = read_published(path)
    wanted = _wanted(config, has_stats=False)
    _check_tensors(f"in {path}", config, wanted, arrays)
    tensors = {name: jnp.asarray(arrays[name], leaf.dtype) for name, leaf in wanted.items()}
    return selector_of(config).replace(params=weights.unflatten(tensors))


def policy_file(path: str | Path) -> Path:
    """Finds a policy's file, downloading it from the hub if requested.

    That is a file; or the name of a shipped policy; or a folder, or a repository of the hub, that
    holds `POLICY_FILE` or a published checkpoint (then the result may be its index): "owner/name"
    or "owner/name@revision", with "hub:" in front of it if there is a local folder of the owner's
    name.
    """
    file, shipped = local_path(path), find_shipped_policy(path)
    if file.is_file():
        return file
    if shipped is not None:
        return shipped
    if file.is_dir():
        own = file / POLICY_FILE
        found = own if own.is_file() else find_published(file)
        if found is not None:
            return found
        raise FileNotFoundError(f"the folder {file} has no {POLICY_FILE}")
    missing = or_shipped(f"no policy file at {path}", path, "policy", policy_names())
    source = hub.find_repository(path, missing, anyone=True)
    files = (POLICY_FILE, safetensors.INDEX_NAME, GLIMPSE_FILE, GLIMPSE_CONFIG)
    folder = hub.download(source, files)
    file = folder / POLICY_FILE
    found = file if file.is_file() else download_published(source, folder)
    if found is None:
        raise FileNotFoundError(f"{source} on the Hugging Face hub has no {POLICY_FILE}")
    return found


def _wanted(config: SelectorConfig, has_stats: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype by name of every tensor in a policy's file."""
    method = selector_of(config)
    wanted = weights.flatten(jax.eval_shape(lambda: method.draw_params(jax.random.key(0))))
    if has_stats:
        stats = jax.eval_shape(lambda: FeatureStats.start(config.feature_width))
        wanted |= {f"stats/{name}": leaf for name, leaf in stats._asdict().items()}
    return wanted


def _check_sizes(
    path: Path,
    config: SelectorConfig,
    entries: Mapping[str, safetensors.TensorEntry],
) -> None:
    """Rejects sizes beyond those of the tensors, before lists of that size are built."""
    widest = max((size for entry in entries.values() for size in entry.shape), default=0)
    widths = ("feature_width", "text_width", "policy_width", "mlp_ratio")
    limits = dict.fromkeys(("encoder_layers", "decoder_layers"), len(entries))
    for name, most in (dict.fromkeys(widths, widest) | limits).items():
        size, field = getattr(config, name, 0), f"{path}: its {type(config).__name__}.{name}"
        expect(field, size, size <= most, f"at most {most}, the size of its tensors")


def _check_tensors(
    place: str,
    config: SelectorConfig,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    stored: Mapping[str, jax.Array | np.ndarray | safetensors.TensorEntry],
) -> None:
    """Lists missing, mis-shaped, wrongly typed and unused tensors, one per line, in one error."""
    lines = [f"  missing: {name}" for name in wanted if name not in stored]
    for name, leaf in stored.items():
        if name not in wanted:
            lines.append(f"  unused: {name}")
        elif tuple(leaf.shape) != wanted[name].shape:
            expected = list(wanted[name].shape)
            lines.append(f"  wrong shape: {name} is {list(leaf.shape)}, expected {expected}")
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            lines.append(f"  wrong dtype: {name} is {leaf.dtype}, expected floating point")
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"  and {len(lines) - _LISTED} more"]
    if lines:
        kind = type(config).__name__
        raise UserError(f"the weights {place} do not fit their {kind}:\n" + "\n".join(lines))


def read_config(path: Path, metadata: Mapping[str, str]) -> SelectorConfig:
    """Reads the configuration of a policy from metadata as written by `config_metadata`."""
    method, known = metadata.get("method"), weighted()
    expect(f"{path}: the method of its policy", method, method in known, f"one of {(*known,)}")
    kind = known[method].config_type
    with naming(path, TypeError, ValueError):
        fields = as_object(parse_json(metadata.get("config", ""), kind.__name__), kind.__name__)
        if kind is PolicyConfig:  # in files from when there was another gate
            gate = fields.pop("gate", "vp")
            expect(f"{kind.__name__}.gate", gate, gate == "vp", "'vp', the only one")
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(kind)})
        newer = f"{kind.__name__} has no {', '.join(unknown)}: was it written by a newer version?"
        require(not unknown, newer)
        # JSON has no tuples, and lists cannot be hashed.
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
