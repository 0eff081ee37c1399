"""Device meshes, and path rules that assign axes of weights to axes of the mesh.

Model code is independent of meshes. Weights and batches are placed by the rules below, and the
compiler derives the rest.
"""

import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.user_input import UserError, naming, require

AXES = ("data", "fsdp", "tensor")
PRESETS = ("single", "data", "fsdp", "tensor", "data_tensor", "fsdp_tensor", "data_fsdp")

# Ordered (pattern, spec) pairs, first match wins; paths are keys joined by "/". Those of a model's
# weights are its family's `SHARDING_RULES`.
Rules = Sequence[tuple[str, P]]

BATCH = ("data", "fsdp")

# Anything whose first axis is the batch: token ids, a `Sequence`, pixels.
BATCH_RULES: Rules = ((r".*", P(BATCH)),)


def build_mesh(
    preset: str | Mapping[str, int] = "single", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Builds a mesh with the axes "data", "fsdp" and "tensor".

    Args:
        preset: a name, or sizes by axis (absent axes are 1; one may be -1 for the rest), as a
            mapping or as text such as "data=2,fsdp=-1". "single": the first device. "data",
            "fsdp", "tensor": all devices on that axis. "data_tensor", "fsdp_tensor": two devices
            on "tensor", the others on the first. "data_fsdp": the devices of a process on "fsdp",
            the processes on "data".
        devices: devices to use in order; by default all that jax sees.

    Returns:
        A mesh of three axes with automatic sharding.

    Raises:
        ValueError: an unknown preset or axis, or sizes that do not fit the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if preset == "single":
        devices = devices[:1]
    sizes = _sizes(preset, devices) if isinstance(preset, str) else dict(preset)
    shape = [sizes.get(axis, 1) for axis in AXES]
    known = math.prod(size for size in shape if size != -1)
    if shape.count(-1) == 1 and known > 0 and len(devices) % known == 0:
        shape[shape.index(-1)] = len(devices) // known
    fits = sizes.keys() <= {*AXES} and min(shape) >= 1 and math.prod(shape) == len(devices)
    unlike = f"mesh sizes {sizes} do not fit {len(devices)} devices; axes: {', '.join(AXES)}"
    require(fits, unlike)
    with naming(f"mesh {sizes}", ValueError):  # as of a TPU whose chips lie otherwise
        return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _sizes(preset: str, devices: Sequence[jax.Device]) -> dict[str, int]:
    """Returns sizes by axis of a preset's name, or of text such as "data=2,fsdp=-1"."""
    if preset == "single":
        return {}
    if preset in PRESETS:
        first, _, second = preset.partition("_")
        if second == "fsdp":
            return {first: len({device.process_index for device in devices}), second: -1}
        return {first: -1} | ({second: 2} if second else {})
    try:
        pairs = [pair.split("=") for pair in preset.split(",")]
        return {axis.strip(): int(size) for axis, size in pairs}
    except ValueError:
        raise UserError(
            f"mesh {preset!r} is unknown, expected one of {', '.join(PRESETS)}, or sizes by axis, "
            "such as data=2,fsdp=-1"
        ) from None


def path_name(path: KeyPath) -> str:
    """Joins the keys of a tree path by "/", such as "vision/layers/norm1/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(name: str, rules: Rules) -> P:
    """Returns the spec of the first rule that matches."""
    for pattern, spec in rules:
        if matches(name, pattern):
            return spec
    raise ValueError(f"no sharding rule matches {name!r}")


def matches(name: str, pattern: str) -> bool:
    """Returns whether a rule's pattern matches a whole path or its last keys."""
    return re.fullmatch(rf"(.*/)?({pattern})", name) is not None


def shardings(tree: PyTree, rules: Rules, mesh: Mesh) -> PyTree:
    """Returns the shardings of every leaf of a tree of arrays or shapes.

    Args:
        tree: nested dicts, tuples and NamedTuples with leaves that have a `shape`.
        rules: ordered (pattern on the path, spec) pairs.
        mesh: result of `build_mesh`.

    Returns:
        The same tree with a `NamedSharding` for each leaf. The scales of an int8 matrix lie with
        its columns.

    Raises:
        ValueError: a path that no rule matches, or a dimension that its mesh axes do not divide.
    """

    def sharding(path, leaf):
        name = path_name(path)
        spec = spec_of(name, rules)
        for size, axes in zip(leaf.shape, spec, strict=False):
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            parts = math.prod(mesh.shape[axis] for axis in axes)
            cut = f"{size} is not divisible by the {parts} devices of mesh axes {axes}"
            require(size % parts == 0, f"{name} of shape {tuple(leaf.shape)}: {cut}")
        placed = NamedSharding(mesh, spec)
        if not isinstance(leaf, Int8Kernel):
            return placed
        axes = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        return Int8Kernel(placed, NamedSharding(mesh, P(*axes[:-2], axes[-1])))

    return jax.tree_util.tree_map_with_path(
        sharding, tree, is_leaf=lambda node: isinstance(node, Int8Kernel)
    )
