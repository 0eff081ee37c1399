"""Random weights of any size, drawn on their devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from stepprune_jax.models import weights
from stepprune_jax.models.stack import Params


def random_weights(abstract: Params) -> Params:
    """Draws weights in their own dtype and on their own devices, leaf by leaf."""
    flat = weights.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(flat))
    drawn = {
        path: _program(path.rpartition("/")[2], leaf.shape, leaf.dtype, leaf.sharding)(key)
        for key, (path, leaf) in zip(keys, flat.items(), strict=True)
    }
    return weights.unflatten(drawn)


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
        deviation = shape[-2] ** -0.5 if kind == "kernel" else 1.0
        return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)

    return jax.jit(draw, out_shardings=sharding)
