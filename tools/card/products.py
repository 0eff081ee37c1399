"""Times the matrix products of a language model with XLA's choice, cuBLASLt and Triton.

A program has 50 products, of 10 inputs with 5 matrices, which together exceed the cache. Matrices
have two layouts.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.parallel.compiling import OPTIONS
from tools.bench.timing import time_side_by_side
from tools.card import figures

_ROWS = (128, 1, 704)
_INPUTS, _MATRICES, _REPEATS = 10, 5, 5
_BACKENDS = {
    "choice": {},
    "cublaslt": {"xla_gpu_enable_triton_gemm": False},
    "triton": {"xla_gpu_cublas_fallback": False},
}


def products(inputs: list[jax.Array], matrices: list[jax.Array], axis: int) -> list[jax.Array]:
    """Multiplies each input with each matrix, whose inner axis is `axis`."""
    dimensions = (((1,), (axis,)), ((), ()))
    pairs = itertools.product(inputs, matrices)
    return [jax.lax.dot_general(x, matrix, dimensions) for x, matrix in pairs]


def random_arrays(count: int, *shape: int) -> list[jax.Array]:
    """Returns random bfloat16 arrays of one shape."""
    keys = jax.random.split(jax.random.key(count), count)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def measure(rows: int, k: int, n: int, axis: int) -> dict[str, float | str]:
    """Measures a product [rows, k] x [k, n] with each backend.

    Returns:
        Microseconds of a product and TB/s of the matrix, or the error of a backend.
    """
    inputs, matrices = (
        random_arrays(_INPUTS, rows, k),
        random_arrays(_MATRICES, *((n, k) if axis else (k, n))),
    )
    multiply, measured = functools.partial(products, axis=axis), {}
    for name, options in _BACKENDS.items():
        options = (OPTIONS.get(jax.default_backend()) or {}) | options
        call = functools.partial(jax.jit(multiply, compiler_options=options), inputs, matrices)
        try:
            seconds = time_side_by_side({name: call}, _REPEATS)[name] / (_INPUTS * _MATRICES)
        except jax.errors.JaxRuntimeError as error:
            measured[name] = str(error).partition("\n")[0]
        else:
            measured[f"{name}_us"], measured[f"{name}_tb_s"] = (
                1e6 * seconds,
                2e-12 * k * n / seconds,
            )
    return measured


def main() -> None:
    """Runs the command."""
    flags = figures.parser(__doc__).parse_args()
    text = find_backbone(flags.model).config.text
    e, f = text.hidden_size, text.intermediate_size
    for rows, (k, n) in itertools.product(_ROWS, ((e, e), (e, 3 * e), (e, 2 * f), (f, e))):
        for axis, layout in enumerate(("[in, out]", "[out, in]")):
            description = f"{rows} x {k} x {n}, {layout}"
            figures.add(flags.out, description, **measure(rows, k, n, axis))


if __name__ == "__main__":
    main()
