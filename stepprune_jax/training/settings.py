"""Reading and checking a run's configuration, before anything is loaded or compiled."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from stepprune_jax.data.survey import REMEDIES
from stepprune_jax.models import vlm
from stepprune_jax.models.layers import check_attention
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.parallel.accelerators import ACCELERATORS, Accelerator
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.training import selectors
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import nearest

# Fields that may change between a run and its continuation: they do not change what is learned.
# The model and the data are compared by their contents, not by where they lie.
FREE = (
    "log_every", "checkpoint_every", "keep_checkpoints", "max_skipped", "tensorboard", "wandb",
    "validation", "eval", "mesh", "cpu_devices", "accelerator", "model.folder",
    "model.vision_folder",
    "data.folder", "data.train_file", "data.image_folder", "data.linked_folders",
    "data.index_folder", "data.threads", "data.workers", "data.cache_gb",
    "data.validation_scenes", "data.test_scenes", "data.test_seed",
)  # fmt: skip

# Every field but those of the methods' groups and of `eval`, which are checked where they are read.
_FIELDS = {
    "": (
        "method", "seed", "steps", "batch_size", "text_gate_anneal", "mesh", "cpu_devices",
        "log_every", "checkpoint_every", "keep_checkpoints", "max_skipped", "tensorboard", "wandb",
        "model", "data", "optimizer", "accelerator", "validation", "eval",
    ),
    "model": ("folder", "vision_folder", "dtype", "attention", "remat", "rows_at_once"),
    "data": (
        "name", "folder", "train_file", "image_folder", "linked_folders", "index_folder",
        "missing", "unusable", "train_scenes", "validation_scenes", "test_scenes", "seed",
        "test_seed", "split_turns", "stats_images", "length_multiple", "length_group",
        "context_limit", "policy_text_limit", "cache_gb", "threads", "workers", "side", "grid",
        "emphasis",
    ),
    "optimizer": (
        "lr", "final_lr", "warmup", "weight_decay", "clip", "b1", "b2", "muon_lr",
    ),
    "accelerator": ("name", "count", "utilisation"),
    "validation": ("every", "folder", "questions", "budget", "max_new_tokens", "overlays"),
}  # fmt: skip

_COUNTS = (
    "steps", "batch_size", "log_every", "checkpoint_every", "keep_checkpoints", "max_skipped",
    "data.length_multiple", "data.length_group", "data.context_limit", "data.policy_text_limit",
    "data.threads", "data.stats_images", "validation.questions", "validation.max_new_tokens",
)  # fmt: skip
_NOT_NEGATIVE = (
    "optimizer.final_lr",
    "optimizer.weight_decay",
    "optimizer.muon_lr",
    "data.cache_gb",
)
_SHARES = ("optimizer.b1", "optimizer.b2", "text_gate_anneal")
_POSITIVE = ("optimizer.lr", "optimizer.clip")
# Groups and fields that a configuration may do without.
_OPTIONAL = ("eval", "accelerator", "data.side", "data.grid", "data.emphasis", "data.test_seed")


def check_config(config: Any) -> None:
    """Refuses a configuration that makes no sense.

    Args:
        config: the run's `ConfigDict`.

    Raises:
        ValueError: a field is missing or has a bad value; the message names it.
    """
    _check_names(config)
    values = flat(config)
    for name in _COUNTS:
        value = _get(values, name)
        _require(isinstance(value, int) and value >= 1, name, value, "an integer from 1")
    for name in (*_NOT_NEGATIVE, *_SHARES, *_POSITIVE):
        value = _get(values, name)
        number = isinstance(value, float | int) and math.isfinite(value)
        _require(number and value >= 0, name, value, "a number from 0")
    for name in _SHARES:
        _require(values[name] <= 1, name, values[name], "a share from 0 to 1")
    for name in _POSITIVE:
        _require(values[name] > 0, name, values[name], "above 0")
    warmup = _get(values, "optimizer.warmup")
    _require(
        isinstance(warmup, int) and 0 <= warmup < config.steps, "optimizer.warmup", warmup,
        f"an integer from 0, below config.steps ({config.steps})",
    )  # fmt: skip
    for name in ("data.missing", "data.unusable"):
        value = _get(values, name)
        _require(value in REMEDIES, name, value, f"one of {', '.join(REMEDIES)}")
    for name in (
        "seed", "data.seed", "data.workers", "validation.every", "validation.budget",
        "validation.overlays",
    ):  # fmt: skip
        value = _get(values, name)
        _require(isinstance(value, int) and value >= 0, name, value, "an integer from 0")
    if _get(values, "method") not in selectors.METHODS:
        known = ", ".join(selectors.METHODS)
        _require(False, "method", values["method"], f"one of {known}")
    rows = _get(values, "model.rows_at_once")
    _require(isinstance(rows, int) and rows >= 0, "model.rows_at_once", rows, "0 or a count")
    check_attention(_get(values, "model.attention"))
    dtypes = ("float32", "bfloat16")
    dtype = _get(values, "model.dtype")
    _require(dtype in dtypes, "model.dtype", dtype, f"one of {', '.join(dtypes)}")


def _check_names(config: Any) -> None:
    """Refuses fields that nothing reads, as typing errors are, and fields that are missing."""
    methods = (part for _, part in selectors.METHODS.values())
    for group, known in _FIELDS.items():
        if group and group in _OPTIONAL and group not in config:
            continue
        fields, prefix = (config[group], f"{group}.") if group else (config, "")
        if group:
            _require(isinstance(fields, ConfigDict), group, fields, f"a group with {known[0]}")
        known = known if group else (*known, *methods)
        for name in fields:
            if name not in known:
                raise ValueError(f"config.{prefix}{name} is no field.{nearest(name, known)}")
        for name in known:
            if name not in fields and prefix + name not in _OPTIONAL:
                raise ValueError(f"config.{prefix}{name} is missing")


def make_mesh(config: Any, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of a run, or None on a single device.

    Args:
        config: the run's `ConfigDict`; `mesh` is a preset of `build_mesh`, or sizes by axis.
        devices: devices to use; by default all that jax sees.

    Returns:
        The mesh.

    Raises:
        ValueError: an unknown preset, too many devices, or rows that do not divide over them.
    """
    if config.mesh == "single":
        processes = jax.process_count()
        _require(processes == 1, "mesh", "single", f"one for the {processes} processes of this run")
        return None
    mesh = build_mesh(config.mesh, devices)
    parts = row_count(mesh)
    expected = f"a multiple of the {parts} devices that rows are split over"
    _require(config.batch_size % parts == 0, "batch_size", config.batch_size, expected)
    return mesh


