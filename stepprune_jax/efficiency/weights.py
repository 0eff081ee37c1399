"""Makes random weights of any size directly on their devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from stepprune_jax.models import weights
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.models.stack import Params

# Standard deviation of a uniform integer from -127 to 127.
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
    """Returns a random leaf; `kind` is the last part of its path, as in `_compiled_sampler`."""
    if isinstance(leaf, Int8Kernel):
        (value, scale), deviation = leaf, leaf.shape[-2] ** -0.5
        quantization_step = deviation / _INT8_DEVIATION
        scales = jnp.full(scale.shape, quantization_step, scale.dtype, device=scale.sharding)
        return Int8Kernel(_random_leaf("kernel", value, key), scales)
    return _compiled_sampler(kind, leaf.shape, leaf.dtype, leaf.sharding)(key)


@functools.cache
def _compiled_sampler(
    kind: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None
) -> jax.stages.Wrapped:
    """Returns a compiled function from a key to a random leaf.

    Args:
        kind: "scale" (ones), "bias" (zeros), "kernel" (variance 1 / fan-in) or another name
            (variance 1).
        shape: shape of the leaf.
        dtype: dtype of the leaf. int8 is uniform from -127 to 127.
        sharding: sharding of the leaf.
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
