"""Where arrays of a generation lie, and how its programs are compiled, given the weights."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stepprune_jax.compiling import CPU_OPTIONS
from stepprune_jax.models.llama import Cache
from stepprune_jax.sharding import BATCH


def jit_for_weights(
    function: Callable[..., Any], static: tuple[str, ...], donate: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """`jax.jit` for a function whose first argument are the weights.

    Args:
        function: to be compiled.
        static: names of its static arguments.
        donate: names of its donated arguments.

    Returns:
        The compiled function; for weights on a CPU it is compiled with `CPU_OPTIONS`. It has an
        attribute `num_compiled`, a function that returns the number of programs compiled so far.
    """
    options = {"static_argnames": static, "donate_argnames": donate}
    plain = jax.jit(function, **options)
    on_cpu = jax.jit(function, **options, compiler_options=CPU_OPTIONS)

    @functools.wraps(function)
    def call(params, *args, **kwargs):
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        chosen = on_cpu if device.platform == "cpu" else plain
        return chosen(params, *args, **kwargs)

    call.num_compiled = lambda: plain._cache_size() + on_cpu._cache_size()
    return call


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that weights are sharded over, or None on a single device."""
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def beside(params: Any, tree: Any) -> Any:
    """Copies arrays to where the weights are, whole to each device; no copy if they are there."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P())
    return jax.device_put(tree, sharding)


def row_count(mesh: Mesh | None) -> int:
    """Number of devices that the rows of a batch are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _row_axes(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """Mesh axes that rows are split over; None if they do not divide them."""
    return None if rows % row_count(mesh) else BATCH


def place_rows(mesh: Mesh | None, tree: Any) -> Any:
    """Puts arrays that begin with a row axis on a mesh, row by row where its axes divide them."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(_row_axes(mesh, leaf.shape[0])))),
        tree,
    )


def constrain_rows(mesh: Mesh | None, tree: Any) -> Any:
    """Inside a program: fixes the layout of caches by heads and rows, of anything else by rows."""
    if mesh is None:
        return tree

    def fixed(leaf, spec):
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def by_rows(leaf):
        return fixed(leaf, P(_row_axes(mesh, leaf.shape[0])) if jnp.ndim(leaf) else P())

    def by_heads(leaf):
        rows, heads = leaf.shape[1:3]
        axis = None if heads % mesh.shape["tensor"] else "tensor"
        return fixed(leaf, P(None, _row_axes(mesh, rows), axis))

    def place(node):
        if isinstance(node, Cache):
            following = (by_rows(node.length), by_rows(node.next_position))
            return Cache(by_heads(node.key), by_heads(node.value), *following)
        return by_rows(node)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, Cache))
