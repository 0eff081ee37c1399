"""Stacks of equal blocks: how their layers are run, one after the other over stacked weights."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ATTENTIONS = ("matmul", "xla", "cudnn")
LAYERS = ("auto", "scan", "loop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How the blocks of a tower or a language model are run; static.

    It decides on speed, memory and compile time. Results differ by rounding alone.

    Attributes:
        layers: "scan" is a loop of the compiled program with one body for all layers: it compiles
            fast, and is what to differentiate through. "loop" writes the layers out one after the
            other: XLA's GPU compiler then reads each weight where it lies in the stack, while in a
            scan it first copies every matrix of a layer. "auto" is "scan" on a CPU and "loop" on
            accelerators, decided when the program is lowered.
        attention: "matmul", two batched products; or, where there is no cache to read,
            `jax.nn.dot_product_attention` with the implementation "xla" or "cudnn" (GPU, bfloat16
            or float16).
        remat: whether a backward pass recomputes blocks instead of storing their intermediates.

    Raises:
        ValueError: an unknown way to run layers or attention.
    """

    layers: str = "auto"
    attention: str = "matmul"
    remat: bool = False

    def __post_init__(self):
        for name, supported in (("layers", LAYERS), ("attention", ATTENTIONS)):
            value = getattr(self, name)
            if value not in supported:
                raise ValueError(f"{name} is {value!r}; supported: {', '.join(supported)}")

    def check_backend(self) -> None:
        """Raises a ValueError if the device that jax uses cannot run it."""
        if self.attention == "cudnn" and jax.default_backend() != "gpu":
            raise ValueError(f"attention 'cudnn' needs a GPU, jax uses {jax.default_backend()!r}")


# For programs that are differentiated: with layers written out they would take minutes to compile
# and, where weights are trained, hold a gradient of the whole stack for each of them.
SCAN = Execution(layers="scan")


def take_layer(stack: Any, index: Int[Array, ""] | int) -> Any:
    """One layer's weights out of a tree of stacked ones.

    Args:
        stack: tree whose leaves have a leading axis of layers.
        index: the layer; may be traced.

    Returns:
        The tree without that axis. The slice is taken where the layer is run, so that no part of
        the stack is copied as a whole.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), stack
    )


def run_stack(
    body: Callable[[Any, Array | int], tuple[Any, Any]],
    carry: Any,
    span: tuple[int, int],
    watched: Sequence[int] = (),
    cuts: Sequence[int] = (),
    *,
    layers: str,
) -> tuple[Any, dict[int, Any], dict[int, Any]]:
    """Runs blocks one after the other, interrupted where an intermediate is asked for.

    Args:
        body: maps (carry, layer) to (carry, what may be watched).
        carry: what passes from block to block.
        span: first block to run, and the one to stop before.
        watched: blocks whose second result is wanted; each is run on its own.
        cuts: layers before which the carry is wanted.
        layers: as in `Execution`.

    Returns:
        The last carry; the watched results by block; the carries by layer.
    """
    first, last = span
    watched, cuts = set(watched), set(cuts)
    edges = sorted({first, last, *cuts, *watched, *(layer + 1 for layer in watched)})
    seen, carries = {}, {}
    for start, stop in itertools.pairwise(edges):
        if start in cuts:
            carries[start] = carry
        if start in watched:
            carry, seen[start] = body(carry, start)
        else:
            carry = _run_span(body, carry, start, stop, layers)
    if last in cuts:
        carries[last] = carry
    return carry, seen, carries


def _run_span(body: Callable, carry: Any, start: int, stop: int, layers: str) -> Any:
    """Runs blocks that nobody watches; returns the carry."""

    def scan(carry):
        indices = jnp.arange(start, stop, dtype=jnp.int32)
        return jax.lax.scan(lambda c, i: (body(c, i)[0], None), carry, indices)[0]

    def loop(carry):
        for index in range(start, stop):
            carry, _ = body(carry, index)
        return carry

    if layers == "auto":
        return jax.lax.platform_dependent(carry, cpu=scan, default=loop)
    return scan(carry) if layers == "scan" else loop(carry)


def _save_all_but_weights(primitive: Any, *_, **__) -> bool:
    """Whether a forward result is stored for the backward pass when nothing is recomputed.

    A layer's weights are slices of the stack; storing them would copy the whole stack. Slicing
    again costs nothing.
    """
    return primitive.name not in ("dynamic_slice", "squeeze", "reshape")


def checkpoint_layer(body: Callable, remat: bool) -> Callable:
    """Wraps a layer body for training through it.

    Args:
        body: maps (carry, layer) to (carry, anything), slicing its weights inside.
        remat: True stores the carries only and recomputes the block in the backward pass; False
            stores the block's intermediates, yet never its weights.

    Returns:
        A function with the same results and gradients. Inference is not changed by it.
    """
    policy = None if remat else _save_all_but_weights
    return jax.checkpoint(body, prevent_cse=False, policy=policy)
