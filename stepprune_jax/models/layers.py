"""Matrix products, norms and activations of the backbones, as Flax modules.

Norms are computed in float32 regardless of the dtype of the weights.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int8

from stepprune_jax.models.int8 import Int8Kernel

# On a CPU, this many rows of an int8 matrix are converted to float32 at a time. A tile of this size
# stays in the cache of the processor.
_TILE = 128


class BlockOutput(NamedTuple):
    """Output of a transformer block.

    Attributes:
        hidden: [b, t, width] the residual stream after the block.
        query: [b, h, t, c] queries after rotary positions.
        key: [b, g, t, c] keys after rotary positions.
        value: [b, g, t, c] values.
        mlp_input: [b, t, width] normalized input of the MLP; None if the block does not return it.
    """

    hidden: Float[Array, "b t width"]
    query: Float[Array, "b h t c"]
    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t c"]
    mlp_input: Float[Array, "b t width"] | None = None


def matmul_float32(
    x: Float[Array, "*b k"],
    kernel: Float[Array, "k n"] | Float[Array, "n k"] | Int8Kernel,
    axis: int = 0,
) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix; returns float32, whatever the dtype of the operands.

    Args:
        x: [..., k] rows.
        kernel: the matrix.
        axis: axis of the kernel that is contracted: 0 for [k, n], 1 for a transposed kernel [n, k].
            Must be 0 for an `Int8Kernel`.

    Returns:
        [..., n] float32 products.
    """
    if isinstance(kernel, Int8Kernel):
        return _int8_matmul(x.dtype, x, kernel)
    is_single_row = x.size == x.shape[-1]
    rows = x.reshape(-1, x.shape[-1]) if is_single_row else x
    if is_single_row and kernel.dtype != jnp.float32:
        # On a CPU, XLA converts the entire bfloat16 matrix to float32 before it multiplies a single
        # row, which takes ten times as long. With two rows, XLA does not convert the matrix.
        rows = jnp.broadcast_to(rows, (2, x.size))
    dimension_numbers = (((rows.ndim - 1,), (axis,)), ((), ()))
    result = jax.lax.dot_general(
        rows, kernel, dimension_numbers, preferred_element_type=jnp.float32
    )
    return result[:1].reshape(*x.shape[:-1], -1) if is_single_row else result


@jax.custom_jvp
def _matmul_rounded(x, kernel):
    """Computes `x @ kernel`, summed in float32 and rounded to the dtype of x."""

    def round_float32(x, kernel):
        # If the result is bfloat16, XLA on a CPU converts the entire matrix to float32.
        return matmul_float32(x, kernel).astype(x.dtype)

    return jax.lax.platform_dependent(x, kernel, cpu=round_float32, default=jnp.matmul)


def _matmul_rounded_jvp(primals, tangents):
    (x, kernel), (x_tangent, kernel_tangent) = primals, tangents
    result = _matmul_rounded(x, kernel)
    result_tangent = jnp.zeros_like(result)
    # A frozen matrix has no tangent. A gradient of the matrix would cost as much as the product.
    if not isinstance(x_tangent, SymbolicZero):
        result_tangent = result_tangent + x_tangent @ kernel
    if not isinstance(kernel_tangent, SymbolicZero):
        result_tangent = result_tangent + x @ kernel_tangent
    return result, result_tangent


_matmul_rounded.defjvp(_matmul_rounded_jvp, symbolic_zeros=True)


