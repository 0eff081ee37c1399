"""Products, norms and activations, shared by the backbones, as modules of Flax.

Norms are computed in float32 whatever the dtype of the weights.
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

# Rows of an int8 matrix that are converted at once on a CPU.
_TILE = 128


class BlockOutput(NamedTuple):
    """Results of a block; keys and queries after rotary positions, `mlp_input` normalised."""

    hidden: Float[Array, "b t width"]
    query: Float[Array, "b h t c"]
    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t c"]
    mlp_input: Float[Array, "b t width"] | None = None


def wide_product(
    x: Float[Array, "*b k"],
    kernel: Float[Array, "k n"] | Float[Array, "n k"] | Int8Kernel,
    axis: int = 0,
) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix, or its transpose (axis 1), in float32 and not rounded."""
    if isinstance(kernel, Int8Kernel):
        return _int8_product(x.dtype, x, kernel)
    rows, lead = x.reshape(-1, x.shape[-1]) if x.size == x.shape[-1] else x, x.shape[:-1]
    if x.size == x.shape[-1] and kernel.dtype != jnp.float32:
        # On a CPU, XLA converts all of a narrow matrix to float32 before multiplying it with a
        # single row, which takes ten times as long; with two rows it does not.
        rows = jnp.broadcast_to(rows, (2, x.size))
    dims = (((rows.ndim - 1,), (axis,)), ((), ()))
    result = jax.lax.dot_general(rows, kernel, dims, preferred_element_type=jnp.float32)
    return result if rows is x else result[:1].reshape(*lead, -1)


@jax.custom_jvp
def _narrow_product(x, kernel):
    """Computes `x @ kernel`, summed in float32 and rounded to the dtype of x."""

    def rounded(x, kernel):
        # For a narrow result, XLA on a CPU would convert all of the matrix to float32.
        return wide_product(x, kernel).astype(x.dtype)

    return jax.lax.platform_dependent(x, kernel, cpu=rounded, default=jnp.matmul)


def _narrow_product_jvp(primals, tangents):
    (x, kernel), (along_x, along_kernel) = primals, tangents
    result = _narrow_product(x, kernel)
    slope = jnp.zeros_like(result)
    # A frozen matrix has no tangent and must get no gradient, a product of the same cost.
    if not isinstance(along_x, SymbolicZero):
        slope = slope + along_x @ kernel
    if not isinstance(along_kernel, SymbolicZero):
        slope = slope + x @ along_kernel
    return result, slope


_narrow_product.defjvp(_narrow_product_jvp, symbolic_zeros=True)


def _converted_product(x: Float[Array, "*b k"], value: Int8[Array, "k n"]) -> Float[Array, "*b n"]:
    """Multiplies rows with integers in float32, without writing a converted copy of them."""

    def fused(x, value):
        return wide_product(x, value.astype(x.dtype))

    def tiled(x, value):
        # XLA for CPUs does not convert within a product; a few rows at a time stay in its cache.
        first = (len(value) - 1) % _TILE + 1
        total = fused(x[..., :first], value[:first])
        if first == len(value):
            return total

        def add(total, start):
            part = jax.lax.dynamic_slice_in_dim(x, start, _TILE, x.ndim - 1)
            rows = jax.lax.dynamic_slice_in_dim(value, start, _TILE)
            return total + fused(part, rows), None

        return jax.lax.scan(add, total, jnp.arange(first, len(value), _TILE))[0]

    return jax.lax.platform_dependent(x, value, cpu=tiled, default=fused)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _int8_product(dtype, x, kernel):
    """Computes `x @ kernel` in float32 for x of a dtype; a backward pass converts again."""
    del dtype
    return _converted_product(x, kernel.value) * kernel.scale


def _int8_product_bwd(dtype, kernel, along):
    along = (along * kernel.scale).astype(dtype)
    return wide_product(along, kernel.value.astype(dtype), axis=1).astype(dtype), None


_int8_product.defvjp(
    lambda dtype, x, kernel: (_int8_product(dtype, x, kernel), kernel), _int8_product_bwd
)


def product(
    x: Float[Array, "*b k"], kernel: Float[Array, "k n"] | Int8Kernel
) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix, summed in float32 and rounded to the dtype of the rows."""
    if isinstance(kernel, Int8Kernel):
        return wide_product(x, kernel).astype(x.dtype)
    return x @ kernel if x.dtype == jnp.float32 else _narrow_product(x, kernel)


def _promoted(*arrays, dtype=None, inexact=True):
    if any(isinstance(array, Int8Kernel) for array in arrays):
        return [*arrays]
    return promote_dtype(*arrays, dtype=dtype, inexact=inexact)


# `nn.Dense` with that product.
Dense = functools.partial(
    nn.Dense,
    dot_general=lambda x, kernel, *_, **__: product(x, kernel),
    promote_dtype=_promoted,
)


def side_by_side(
    module: nn.Module, x: Float[Array, "*b k"], widths: dict[str, int], use_bias: bool
) -> list[Float[Array, "*b n"]]:
    """Multiplies rows with several matrices of a module; a single result if they are joined."""
    joined = "_".join(widths)
    if module.has_variable("params", joined):
        widths = {joined: sum(widths.values())}
    return [Dense(width, use_bias=use_bias, name=name)(x) for name, width in widths.items()]


class LayerNorm(nn.Module):
    """Layer norm with scale and bias, statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        centred = x.astype(jnp.float32)
        centred = centred - centred.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return (normed * scale + bias).astype(x.dtype)


class RmsNorm(nn.Module):
    """Division by the root mean square, with scale, statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        # Rounded before the scale, as Llama was trained.
        return scale * normed.astype(x.dtype)


class GatedMlp(nn.Module):
    """Gated MLP of a hidden width, to the width of its input."""

    width: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Applies the MLP."""
        parts = side_by_side(self, x, {"gate": self.width, "up": self.width}, self.use_bias)
        gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=-1)
        return Dense(x.shape[-1], use_bias=self.use_bias, name="down")(jax.nn.silu(gate) * up)


def activate(name: str, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
    """Applies "gelu" (exact, by the error function), "gelu_tanh", or "quick_gelu".

    They are jax's two forms of GELU, and x * sigmoid(1.702 x).
    """
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=name == "gelu_tanh")
    return x * jax.nn.sigmoid(1.702 * x)
