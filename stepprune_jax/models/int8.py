"""Int8 quantization of the language model's matrices, with a scale per column (output channel).

A product with a quantized matrix multiplies by the integers in float32 and then applies the scales.
Quantized matrices are frozen. Embeddings, norms, biases, the tower and the projector are not
quantized.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from stepprune_jax.models.weights import flatten, unflatten
from stepprune_jax.user_input import expect

WEIGHTS = ("full", "int8")
_LARGEST = 127  # the largest quantized magnitude; -128 is not used, so the range is symmetric


class Int8Kernel(NamedTuple):
    """A quantized matrix, or a stack of matrices with a leading axis of layers: `value * scale`.

    `weights.flatten` treats it as one leaf, and jax as a pair of arrays. Both arrays can be sliced
    by layer and concatenated along their last axis. The sharding of a matrix is also an
    `Int8Kernel`, of two shardings.

    Attributes:
        value: [..., k, n] quantized integers.
        scale: [..., n] scale of each column.
    """

    value: Int8[Array | np.ndarray, "*layers k n"]
    scale: Float[Array | np.ndarray, "*layers n"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix or of the stack of matrices."""
        return self.value.shape


def quantize(kernel: Float[np.ndarray, "*layers k n"]) -> Int8Kernel:
    """Quantizes a matrix on the host, with scale = (largest magnitude of the column) / 127.

    An element changes by at most half of the scale of its column.

    Args:
        kernel: [..., k, n] matrix or stack of matrices; must be finite.

    Returns:
        The quantized matrix.
    """
    scale = np.abs(kernel).max(-2).astype(np.float32) / _LARGEST
    quotient = kernel / np.where(scale > 0, scale, 1)[..., None, :]
    # A subnormal scale may be rounded down by half, so a quotient may exceed 127.
    return Int8Kernel(np.rint(quotient).clip(-_LARGEST, _LARGEST).astype(np.int8), scale)


def keep_as(weights: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes of a model's weights in a storage format.

    Args:
        weights: "full" for unquantized matrices, or "int8".
        abstract: tree of the shapes of unquantized weights, as `jax.ShapeDtypeStruct`s.

    Returns:
        The tree; for "int8", with an `Int8Kernel` for each matrix of the language model.

    Raises:
        ValueError: `weights` is neither "full" nor "int8".
    """
    expect("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")

    if weights == "full":
        return abstract

    def quantized_shape(path, leaf):
        if not (path.startswith("language/") and path.endswith("/kernel")):
            return leaf
        *layers, _, n = leaf.shape
        return jax.eval_shape(
            lambda: Int8Kernel(
                jnp.zeros(leaf.shape, jnp.int8), jnp.zeros((*layers, n), jnp.float32)
            )
        )

    flat = flatten(abstract)
    return unflatten({path: quantized_shape(path, leaf) for path, leaf in flat.items()})
