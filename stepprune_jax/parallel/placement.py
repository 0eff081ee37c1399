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
    """Joins matrices with `weights.join_kernels` if `uses_joined_weights`, and returns the weights.

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
    sharding = _sharding_of(params)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def replicate_like(params: Params, tree: T) -> T:
    """Replicates arrays to the devices of the weights. Arrays already there are not copied."""
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P())
    if not sharding.is_fully_addressable:  # with several processes, each has a copy of the arrays
        return jax.jit(lambda tree: tree, out_shardings=sharding)(tree)
    return jax.device_put(tree, sharding)


def row_count(mesh: Mesh | None) -> int:
    """Returns the number of devices that the rows of a batch are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _row_axes(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """Returns the mesh axes for a row axis of this size, or None if they do not divide the size."""
    return None if rows % row_count(mesh) else BATCH


def local_rows(mesh: Mesh | None, rows: int) -> slice:
    """Returns the slice of a batch's rows that the devices of this process hold.

    Processes along a "tensor" axis hold the same rows and get the same slice.

    Args:
        mesh: the mesh; None selects all rows.
        rows: number of rows over all processes.

    Raises:
        UserError: the mesh gives this process rows that are not contiguous.
    """
    if mesh is None:
        return slice(0, rows)
    sharding = NamedSharding(mesh, P(_row_axes(mesh, rows)))
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    spans = sorted({row_slice.indices(rows)[:2] for (row_slice,) in slices})
    if any(end != start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise UserError(
            f"the mesh {dict(mesh.shape)} gives process {jax.process_index()} rows that do not "
            "follow each other; build it with the processes in order along its first axes"
        )
    return slice(spans[0][0], spans[-1][1])


def place_rows(mesh: Mesh | None, tree: T, rows: int | None = None) -> T:
    """Places arrays with a leading row axis on a mesh.

    The rows are split over the mesh if its axes divide their number; otherwise they are replicated.

    Args:
        mesh: the mesh; None returns the arrays unchanged.
        tree: the arrays. Each holds all rows, or the `local_rows` of this process if `rows` is set.
        rows: number of rows over all processes.
    """
    if mesh is None:
        return tree

    def place(leaf):
        count = leaf.shape[0] if rows is None else rows
        sharding = NamedSharding(mesh, P(_row_axes(mesh, count)))
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        shape = (count, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    return jax.tree.map(place, tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies arrays to the host as numpy arrays.

    For an array that is sharded over several processes, all of these processes must call this.
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
    """
    if mesh is None:
        return tree

    def constrain(leaf, spec):
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def by_rows(leaf):
        return constrain(leaf, P(_row_axes(mesh, leaf.shape[0])) if jnp.ndim(leaf) else P())

    def by_heads(leaf):
        rows, heads = leaf.shape[1:3]
        axis = None if heads % mesh.shape["tensor"] else "tensor"
        return constrain(leaf, P(None, _row_axes(mesh, rows), axis))

    def constrain_node(node):
        if isinstance(node, Cache):
            key, value = by_heads(node.key), by_heads(node.value)
            return Cache(key, value, by_rows(node.length), by_rows(node.next_position))
        return by_rows(node)

    return jax.tree.map(constrain_node, tree, is_leaf=lambda node: isinstance(node, Cache))
