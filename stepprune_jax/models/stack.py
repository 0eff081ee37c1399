"""Stacks of equal blocks: the layout of their weights, and how they are run.

Weights of layers are either stacked, each leaf with a leading axis of layers, or apart, as a dict
of layers "0", "1", and so on. Stacked layers are run as one scan, which compiles fast and is the
one to differentiate through. But on GPUs and CPUs a slice of a stack is a copy: a pass then moves
every weight three times. Layers that are apart are unrolled and read in place, which suits large
models at inference there.
"""

import dataclasses
import itertools
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
LAYOUTS = ("auto", "stacked", "apart")

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


def lay_out(params: Params, layout: str = "auto", platform: str | None = None) -> Params:
    """Splits stacked layers, or leaves them stacked.

    Args:
        params: weights of a model, with all layers stacked.
        layout: "stacked" to change nothing; "apart"; or "auto", which is apart if some layers are
            large, except on a TPU, whose compiler reads the slices of a scan in place.
        platform: platform of the programs; None for that of jax's default devices.

    Returns:
        The same weights; stacks that are split are copied.

    Raises:
        ValueError: an unknown layout.
    """
    expect("layers", layout, layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}")
    if layout == "auto":
        large = any(_layer_bytes(layers) >= _LARGE for layers in _stacks(params).values())
        platform = platform or jax.default_backend()
        layout = "apart" if large and platform != "tpu" else "stacked"
    if layout == "stacked":
        return params
    taken = dict(params)
    for name, layers in _stacks(params).items():
        count = jax.tree.leaves(layers)[0].shape[0]
        apart = {str(index): take_layer(layers, index) for index in range(count)}
        taken[name] = {**params[name], "layers": apart}
    return taken


def layout_of(params: Params) -> str:
    """Returns the layout of a model's layers, "stacked" or "apart"."""
    return "apart" if any(map(is_apart, _stacks(params).values())) else "stacked"


def is_apart(layers: Params) -> bool:
    """Returns whether weights of layers are apart."""
    return "0" in layers


def _stacks(params: Params) -> Params:
    return {name: part["layers"] for name, part in params.items() if "layers" in part}


def _layer_bytes(layers: Params) -> int:
    return sum(leaf[0].size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))


def take_layer(layers: T, index: Int[Array, ""] | int) -> T:
    """Returns one layer of a tree with a leading axis of layers; `index` may be traced if stacked.

    A slice is taken where the layer is run, so that no part of the stack is copied as a whole.
    """
    if isinstance(layers, dict) and is_apart(layers):
        return layers[str(index)]
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), layers
    )


def run_stack(
    body: Callable[[T, Array | int], tuple[T, R]],
    carry: T,
    span: tuple[int, int],
    watched: Sequence[int] = (),
    cuts: Sequence[int] = (),
    *,
    apart: bool,
) -> tuple[T, dict[int, R], dict[int, T]]:
    """Runs blocks one after the other, interrupted where an intermediate is requested.

    `body` maps (carry, layer) to (carry, result). Of the blocks in `watched` results are returned,
    before the layers in `cuts` carries. Blocks that are apart are unrolled, with Python integers as
    numbers; others are run as scans. Returns the last carry, the results by block, and the carries
    by layer.
    """
    first, last = span
    edges = sorted({first, last, *cuts, *watched, *(layer + 1 for layer in watched)})
    seen, carries = {}, {}
    for start, stop in itertools.pairwise(edges):
        if start in cuts:
            carries[start] = carry
        if start in watched:
            carry, seen[start] = body(carry, start if apart else jnp.int32(start))
        elif apart:
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
    stored, yet never the weights that `body` slices. Neither affects inference, nor layers that are
    apart, whose numbers are Python integers.
    """
    policy = None if remat else _save_all_but_weights
    saving = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return lambda carry, layer: (body if isinstance(layer, int) else saving)(carry, layer)
