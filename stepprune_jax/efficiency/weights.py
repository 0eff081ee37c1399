"""Makes random weights directly on their devices, without a copy in host memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from stepprune_jax.models import weights
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.models.stack import Params

# Standard deviation of a uniform integer from -127 to 127: sqrt((255**2 - 1) / 12).
_INT8_DEVIATION = 73.6


def random_weights(abstract_params: Params) -> Params:
    """Returns random weights with the shapes, dtypes and shardings of `abstract_params`."""
    leaves_by_path = weights.flatten(abstract_params)
    keys = jax.random.split(jax.random.key(0), len(leaves_by_path))
    arrays = {
        path: _random_leaf(path.rpartition("/")[2], leaf, key)
        for key, (path, leaf) in zip(keys, leaves_by_path.items(), strict=True)
    }
    return weights.unflatten(arrays)


def _random_leaf(
    kind: str, leaf: jax.ShapeDtypeStruct | Int8Kernel, key: Array
) -> Array | Int8Kernel:
    """Returns a random parameter.

    Args:
        kind: last part of the parameter's path, as in `_compiled_sampler`.
        leaf: shape, dtype and sharding of the parameter. An int8 kernel has these for its integers
            and for its scales.
        key: random key.
    """
    if isinstance(leaf, Int8Kernel):
        integers, scales = jax.tree.leaves(leaf)
        # As a float kernel, the quantized kernel has the variance 1 / fan-in.
        scale = leaf.shape[-2] ** -0.5 / _INT8_DEVIATION
        sample = _compiled_sampler("kernel", integers.shape, integers.dtype, integers.sharding)
        return Int8Kernel(
            sample(key), jnp.full(scales.shape, scale, scales.dtype, device=scales.sharding)
        )
    return _compiled_sampler(kind, leaf.shape, leaf.dtype, leaf.sharding)(key)


@functools.cache
def _compiled_sampler(
    kind: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None
) -> jax.stages.Wrapped:
    """Returns a compiled function that maps a random key to a random parameter.

    Args:
        kind: "scale" (ones), "bias" (zeros), "kernel" (normal with variance 1 / fan-in) or another
            name (normal with variance 1).
        shape: shape of the parameter. Three axes are (layers, fan-in, fan-out).
        dtype: dtype of the parameter. int8 is uniform from -127 to 127.
        sharding: sharding of the parameter.
    """

    def sample(key):
        if kind in ("scale", "bias"):
            return jnp.full(shape, kind == "scale", dtype)
        if len(shape) == 3:  # One layer at a time limits the memory of the random bits.
            return jax.lax.map(lambda key: normal(key, shape[1:]), jax.random.split(key, shape[0]))
        return normal(key, shape)

    def normal(key, shape):
        if dtype == jnp.int8:
            return jax.random.randint(key, shape, -127, 128, dtype)
        deviation = shape[-2] ** -0.5 if kind == "kernel" else 1.0
        return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)

    return jax.jit(sample, out_shardings=sharding)