def make_setup(config: Any, model: LlavaConfig, mesh: Mesh | None = None) -> Setup:
    """The static part of the step.

    Args:
        config: the run's checked `ConfigDict`.
        model: the frozen model.
        mesh: from `make_mesh`.

    Returns:
        The setup.

    Raises:
        ValueError: the method's own fields are bad, a kernel needs another device, the mesh does
            not divide a weight, or the rows of a device cannot be taken so many at a time.
    """
    if config.model.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(f"attention 'cudnn' needs a GPU, jax uses {jax.default_backend()!r}")
    selector = selectors.build(config, model)
    if mesh is not None:
        shardings(
            vlm.abstract_params(model), model.family.SHARDING_RULES, mesh
        )  # before data are read
    parts = row_count(mesh)
    rows, each = config.model.rows_at_once, config.batch_size // parts
    _require(
        rows == 0 or rows >= each or each % rows == 0, "model.rows_at_once", rows,
        f"0 or a divisor of the {each} rows of each device",
    )  # fmt: skip
    return Setup(
        model=model, selector=selector, steps=config.steps,
        text_gate_anneal=config.text_gate_anneal, attention=config.model.attention,
        remat=config.model.remat, frozen_rows=rows * parts if rows < each else 0,
        **config.optimizer.to_dict(),
    )  # fmt: skip


def accelerator(config: Any) -> tuple[Accelerator, float]:
    """The accelerator that a dry run is for, and the share of its peak that is assumed.

    Args:
        config: the run's `ConfigDict` with its group `accelerator`.

    Returns:
        Both.

    Raises:
        ValueError: a field is missing or has a bad value.
    """
    values = flat(config)
    name, count, share = (
        _get(values, f"accelerator.{field}") for field in ("name", "count", "utilisation")
    )
    known = ", ".join(ACCELERATORS)
    _require(name in ACCELERATORS, "accelerator.name", name, f"one of {known}")
    _require(isinstance(count, int) and count >= 1, "accelerator.count", count, "1 or more")
    _require(0 < share <= 1, "accelerator.utilisation", share, "a share above 0, up to 1")
    return ACCELERATORS[name], float(share)


def flat(config: Any) -> dict[str, Any]:
    """The fields of a configuration by dotted name, as JSON has them."""

    def walk(prefix: str, value: Any):
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            yield prefix, value

    plain = config if isinstance(config, dict) else config.to_dict()
    return dict(walk("", json.loads(json.dumps(plain))))


def changed_fields(old: dict[str, Any], new: dict[str, Any], method: str) -> list[str]:
    """Fields that differ and change what is learned, as "name: old -> new".

    Args:
        old: `flat` of the run's configuration.
        new: `flat` of the one to go on with.
        method: what is trained; the group of another method does not matter.
    """
    others = [group for name, (_, group) in selectors.METHODS.items() if name != method]
    free = (*FREE, *others)
    names = sorted(
        name
        for name in {*old, *new}
        if not any(name == field or name.startswith(field + ".") for field in free)
    )
    return [
        f"config.{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _get(values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise ValueError(f"config.{name} is missing")
    return values[name]


def _require(holds: bool, name: str, found: Any, expected: str):
    if not holds:
        raise ValueError(f"config.{name} is {found!r}, expected {expected}")
