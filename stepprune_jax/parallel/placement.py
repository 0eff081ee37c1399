"""Places arrays on the devices of a model's weights."""

import itertools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.stack import Params, has_large_layers
from stepprune_jax.models.weights import join_kernels
from stepprune_jax.parallel.sharding import BATCH
from stepprune_jax.user_input import UserError

T = TypeVar("T")  # a tree of arrays


def uses_joined_weights(platform: str, mesh: Mesh | None) -> bool:
    """Returns whether answers are computed with joined matrices.

    Joining helps on GPUs, and requires that every device holds all heads.
    """
    return platform == "gpu" and (mesh is None or mesh.shape.get("tensor", 1) == 1)


def prepare_to_answer(params: Params) -> Params:
    """Returns weights with matrices joined by `weights.join_kernels` if `uses_joined_weights`.

    The caller must drop its reference to `params`; otherwise both copies stay in memory.
    """
    platform, _ = devices_of(params)
    return join_kernels(params) if uses_joined_weights(platform, mesh_of(params)) else params


def devices_of(params: Params | Array) -> tuple[str, int]:
    """Returns the platform and the number of devices that hold the weights or an array."""
    devices = _sharding_of(params).device_set
    return next(iter(devices)).platform, len(devices)


def decodes_by_step(params: Params) -> bool:
    """Returns whether each decoding step is a separate program, instead of one loop for all steps.

    In a loop on a GPU, XLA would copy the slices of large layers at each step.
    """
    return devices_of(params)[0] == "gpu" and has_large_layers(params)


def _sharding_of(params: Params | Array) -> Any:
    """Returns the sharding of the first weight, without flattening the tree of weights."""
    while isinstance(params, dict):
        params = next(iter(params.values()))
    return params.sharding


def mesh_of(params: Params) -> Mesh | None:
    """Returns the mesh that weights are sharded over, or None on a single device."""
    mesh = getattr(_sharding_of(params), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def replicate_like(params: Params, tree: T) -> T:
    """Replicates arrays to the devices of the weights.

    Args:
        params: the weights.
        tree: a tree of arrays. With several processes, each process passes equal arrays.

    Returns:
        The tree with replicated arrays. Arrays that are already replicated there are not copied.
    """
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P())
    if not sharding.is_fully_addressable:  # several processes, where `device_put` cannot be used
        return jax.jit(lambda tree: tree, out_shardings=sharding)(tree)
    return jax.device_put(tree, sharding)


def row_count(mesh: Mesh | None) -> int:
    """Returns the number of devices that the rows of a batch are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _row_axes(mesh: Mesh, num_rows: int) -> tuple[str, ...] | None:
    """Returns the mesh axes over which rows are split, or None if `num_rows` is not divisible."""
    return None if num_rows % row_count(mesh) else BATCH


def local_rows(mesh: Mesh | None, num_rows: int) -> slice:
    """Returns the slice of a batch's rows that the devices of this process hold.

    Processes along a "tensor" axis hold the same rows and get the same slice.

    Args:
        mesh: the mesh; None selects all rows.
        num_rows: number of rows over all processes.

    Raises:
        UserError: the mesh gives this process rows that are not contiguous.
    """
    if mesh is None:
        return slice(0, num_rows)
    sharding = NamedSharding(mesh, P(_row_axes(mesh, num_rows)))
    device_indices: Any = sharding.addressable_devices_indices_map((num_rows,)).values()
    # Start and stop of the rows of each device; devices with equal rows count once.
    spans = sorted({row_slice.indices(num_rows)[:2] for (row_slice,) in device_indices})
    if any(stop != next_start for (_, stop), (next_start, _) in itertools.pairwise(spans)):
        raise UserError(
            f"the mesh {dict(mesh.shape)} gives process {jax.process_index()} rows that do not "
            "follow each other; build it with the processes in order along its first axes"
        )
    return slice(spans[0][0], spans[-1][1])


def place_rows(mesh: Mesh | None, tree: T, num_rows: int | None = None) -> T:
    """Places arrays with a leading row axis on a mesh.

    The rows are split over the mesh axes `BATCH` if these divide the number of rows. Otherwise the
    rows are replicated.

    Args:
        mesh: the mesh; None returns the arrays unchanged.
        tree: a tree of arrays. With `num_rows`, each array holds only the `local_rows` of this
            process.
        num_rows: number of rows over all processes; None if each array holds all rows.

    Returns:
        The tree with global arrays of all rows.
    """
    if mesh is None:
        return tree

    def place(leaf):
        num_global_rows = leaf.shape[0] if num_rows is None else num_rows
        sharding = NamedSharding(mesh, P(_row_axes(mesh, num_global_rows)))
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        shape = (num_global_rows, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    return jax.tree.map(place, tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies arrays to the host as numpy arrays.

    If an array is sharded over several processes, all of these processes must call this.
    """

    def to_numpy(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(to_numpy, tree)


def constrain_replicated(mesh: Mesh | None, tree: T) -> T:
    """Constrains arrays to be replicated over a mesh. For use inside a compiled program."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def constrain_rows(mesh: Mesh | None, tree: T) -> T:
    """Constrains arrays to be split by rows, and KV caches by rows and heads.

    For use inside a compiled program.

    Args:
        mesh: the mesh; None returns the arrays unchanged.
        tree: a tree of arrays with a leading row axis, and of `Cache` objects, whose keys and
            values have the axes [layers, rows, heads, ...].
    """
    if mesh is None:
        return tree

    def constrain(leaf, spec):
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def split_rows(leaf):
        return constrain(leaf, P(_row_axes(mesh, leaf.shape[0])) if jnp.ndim(leaf) else P())

    def split_rows_and_heads(leaf):
        num_rows, num_heads = leaf.shape[1:3]
        head_axis = None if num_heads % mesh.shape["tensor"] else "tensor"
        return constrain(leaf, P(None, _row_axes(mesh, num_rows), head_axis))

    def constrain_node(node):
        if not isinstance(node, Cache):
            return split_rows(node)
        return Cache(
            split_rows_and_heads(node.key),
            split_rows_and_heads(node.value),
            split_rows(node.length),
            split_rows(node.next_position),
        )

    return jax.tree.map(constrain_node, tree, is_leaf=lambda node: isinstance(node, Cache))
