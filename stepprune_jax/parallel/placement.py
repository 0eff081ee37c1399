"""Placement of arrays, and compilation of programs, for given weights."""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.stack import Params, has_large_layers, unstack
from stepprune_jax.models.weights import join
from stepprune_jax.parallel.compiling import options_of
from stepprune_jax.parallel.sharding import BATCH
from stepprune_jax.policy.host import jax_defaults
from stepprune_jax.user_input import UserError

T = TypeVar("T")  # a tree of arrays

# Programs that a process keeps on CPUs. Each takes hundreds of memory maps there, about one per
# kernel, and Linux limits a process to 65,530: without a bound, a process that answers requests of
# ever new shapes would fail at about its 130th program.
MOST_PROGRAMS = 96
_on_cpu: list[Any] = []
_forgotten: collections.Counter[Any] = collections.Counter()


# What `watch_programs` collects, if anything.
_watched: list[list["Ran"]] = []


class Ran(NamedTuple):
    """A program that was run.

    Attributes:
        traced: the program; compiling it again takes no time while jax holds it.
        inputs: bytes of its arguments besides the weights.
    """

    traced: Any
    inputs: int


@contextlib.contextmanager
def watch_programs() -> Iterator[list[Ran]]:
    """Collects the programs of `jit_for_weights` that are run meanwhile."""
    found: list[Ran] = []
    _watched.append(found)
    try:
        yield found
    finally:
        _watched.remove(found)


def _make_room() -> None:
    """Drops all programs on CPUs if there are too many of them."""
    held = {program: program._cache_size() for program in _on_cpu}
    if sum(held.values()) > MOST_PROGRAMS:
        _forgotten.update(held)
        for program in held:
            program.clear_cache()


def jit_for_weights(
    function: Callable[..., Any],
    static: tuple[str, ...],
    donate: tuple[str, ...] = (),
    answers: bool = False,
) -> Callable[..., Any]:
    """Applies `jax.jit` to a function whose first argument is the weights.

    The program has the `OPTIONS` of their platform, and is that of jax's own settings whatever the
    host has set (`jax_defaults`). One that `answers`, and so is never differentiated, reads large
    layers in place: on GPUs it unstacks them; on a CPU, where XLA would copy each slice, it is
    given views of them; a TPU reads those of a scan in place. On CPUs, all functions together keep
    `MOST_PROGRAMS` programs. The result has `num_compiled()`, the programs compiled so far, and
    `trace` of `jax.jit`, which also takes abstract weights with a sharding.
    """
    names = {"static_argnames": static, "donate_argnames": donate}

    @functools.wraps(function)
    def by_layer(params, *args, **kwargs):
        return function(unstack(params) if has_large_layers(params) else params, *args, **kwargs)

    programs = {
        platform: jax.jit(
            by_layer if answers and platform == "gpu" else function,
            **names,
            compiler_options=options_of(platform, answers),
        )
        for platform in ("cpu", "gpu", "tpu")
    }

    _on_cpu.append(programs["cpu"])

    def chosen(params):
        """Returns the program, and the weights as it takes them."""
        platform, count = _devices_of(params)
        if answers and platform == "cpu" and count == 1 and has_large_layers(params):
            params = _views(params)
        return programs[platform], params

    @functools.wraps(function)
    def call(params, *args, **kwargs):
        program, params = chosen(params)
        with jax_defaults():
            for found in _watched:
                inputs = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves((args, kwargs)))
                found.append(Ran(program.trace(params, *args, **kwargs), inputs))
            result = program(params, *args, **kwargs)
        if program is programs["cpu"]:
            _make_room()
        return result

    def trace(params, *args, **kwargs):
        program, params = chosen(params)
        return program.trace(params, *args, **kwargs)

    call.num_compiled = lambda: sum(
        program._cache_size() + _forgotten[program] for program in programs.values()
    )
    call.trace = jax_defaults()(trace)
    return call


def answers_joined(platform: str, mesh: Mesh | None) -> bool:
    """Returns whether an answer is computed with joined matrices: on GPUs, with whole heads."""
    return platform == "gpu" and (mesh is None or mesh.shape.get("tensor", 1) == 1)


def prepare_to_answer(params: Params) -> Params:
    """Joins matrices (`weights.join`) where `answers_joined`; nothing else may hold the weights."""
    platform, _ = _devices_of(params)
    return join(params) if answers_joined(platform, mesh_of(params)) else params


def _views(params: Params) -> Params:
    """Unstacks weights on a CPU without a copy: numpy's slices lie where the stacks do."""
    if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(unstack, params)
    return unstack(jax.tree.map(np.asarray, params))


def _devices_of(params: Params | Array) -> tuple[str, int]:
    """Returns the platform of the devices of weights, or of a key, and their number."""
    devices = _sharding_of(params).device_set
    return next(iter(devices)).platform, len(devices)


def decodes_by_step(params: Params) -> bool:
    """Returns whether a program is to draw one token, and the host to start the next.

    In a loop on a GPU, XLA would copy the slices of large layers.
    """
    return _devices_of(params)[0] == "gpu" and has_large_layers(params)


def _sharding_of(params: Params | Array) -> Any:
    """Returns the sharding of one weight: flattening the hundreds of a model takes longer."""
    while isinstance(params, dict):
        params = next(iter(params.values()))
    return params.sharding


def mesh_of(params: Params) -> Mesh | None:
    """Returns the mesh that weights are sharded over, or None on a single device."""
    sharding = _sharding_of(params)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def replicate_like(params: Params, tree: T) -> T:
    """Replicates arrays to the devices of the weights; no copy if they are already there."""
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P())
    if not sharding.is_fully_addressable:  # several processes, each of which has the arrays
        return jax.jit(lambda tree: tree, out_shardings=sharding)(tree)
    return jax.device_put(tree, sharding)


def row_count(mesh: Mesh | None) -> int:
    """Returns the number of devices that the rows of a batch are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _row_axes(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """Returns mesh axes that rows are split over; None if they do not divide them."""
    return None if rows % row_count(mesh) else BATCH


def local_rows(mesh: Mesh | None, rows: int) -> slice:
    """Returns the rows of a batch that this process provides: those on its own devices.

    Processes that share rows (a "tensor" axis across them) get the same.
    """
    if mesh is None:
        return slice(0, rows)
    sharding = NamedSharding(mesh, P(_row_axes(mesh, rows)))
    cuts = sharding.addressable_devices_indices_map((rows,)).values()
    spans = sorted({cut.indices(rows)[:2] for (cut,) in cuts})
    if any(end != start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise UserError(
            f"the mesh {dict(mesh.shape)} gives process {jax.process_index()} rows that do not "
            "follow each other; build it with the processes in order along its first axes"
        )
    return slice(spans[0][0], spans[-1][1])


def place_rows(mesh: Mesh | None, tree: T, rows: int | None = None) -> T:
    """Places arrays with a leading row axis on a mesh, split by rows if its axes divide them.

    The arrays are whole, or each process gives its `local_rows` of `rows` in all.
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


def fetch(tree: PyTree) -> PyTree:
    """Copies whole arrays to the host; all processes that have parts of them must call it."""

    def whole(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, tree)


def constrain_whole(mesh: Mesh | None, tree: T) -> T:
    """Constrains arrays to be replicated, inside a program."""
    return (
        tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))
    )


def constrain_rows(mesh: Mesh | None, tree: T) -> T:
    """Constrains caches to be split by heads and rows, others by rows, inside a program."""
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
