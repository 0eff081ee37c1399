"""Products of a language model: XLA's choice, cuBLASLt's and Triton's, in two layouts.

A program has 50: of 10 inputs with each of 5 matrices in turn, which are more than a cache holds.
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


def draw(count: int, *shape: int) -> list[jax.Array]:
    """Draws arrays."""
    keys = jax.random.split(jax.random.key(count), count)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def measure(rows: int, k: int, n: int, axis: int) -> dict[str, float | str]:
    """Returns microseconds of a product, and TB of the matrix a second, or why there are none."""
    inputs, matrices = draw(_INPUTS, rows, k), draw(_MATRICES, *((n, k) if axis else (k, n)))
    given, measured = functools.partial(products, axis=axis), {}
    for name, options in _BACKENDS.items():
        options = (OPTIONS.get(jax.default_backend()) or {}) | options
        call = functools.partial(jax.jit(given, compiler_options=options), inputs, matrices)
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
    """Measures shape by shape, those of 128 rows first."""
    given = figures.parser(__doc__).parse_args()
    text = find_backbone(given.model).config.text
    e, f = text.hidden_size, text.intermediate_size
    for rows, (k, n) in itertools.product(_ROWS, ((e, e), (e, 3 * e), (e, 2 * f), (f, e))):
        for axis, layout in enumerate(("[in, out]", "[out, in]")):
            what = f"{rows} x {k} x {n}, {layout}"
            figures.add(given.out, what, **measure(rows, k, n, axis))


if __name__ == "__main__":
    main()
