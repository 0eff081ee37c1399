"""Random weights of any size, drawn on their devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from stepprune_jax.models import weights
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.models.stack import Params

# Standard deviation of the integers from -127 to 127.
_DEVIATION = 73.6


def random_weights(abstract: Params) -> Params:
    """Draws weights in their own dtype and on their own devices, leaf by leaf."""
    flat = weights.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(flat))
    drawn = {
        path: _draw(path.rpartition("/")[2], leaf, key)
        for key, (path, leaf) in zip(keys, flat.items(), strict=True)
    }
    return weights.unflatten(drawn)


def _draw(kind: str, leaf: jax.ShapeDtypeStruct | Int8Kernel, key: Array) -> Array | Int8Kernel:
    if isinstance(leaf, Int8Kernel):
        (value, scale), deviation = leaf, leaf.shape[-2] ** -0.5
        step = deviation / _DEVIATION
        scales = jnp.full(scale.shape, step, scale.dtype, device=scale.sharding)
        return Int8Kernel(_draw("kernel", value, key), scales)
    return _program(kind, leaf.shape, leaf.dtype, leaf.sharding)(key)


@functools.cache
def _program(
    kind: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None
) -> jax.stages.Wrapped:
    """Compiles the draw of a leaf."""

    def draw(key):
        if kind in ("scale", "bias"):
            return jnp.full(shape, kind == "scale", dtype)
        if len(shape) == 3:  # layer by layer: random bits of all at once would be the memory's peak
            return jax.lax.map(lambda key: normal(key, shape[1:]), jax.random.split(key, shape[0]))
        return normal(key, shape)

    def normal(key, shape):
        if dtype == jnp.int8:
            return jax.random.randint(key, shape, -127, 128, dtype)
        deviation = shape[-2] ** -0.5 if kind == "kernel" else 1.0
        return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)

    return jax.jit(draw, out_shardings=sharding)
