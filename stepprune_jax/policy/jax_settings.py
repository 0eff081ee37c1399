"""Context managers that shield the package from global jax settings, and PRNG key checks.

A program that uses this package may have changed jax's global settings, such as the default PRNG
implementation. Results must not depend on them.
"""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

# With this PRNG, `vmap` over keys gives the same samples as a loop over keys, on any device.
THREEFRY = "threefry2x32"

AnyKeys = TypeVar("AnyKeys")
AnyKey = Key[Array, "*n"] | UInt32[Array, "*n words"]


@contextlib.contextmanager
def implicit_promotion() -> Iterator[None]:
    """Allows implicit rank and dtype promotion, even if ``jax_numpy_*_promotion`` forbids it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """Allows implicit promotion, and sets 32-bit indices and threefry keys, as models expect."""
    with implicit_promotion(), jax.enable_x64(False), jax.default_prng_impl(THREEFRY):
        yield


def is_typed_key(key: object) -> bool:
    """Returns whether `key` is a typed key array of `jax.random.key`, not a raw key."""
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def check_key(key: AnyKeys) -> AnyKeys:
    """Returns `key` unchanged if it is a PRNG key or an array of keys.

    Raises:
        ValueError: `key` is neither a `jax.random.key` nor a raw key of `jax.random.PRNGKey`.
    """
    is_key = is_typed_key(key)
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32:
        is_key = key.shape[-1:] in ((2,), (4,))
    if not is_key:
        raise ValueError(f"key is {key!r}, expected a jax.random.key or a jax.random.PRNGKey")
    return key


def threefry(key: Array | np.ndarray) -> Key[Array, "*n"]:
    """Converts keys of any PRNG implementation to threefry keys; threefry keys stay unchanged.

    With ``rbg`` keys, all rows would get the same samples under `vmap`.

    Raises:
        ValueError: `key` is not a PRNG key.
    """
    data = check_key(key)
    if isinstance(key, jax.Array) and is_typed_key(key):
        if str(jax.random.key_impl(key)) == THREEFRY:
            return key
        data = jax.random.key_data(key)
    return jax.random.wrap_key_data(jnp.asarray(data)[..., :2], impl=THREEFRY)
