"""Device meshes, and path rules that assign axes of weights to axes of the mesh.

Model code is independent of meshes. Weights and batches are placed by the rules below. The compiler
derives the placement of all other arrays.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    preset: str | Mapping[str, int] = "single", devices: Sequence[Any] | None = None
) -> Mesh:
    """Builds a mesh with the axes "data", "fsdp" and "tensor".

    Args:
        preset: one of `PRESETS`, or sizes by axis, as a mapping or as text such as
            "data=2,fsdp=-1". Absent axes have size 1, and one axis may be -1 for the remaining
            devices. The presets are
            "single": the first device;
            "data", "fsdp", "tensor": all devices on this axis;
            "data_tensor", "fsdp_tensor": two devices on "tensor", and the remaining devices on the
            first axis;
            "data_fsdp": the devices of each process on "fsdp", and the processes on "data".
        devices: devices to use in order; None selects all devices of jax.

    Returns:
        A mesh of three axes with automatic sharding.

    Raises:
        ValueError: the preset or an axis is unknown, or the sizes do not fit the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if preset == "single":
        devices = devices[:1]
    sizes = _parse_sizes(preset, devices) if isinstance(preset, str) else dict(preset)
    shape = [sizes.get(axis, 1) for axis in AXES]
    fixed_size = math.prod(size for size in shape if size != -1)
    if shape.count(-1) == 1 and fixed_size > 0 and len(devices) % fixed_size == 0:
        shape[shape.index(-1)] = len(devices) // fixed_size
    is_valid = sizes.keys() <= {*AXES} and min(shape) >= 1 and math.prod(shape) == len(devices)
    if not is_valid:
        raise UserError(
            f"mesh sizes {sizes} do not fit {len(devices)} devices; axes: {', '.join(AXES)}"
        )
    with naming(f"mesh {sizes}", ValueError):  # jax refuses shapes that a TPU's topology lacks
        return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _parse_sizes(preset: str, devices: Sequence[Any]) -> dict[str, int]:
    """Returns the sizes of mesh axes that a text describes.

    Args:
        preset: one of `PRESETS`, or text such as "data=2,fsdp=-1".
        devices: devices of the mesh.

    Returns:
        Sizes by axis. An axis of size -1 takes the remaining devices.

    Raises:
        ValueError: the text has another form.
    """
    if preset == "single":
        return {}
    if preset == "data_fsdp":
        num_processes = len({device.process_index for device in devices})
        return {"data": num_processes, "fsdp": -1}
    if preset in PRESETS:
        first_axis, _, second_axis = preset.partition("_")
        return {first_axis: -1, second_axis: 2} if second_axis else {first_axis: -1}
    try:
        axis_sizes = [text.split("=") for text in preset.split(",")]
        return {axis.strip(): int(size) for axis, size in axis_sizes}
    except ValueError:
        raise UserError(
            f"mesh {preset!r} is unknown, expected one of {', '.join(PRESETS)}, or sizes by axis, "
            "such as data=2,fsdp=-1"
        ) from None


def path_name(path: KeyPath) -> str:
    """Returns the keys of a tree path joined by "/", such as "vision/layers/norm1/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(name: str, rules: Rules) -> P:
    """Returns the spec of the first rule that matches a path, as in `shardings`.

    Raises:
        ValueError: no rule matches the path.
    """
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
        The tree with a `NamedSharding` in place of each leaf. An int8 matrix has two shardings, and
        its scales [columns] are sharded like its columns.

    Raises:
        ValueError: no rule matches a path, or the size of an axis is not divisible by the number of
            devices along its mesh axes.
    """

    def sharding_of(path, leaf):
        name = path_name(path)
        spec = spec_of(name, rules)
        for size, entry in zip(leaf.shape, spec, strict=False):
            # An entry of a spec is one mesh axis, a tuple of mesh axes, or None.
            mesh_axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            num_shards = math.prod(mesh.shape[axis] for axis in mesh_axes)
            if size % num_shards:
                raise UserError(
                    f"{name} of shape {tuple(leaf.shape)}: {size} is not divisible by the "
                    f"{num_shards} devices of mesh axes {mesh_axes}"
                )
        leaf_sharding = NamedSharding(mesh, spec)
        if not isinstance(leaf, Int8Kernel):
            return leaf_sharding
        full_spec = [*spec, *[None] * (len(leaf.shape) - len(spec))]  # one entry per axis
        scale_spec = P(*full_spec[:-2], full_spec[-1])  # scales have no axis of rows
        kernel: Any = leaf_sharding, NamedSharding(mesh, scale_spec)
        return Int8Kernel(*kernel)

    return jax.tree_util.tree_map_with_path(
        sharding_of, tree, is_leaf=lambda node: isinstance(node, Int8Kernel)
    )
