"""Peak performance of a device, as the reference of what a program reaches."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stepprune_jax.models.layers import product
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as

# Sides of the square matrices that are multiplied, and bytes that are copied and read.
_SIDE, _BYTES = 4096, 1 << 28


class Peak(NamedTuple):
    """The bounds of a roofline.

    Attributes:
        flops: operations per second.
        bandwidth: bytes per second to and from the device's memory.
        source: their source.
    """

    flops: float
    bandwidth: float
    source: str

    def seconds(self, flops: float | int, nbytes: int) -> float:
        """Returns the shortest time of a program with these operations and bytes moved."""
        return max(flops / self.flops, nbytes / self.bandwidth)


def device_peak(dtype: Any, side: int = _SIDE, nbytes: int = _BYTES) -> Peak:
    """Returns the peak of the first device that jax sees."""
    name = known_as(jax.devices()[0].device_kind)
    if name and jnp.dtype(dtype) == jnp.bfloat16:
        device = ACCELERATORS[name]
        return Peak(device.flops, device.bandwidth, f"data sheet of {name}")
    square = jnp.ones((side, side), dtype)
    table = jnp.ones((nbytes // 4096, 1024), jnp.float32)
    # As the models multiply: a CPU has faster kernels for bfloat16 behind it than behind `matmul`.
    multiply = _best(jax.jit(product), square, square)
    copy = _best(jax.jit(jnp.negative), table)
    read = _best(jax.jit(jnp.matmul), table, table[0])
    source = f"a product of {side} x {side}, a copy and a read of {nbytes >> 20} MiB in this run"
    bandwidth = max(2 * table.nbytes / copy, table.nbytes / read)
    return Peak(2 * side**3 / multiply, bandwidth, source)


def _best(call: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """Returns seconds of the fastest of a few calls, after one that compiles."""
    jax.block_until_ready(call(*arguments))
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        taken.append(time.perf_counter() - begin)
    return min(taken)
