"""Device meshes, and path rules that assign axes of weights to axes of the mesh.

Model code is independent of meshes. Weights and batches are placed by the rules below. The compiler
derives the placement of all other arrays.
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
from stepprune_jax.user_input import UserError, naming

AXES = ("data", "fsdp", "tensor")
PRESETS = ("single", "data", "fsdp", "tensor", "data_tensor", "fsdp_tensor", "data_fsdp")

# Ordered (pattern, spec) pairs. The first pattern that matches a path applies. A path is its keys
# joined by "/". Each model family defines `SHARDING_RULES` for its weights.
Rules = Sequence[tuple[str, P]]

# Mesh axes that the rows of a batch are split over.
BATCH = ("data", "fsdp")

# Rules for arrays whose first axis is the batch: token ids, a `Sequence`, pixels.
BATCH_RULES: Rules = ((r".*", P(BATCH)),)


def build_mesh(
    preset: str | Mapping[str, int] = "single", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Builds a mesh with the axes "data", "fsdp" and "tensor".

    Args:
        preset: a name, or sizes by axis, as a mapping or as text such as "data=2,fsdp=-1". Absent
            axes have size 1, and one axis may be -1 for the remaining devices. "single": the first
            device. "data", "fsdp", "tensor": all devices on that axis. "data_tensor",
            "fsdp_tensor": two devices on "tensor", the remaining devices on the first axis.
            "data_fsdp": the devices of a process on "fsdp", the processes on "data".
        devices: devices to use in order; None selects all devices of jax.

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
    known_size = math.prod(size for size in shape if size != -1)
    if shape.count(-1) == 1 and known_size > 0 and len(devices) % known_size == 0:
        shape[shape.index(-1)] = len(devices) // known_size
    is_valid = sizes.keys() <= {*AXES} and min(shape) >= 1 and math.prod(shape) == len(devices)
    if not is_valid:
        raise UserError(
            f"mesh sizes {sizes} do not fit {len(devices)} devices; axes: {', '.join(AXES)}"
        )
    with naming(f"mesh {sizes}", ValueError):  # jax refuses shapes that a TPU's topology lacks
        return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _sizes(preset: str, devices: Sequence[jax.Device]) -> dict[str, int]:
    """Parses the name of a preset, or text such as "data=2,fsdp=-1", to sizes by axis."""
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
    """Returns the keys of a tree path joined by "/", such as "vision/layers/norm1/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(name: str, rules: Rules) -> P:
    """Returns the spec of the first rule that matches a path, and raises if none does."""
    for pattern, spec in rules:
        if matches(name, pattern):
            return spec
    raise ValueError(f"no sharding rule matches {name!r}")


def matches(name: str, pattern: str) -> bool:
    """Returns whether a rule's pattern matches all keys of a path or its last keys."""
    return re.fullmatch(rf"(.*/)?({pattern})", name) is not None


def shardings(tree: PyTree, rules: Rules, mesh: Mesh) -> PyTree:
    """Returns the sharding of every leaf of a tree.

    Args:
        tree: a pytree whose leaves have a `shape`, such as arrays.
        rules: (pattern, spec) pairs; the first pattern that matches a leaf's path applies.
        mesh: result of `build_mesh`.

    Returns:
        The same tree with a `NamedSharding` for each leaf. The scales of an int8 matrix are
        sharded like its columns.

    Raises:
        ValueError: no rule matches a path, or a dimension is not divisible by its mesh axes.
    """

    def sharding_of(path, leaf):
        name = path_name(path)
        spec = spec_of(name, rules)
        for size, axes in zip(leaf.shape, spec, strict=False):
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            num_parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % num_parts:
                raise UserError(
                    f"{name} of shape {tuple(leaf.shape)}: {size} is not divisible by the "
                    f"{num_parts} devices of mesh axes {axes}"
                )
        leaf_sharding = NamedSharding(mesh, spec)
        if not isinstance(leaf, Int8Kernel):
            return leaf_sharding
        axes = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        return Int8Kernel(leaf_sharding, NamedSharding(mesh, P(*axes[:-2], axes[-1])))

    return jax.tree_util.tree_map_with_path(
        sharding_of, tree, is_leaf=lambda node: isinstance(node, Int8Kernel)
    )
