"""Stacks of equal blocks: the layout of their weights, and how they are run.

Weights of layers are stacked, each leaf with a leading axis of layers, and run as one scan, which
compiles fast and is the one to differentiate through. But on GPUs and CPUs a slice that a scan
takes is a copy: a pass then moves every weight three times. So programs of an answer unstack large
layers there (`parallel.placement`): a list of layers is unrolled, and each is read where it lies.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, Int

from stepprune_jax.user_input import expect, require

Params = dict[str, Any]  # weights by name, in nested dicts
T = TypeVar("T")
R = TypeVar("R")

ATTENTIONS = ("matmul", "xla", "cudnn")

# Bytes of a layer above which copying it costs more than a longer compilation.
_LARGE = 1 << 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How the blocks of a tower or a language model are run; static.

    It affects speed and memory; results differ only by rounding.

    Attributes:
        attention: "matmul", two batched products; or, where there is no cache to read,
            `jax.nn.dot_product_attention` with the implementation "xla" or "cudnn" (GPU, bfloat16
            or float16).
        remat: whether a backward pass recomputes blocks instead of storing their intermediates.

    Raises:
        ValueError: an unknown implementation of attention.
    """

    attention: str = "matmul"
    remat: bool = False

    def __post_init__(self):
        known = self.attention in ATTENTIONS
        expect("attention", self.attention, known, f"one of {', '.join(ATTENTIONS)}")

    def check_backend(self) -> None:
        """Raises a ValueError if jax's default device cannot run it."""
        backend = jax.default_backend() if self.attention == "cudnn" else "gpu"
        require(backend == "gpu", f"attention 'cudnn' needs a GPU, jax uses {backend!r}")


def has_large_layers(params: Params) -> bool:
    """Returns whether some stacked layers of a model are large, and so to be unstacked."""
    return any(_layer_bytes(layers) >= _LARGE for layers in _stacks(params).values())


def unstack(params: Params) -> Params:
    """Replaces stacked layers by lists of layers: static slices, or views of numpy arrays."""
    taken = dict(params)
    for name, layers in _stacks(params).items():
        count = jax.tree.leaves(layers)[0].shape[0]
        listed = [take_layer(layers, index) for index in range(count)]
        taken[name] = {**params[name], "layers": listed}
    return taken


def _stacks(params: Params) -> Params:
    return {name: part["layers"] for name, part in params.items() if "layers" in part}


def _layer_bytes(layers: Params) -> int:
    leaves = jax.tree.leaves(layers)
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)


def take_layer(layers: T, index: Int[Array, ""] | int) -> T:
    """Returns one layer of a list, or of a tree with a leading axis of layers.

    A traced index slices where the layer is run, so that no part of the stack is copied as a whole.
    """
    if isinstance(layers, list):
        return layers[index]

    def take(leaf):
        if isinstance(index, int):
            return leaf[index]
        return jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)

    return jax.tree.map(take, layers)


def run_stack(
    layers: Params | list[Params],
    body: Callable[[T, Array | int], tuple[T, R]],
    carry: T,
    span: tuple[int, int],
    watched: Sequence[int] = (),
    cuts: Sequence[int] = (),
) -> tuple[T, dict[int, R], dict[int, T]]:
    """Runs blocks one after the other, interrupted where an intermediate is requested.

    `body` maps (carry, layer) to (carry, result). Of the blocks in `watched` results are returned,
    before the layers in `cuts` carries. A list of layers is unrolled, with Python integers as
    numbers; stacked ones are run as scans. Returns the last carry, the results by block, and the
    carries by layer.
    """
    (first, last), unrolled = span, isinstance(layers, list)
    edges = sorted({first, last, *cuts, *watched, *(layer + 1 for layer in watched)})
    seen, carries = {}, {}
    for start, stop in itertools.pairwise(edges):
        if start in cuts:
            carries[start] = carry
        if start in watched:
            carry, seen[start] = body(carry, start if unrolled else jnp.int32(start))
        elif unrolled:
            for index in range(start, stop):
                carry, _ = body(carry, index)
        else:
            indices = jnp.arange(start, stop, dtype=jnp.int32)
            carry, _ = jax.lax.scan(lambda c, i: (body(c, i)[0], None), carry, indices)
    if last in cuts:
        carries[last] = carry
    return carry, seen, carries


def _save_all_but_weights(primitive: Primitive, *_, **__) -> bool:
    # A layer's weights are slices of the stack; storing them would copy the whole stack. Slicing
    # again costs nothing.
    return primitive.name not in ("dynamic_slice", "squeeze", "reshape")


def checkpoint_layer(body: Callable, remat: bool) -> Callable:
    """Wraps a layer's body (carry, layer) -> (carry, anything) for training through it.

    With `remat`, carries alone are stored and blocks recomputed; otherwise their intermediates are
    stored, yet never the weights that `body` slices. Neither affects inference, nor unrolled
    layers, whose numbers are Python integers.
    """
    policy = None if remat else _save_all_but_weights
    saving = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return lambda carry, layer: (body if isinstance(layer, int) else saving)(carry, layer)
