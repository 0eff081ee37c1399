"""The language model's matrices as int8 with a scale for each column (output channel).

They are frozen, and only their products are approximate: a product is that of the integers, summed
in float32 and then scaled. Embeddings, norms, biases, tower and projector stay as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from stepprune_jax.models.weights import flatten, unflatten
from stepprune_jax.user_input import expect

WEIGHTS = ("full", "int8")
_LARGEST = 127  # symmetric: -128 is not used


class Int8Kernel(NamedTuple):
    """A matrix, or a stack of them, that is `value * scale`.

    It is a leaf of `weights.flatten` and a pair of arrays to jax: both can be sliced by layers, and
    be concatenated along their last axis. Its shardings are also such a pair.
    """

    value: Int8[Array | np.ndarray, "*layers k n"]
    scale: Float[Array | np.ndarray, "*layers n"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of the stack."""
        return self.value.shape


def quantize(kernel: Float[np.ndarray, "*layers k n"]) -> Int8Kernel:
    """Rounds each column to multiples of its scale, its largest magnitude / 127, on the host.

    An element changes by at most half of its column's scale. Numbers have to be finite.
    """
    scale = np.abs(kernel).max(-2).astype(np.float32) / _LARGEST
    steps = kernel / np.where(scale > 0, scale, 1)[..., None, :]
    # A scale below the normal numbers may be rounded down by half.
    return Int8Kernel(np.rint(steps).clip(-_LARGEST, _LARGEST).astype(np.int8), scale)


def keep_as(weights: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes of a model whose matrices are kept as they are ("full") or as "int8".

    Raises:
        ValueError: another value.
    """
    expect("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")

    if weights == "full":
        return abstract

    def kept(path, leaf):
        if not (path.startswith("language/") and path.endswith("/kernel")):
            return leaf
        *layers, _, n = leaf.shape
        return jax.eval_shape(
            lambda: Int8Kernel(
                jnp.zeros(leaf.shape, jnp.int8), jnp.zeros((*layers, n), jnp.float32)
            )
        )

    return unflatten({path: kept(path, leaf) for path, leaf in flatten(abstract).items()})