def _matmul_integers(x: Float[Array, "*b k"], value: Int8[Array, "k n"]) -> Float[Array, "*b n"]:
    """Multiplies rows with an int8 matrix in float32, without a converted copy of the matrix.

    Args:
        x: [..., k] rows.
        value: [k, n] integers, without their scales.

    Returns:
        [..., n] float32 products.
    """

    def matmul_converted(x, value):
        return matmul_float32(x, value.astype(x.dtype))

    def matmul_tiled(x, value):
        # XLA for CPUs does not fuse the conversion into a product, so the matrix is converted tile
        # by tile. The first tile contains the remainder of the rows.
        first_tile = (len(value) - 1) % _TILE + 1
        total = matmul_converted(x[..., :first_tile], value[:first_tile])
        if first_tile == len(value):
            return total

        def add_tile(total, start):
            x_tile = jax.lax.dynamic_slice_in_dim(x, start, _TILE, x.ndim - 1)
            value_tile = jax.lax.dynamic_slice_in_dim(value, start, _TILE)
            return total + matmul_converted(x_tile, value_tile), None

        return jax.lax.scan(add_tile, total, jnp.arange(first_tile, len(value), _TILE))[0]

    return jax.lax.platform_dependent(x, value, cpu=matmul_tiled, default=matmul_converted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _int8_matmul(dtype, x, kernel):
    """Computes `x @ kernel` in float32 for x of a dtype.

    The backward pass converts the int8 matrix again instead of storing a converted copy.
    """
    del dtype
    return _matmul_integers(x, kernel.value) * kernel.scale


def _int8_matmul_fwd(dtype, x, kernel):
    return _int8_matmul(dtype, x, kernel), kernel


def _int8_matmul_bwd(dtype, kernel, gradient):
    scaled = (gradient * kernel.scale).astype(dtype)
    return matmul_float32(scaled, kernel.value.astype(dtype), axis=1).astype(dtype), None


_int8_matmul.defvjp(_int8_matmul_fwd, _int8_matmul_bwd)


def matmul(
    x: Float[Array, "*b k"], kernel: Float[Array, "k n"] | Int8Kernel
) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix, summed in float32 and rounded to the dtype of the rows."""
    if isinstance(kernel, Int8Kernel):
        return matmul_float32(x, kernel).astype(x.dtype)
    return x @ kernel if x.dtype == jnp.float32 else _matmul_rounded(x, kernel)


def _promote_float_dtypes(*arrays, dtype=None, inexact=True):
    """Applies Flax's `promote_dtype`, unless one of the arrays is an `Int8Kernel`."""
    if any(isinstance(array, Int8Kernel) for array in arrays):
        return [*arrays]
    return promote_dtype(*arrays, dtype=dtype, inexact=inexact)


# `nn.Dense` that multiplies by `matmul` and therefore also accepts an `Int8Kernel`.
Dense = functools.partial(
    nn.Dense,
    dot_general=lambda x, kernel, *_, **__: matmul(x, kernel),
    promote_dtype=_promote_float_dtypes,
)


def joined_dense(
    module: nn.Module, x: Float[Array, "*b k"], widths: dict[str, int], use_bias: bool
) -> list[Float[Array, "*b n"]]:
    """Applies several dense layers of a module to the same rows.

    `weights.join_kernels` may have joined these layers into one layer.

    Args:
        module: module that owns the layers.
        x: [..., k] rows.
        widths: output width of each layer, by name.
        use_bias: whether the layers have biases.

    Returns:
        The output of each layer; if the layers are joined, a list with the concatenated output.
    """
    joined_name = "_".join(widths)
    if module.has_variable("params", joined_name):
        widths = {joined_name: sum(widths.values())}
    return [Dense(width, use_bias=use_bias, name=name)(x) for name, width in widths.items()]


class LayerNorm(nn.Module):
    """Layer norm with scale and bias, with float32 statistics."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        centered = x.astype(jnp.float32)
        centered = centered - centered.mean(-1, keepdims=True)
        inverse_std = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + self.eps)
        return (centered * inverse_std * scale + bias).astype(x.dtype)


class RmsNorm(nn.Module):
    """Root-mean-square norm with a scale, with float32 statistics."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x_float32 = x.astype(jnp.float32)
        mean_square = jnp.square(x_float32).mean(-1, keepdims=True)
        normalised = x_float32 * jax.lax.rsqrt(mean_square + self.eps)
        # Llama was trained with rounding before the scale.
        return scale * normalised.astype(x.dtype)


class GatedMlp(nn.Module):
    """Gated MLP with a SiLU gate; input and output have the same width.

    Attributes:
        width: number of hidden units.
        use_bias: whether the layers have biases.
    """

    width: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Applies the MLP."""
        outputs = joined_dense(self, x, {"gate": self.width, "up": self.width}, self.use_bias)
        gate, up = outputs if len(outputs) == 2 else jnp.split(outputs[0], 2, axis=-1)
        return Dense(x.shape[-1], use_bias=self.use_bias, name="down")(jax.nn.silu(gate) * up)


def activate(name: str, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
    """Applies an activation function elementwise.

    Args:
        name: "gelu" (exact, with the error function), "gelu_tanh" (the tanh approximation), or
            "quick_gelu", x * sigmoid(1.702 x).
        x: the inputs.
    """
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=name == "gelu_tanh")
    return x * jax.nn.sigmoid(1.702 * x)
