import io

import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.serving.tensors import tensor_file


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (1, 1)), ("bfloat16", (3, 700)), ("float16", (70_000, 2))]
)
def test_torch_reads_a_tensor_file(dtype, shape):
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).standard_normal(shape)
    matrix = np.asarray(jnp.asarray(numbers, dtype))
    read = torch.load(io.BytesIO(tensor_file(matrix)), weights_only=True)
    assert read.dtype == getattr(torch, dtype) and read.is_contiguous()
    np.testing.assert_array_equal(read.float().numpy(), matrix.astype(np.float32))
