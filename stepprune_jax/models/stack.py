"""Stacks of equal transformer blocks: layout of their weights, and how the blocks are run.

There are two layouts. Stacked layers are one tree with a leading axis of layers on each leaf; they
are run as a scan, which compiles fast and is used for training. Unstacked layers are a list of
trees; their blocks are unrolled. On GPUs and CPUs a scan copies the slice of each layer, so a pass
moves every weight three times. Programs that generate answers therefore unstack large layers on
these devices (`parallel.placement`) and read each layer in place.
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

# Layers of at least this size are unstacked: a copy of such a layer costs more than the longer
# compilation of unrolled layers.
_LARGE_LAYER_BYTES = 1 << 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Options for running the blocks of a tower or a language model; static under `jax.jit`.

    The options affect speed and memory. Results differ only by rounding.

    Attributes:
        attention: "matmul", two batched matrix products; "xla" or "cudnn",
            `jax.nn.dot_product_attention` with this implementation. "cudnn" needs a GPU and
            bfloat16 or float16. Attention that reads a KV cache always uses "matmul".
        remat: whether the backward pass recomputes blocks instead of storing their intermediates.

    Raises:
        ValueError: the implementation of attention is unknown.
    """

    attention: str = "matmul"
    remat: bool = False

    def __post_init__(self):
        is_known = self.attention in ATTENTIONS
        expect("attention", self.attention, is_known, f"one of {', '.join(ATTENTIONS)}")

    def check_backend(self) -> None:
        """Raises a ValueError if jax's default backend does not support the attention."""
        backend = jax.default_backend() if self.attention == "cudnn" else "gpu"
        require(backend == "gpu", f"attention 'cudnn' needs a GPU, jax uses {backend!r}")


def has_large_layers(params: Params) -> bool:
    """Returns whether a model has stacked layers that are large enough to be unstacked."""
    stacks = _layer_stacks(params).values()
    return any(_layer_bytes(layers) >= _LARGE_LAYER_BYTES for layers in stacks)


def unstack(params: Params) -> Params:
    """Replaces stacked layers by lists of layers.

    Args:
        params: weights of a model.

    Returns:
        The weights with each layer as a static slice; as a view if the leaves are numpy arrays.
    """
    unstacked = dict(params)
    for name, layers in _layer_stacks(params).items():
        count = jax.tree.leaves(layers)[0].shape[0]
        layer_list = [take_layer(layers, index) for index in range(count)]
        unstacked[name] = {**params[name], "layers": layer_list}
    return unstacked


def _layer_stacks(params: Params) -> Params:
    """Returns the stacked layers of each part of a model, such as "vision" and "language"."""
    return {name: part["layers"] for name, part in params.items() if "layers" in part}


def _layer_bytes(layers: Params) -> int:
    """Returns the bytes of one of the stacked layers."""
    leaves = jax.tree.leaves(layers)
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)


def take_layer(layers: T, index: Int[Array, ""] | int) -> T:
    """Returns one layer of a list of layers, or of a tree with a leading axis of layers.

    A traced index becomes a dynamic slice in the program that runs the layer, which copies one
    layer instead of the stack.
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
    *,
    output_blocks: Sequence[int] = (),
    carry_layers: Sequence[int] = (),
) -> tuple[T, dict[int, R], dict[int, T]]:
    """Runs consecutive blocks, and collects requested intermediates.

    Stacked layers are run as one scan between two requested intermediates. A list of layers is
    unrolled; `body` then gets Python integers as block numbers.

    Args:
        layers: weights of the blocks, as a list or stacked. Only their layout matters here: `body`
            takes the weights of each block itself.
        body: maps (carry, block number) to (carry, output).
        carry: input of the first block, such as the residual stream.
        span: number of the first block, and number of the block to stop before.
        output_blocks: numbers of the blocks whose outputs are returned.
        carry_layers: block numbers; the carry before each of these blocks is returned. `span[1]`
            requests the last carry.

    Returns:
        The last carry, the outputs by block, and the carries by block.
    """
    (first, last), is_unrolled = span, isinstance(layers, list)
    # Blocks between two boundaries run as one scan. A block whose output is requested runs by
    # itself, between a boundary before it and a boundary after it.
    after_outputs = (block + 1 for block in output_blocks)
    boundaries = sorted({first, last, *carry_layers, *output_blocks, *after_outputs})
    outputs, carries = {}, {}
    for start, stop in itertools.pairwise(boundaries):
        if start in carry_layers:
            carries[start] = carry
        if start in output_blocks:
            carry, outputs[start] = body(carry, start if is_unrolled else jnp.int32(start))
        elif is_unrolled:
            for block in range(start, stop):
                carry, _ = body(carry, block)
        else:
            blocks = jnp.arange(start, stop, dtype=jnp.int32)
            carry, _ = jax.lax.scan(lambda c, block: (body(c, block)[0], None), carry, blocks)
    if last in carry_layers:
        carries[last] = carry
    return carry, outputs, carries


def _save_all_but_weights(primitive: Primitive, *_, **__) -> bool:
    """Returns whether a checkpoint saves the results of a primitive: all but sliced weights."""
    # The weights of a layer are slices of the stack. Saved slices would be a second copy of the
    # stack, while slicing again costs nothing.
    return primitive.name not in ("dynamic_slice", "squeeze", "reshape")


def checkpoint_layer(body: Callable, remat: bool) -> Callable:
    """Wraps the body of a layer in `jax.checkpoint`, for training.

    Inference and unrolled layers, whose numbers are Python integers, are not affected.

    Args:
        body: maps (carry, layer) to (carry, output).
        remat: if True, the backward pass stores only the carries and recomputes the blocks. If
            False, it stores all intermediates except the weights that `body` slices.

    Returns:
        The wrapped body.
    """
    policy = None if remat else _save_all_but_weights
    checkpointed = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return lambda carry, layer: (body if isinstance(layer, int) else checkpointed)(carry, layer)
