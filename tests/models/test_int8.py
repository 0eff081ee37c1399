"""Int8 matrices of the language model: values, products, gradients, layouts and shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_llava_next import tiny_llava_next
from tiny_qwen import tiny_qwen3

from stepprune_jax import testing
from stepprune_jax.checkpoints import save
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import load_params, load_vlm
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.int8 import Int8Kernel, quantize
from stepprune_jax.models.layers import matmul, matmul_float32
from stepprune_jax.models.sequence import from_embeddings
from stepprune_jax.models.stack import take_layer
from stepprune_jax.models.weights import flatten
from stepprune_jax.parallel.sharding import build_mesh, shardings


def random_array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def on_device(kernel):
    return jax.tree.map(jnp.asarray, kernel)


def dequantized(kernel):
    return np.asarray(kernel.value, np.float32) * np.asarray(kernel.scale)[..., None, :]


def test_a_small_matrix_is_quantized_as_calculated_by_hand():
    # The columns' largest magnitudes are 127, 254, 0 and 12.7, so the scales are 1, 2, 0 and 0.1.
    kernel = np.float32([[127, 3, 0, -12.7], [-0.4, -254, 0, 0.26], [1.6, 5, 0, 6]])
    value, scale = quantize(kernel)
    assert value.dtype == np.int8 and scale.dtype == np.float32
    # 1.5 and 2.5 steps are both rounded to 2, the even number.
    assert value.tolist() == [[127, 2, 0, -127], [0, -127, 0, 3], [2, 2, 0, 60]]
    np.testing.assert_allclose(scale, [1, 2, 0, 0.1], rtol=1e-6)


def test_no_element_changes_by_more_than_half_a_step():
    kernel = random_array(3, 40, 24) * np.float32(10) ** np.arange(-40, 32, 3, dtype=np.float32)
    quantized = quantize(kernel)
    error = np.abs(dequantized(quantized).astype(np.float64) - kernel)
    half_step = quantized.scale[:, None].astype(np.float64) / 2
    # Subnormal scales are themselves rounded, by 1e-45.
    assert (error <= half_step * (1 + 1e-5) + 127e-45).all()
    assert np.abs(quantized.value.astype(int)).max() == 127
    np.testing.assert_array_equal(quantize(kernel[1]).value, quantized.value[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("k", [5, 128, 300])
@pytest.mark.parametrize("leading_shape", [(1,), (2, 3), (1, 1)])
def test_a_product_equals_the_product_with_the_dequantized_matrix(dtype, k, leading_shape):
    kernel = on_device(quantize(random_array(k, 24)))
    x = jnp.asarray(random_array(*leading_shape, k, seed=1), dtype)
    expected = np.asarray(x, np.float32) @ dequantized(kernel)
    float32_result, result = matmul_float32(x, kernel), matmul(x, kernel)
    assert float32_result.dtype == jnp.float32 and result.dtype == dtype
    # The integers are exact in all three dtypes, and sums are float32.
    np.testing.assert_allclose(float32_result, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(result, float32_result.astype(dtype))


def test_only_rows_get_a_gradient_equal_to_the_dequantized_one():
    kernel = on_device(quantize(random_array(300, 24)))
    x = jnp.asarray(random_array(2, 300, seed=1))
    dequantized_kernel = jnp.asarray(dequantized(kernel))
    gradient = jax.grad(lambda x: jnp.sin(matmul(x, kernel)).sum())(x)
    expected = jax.grad(lambda x: jnp.sin(matmul(x, dequantized_kernel)).sum())(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
    gradient_of_sum = jax.grad(lambda x: matmul(x, kernel).astype(jnp.float32).sum())
    assert gradient_of_sum(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    scale_gradient = jax.grad(lambda scale: matmul(x, kernel._replace(scale=scale)).sum())
    assert not scale_gradient(kernel.scale).any()


def test_stacked_and_joined_matrices_give_the_products_of_their_parts():
    kernels = [on_device(quantize(random_array(2, 48, n, seed=n))) for n in (24, 8)]
    x = jnp.asarray(random_array(3, 48))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *kernels)
    assert joined.shape == (2, 48, 32)
    for layer in (1, jnp.int32(1)):
        result = matmul(x, take_layer(joined, layer))
        expected = [
            matmul(x, on_device(quantize(random_array(2, 48, n, seed=n)[1]))) for n in (24, 8)
        ]
        np.testing.assert_allclose(result, jnp.concatenate(expected, -1), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config):
    """Computes logits at every slot of two rows, and logits of the next token."""
    ids = jnp.asarray(np.random.default_rng(3).integers(3, 60, (2, 9)))
    hidden = decoder.embed(params["language"], ids)
    sequence = from_embeddings(config, hidden, jnp.array([9, 6]))
    prefill = vlm.prefill(params, config, sequence, 1, all_logits=True)
    next_logits, _ = vlm.decode_step(params, config, ids[:, 0], prefill.cache)
    return jnp.concatenate([prefill.logits, next_logits[:, None]], 1)


def load_both(folder):
    """Loads a model with full and with int8 matrices."""
    return [load_vlm(folder, dtype="float32", weights=w, progress=False) for w in ("full", "int8")]


def distance_of_logits(full_model, int8_model):
    """Returns the norm of the difference, relative to the norm of the full model's logits."""
    expected, actual = (logits(model.params, model.config) for model in (full_model, int8_model))
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@pytest.fixture(scope="module")
def next_folder(tmp_path_factory):
    return tiny_llava_next(tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=["llava_folder", "qwen_folder"])
def loaded(request):
    """Returns a tiny model of a family with full and with int8 matrices; Qwen2.5-VL has biases."""
    return load_both(request.getfixturevalue(request.param))


@pytest.mark.parametrize(
    "loaded",
    [
        pytest.param("llava_folder", marks=pytest.mark.supports("llava", "int8")),
        pytest.param("next_folder", marks=pytest.mark.supports("llava_next", "int8")),
        pytest.param("qwen_folder", marks=pytest.mark.supports("qwen2_5_vl", "int8")),
        pytest.param("qwen3_folder", marks=pytest.mark.supports("qwen3_vl", "int8")),
    ],
    indirect=True,
)
def test_int8_weights_change_the_logits_of_a_tiny_model_by_less_than_3_percent(loaded):
    full_model, int8_model = loaded
    int8_weights, full_weights = (flatten(model.params) for model in (int8_model, full_model))
    quantized_paths = {path for path, leaf in int8_weights.items() if isinstance(leaf, Int8Kernel)}
    assert quantized_paths == {
        x for x in int8_weights if x.startswith("language/") and x.endswith("kernel")
    }
    assert len(quantized_paths) == 7 + ("language/head/kernel" in int8_weights)
    for path, leaf in int8_weights.items():
        if path in quantized_paths:
            reference = quantize(np.asarray(full_weights[path]))
            jax.tree.map(np.testing.assert_array_equal, leaf, reference)
        else:
            np.testing.assert_array_equal(leaf, full_weights[path])
    assert 1e-4 < distance_of_logits(full_model, int8_model) < 0.03


@pytest.mark.parametrize("name", ["shapes", "shapes_qwen"])
def test_int8_weights_change_the_logits_of_a_shipped_model_by_less_than_2_percent(name):
    assert distance_of_logits(*load_both(name)) < 0.02


def test_a_tied_head_is_not_quantized(tmp_path):
    folder = testing.tiny_llava(tmp_path, text={"tie_word_embeddings": True})
    full_model, int8_model = load_both(folder)
    assert "head" not in int8_model.params["language"]
    assert int8_model.params["language"]["embed"]["embedding"].dtype == jnp.float32
    assert distance_of_logits(full_model, int8_model) < 0.02


def test_sharded_weights_equal_unsharded_weights_and_give_the_same_logits(tmp_path):
    # Both rows and columns of a matrix are sharded, over different axes.
    text = {"vocab_size": 448, "num_key_value_heads": 2}
    source = inspect_folder(testing.tiny_llava(tmp_path, text=text))
    options = {"dtype": jnp.float32, "weights": "int8", "progress": False}
    unsharded = load_params(source, **options)
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharded = load_params(source, mesh, **options)
    jax.tree.map(np.testing.assert_array_equal, sharded, unsharded)
    expected_shardings = shardings(sharded, source.backbone.SHARDING_RULES, mesh)
    for x, sharding in zip(*map(jax.tree.leaves, (sharded, expected_shardings)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    down = flatten(expected_shardings)["language/layers/mlp/down/kernel"]
    assert down.value.spec == P(None, "tensor", "fsdp") and down.scale.spec == P(None, "fsdp")
    expected = logits(unsharded, source.config)
    np.testing.assert_allclose(logits(sharded, source.config), expected, rtol=1e-4, atol=1e-4)


def test_int8_files_and_unknown_formats_are_refused(loaded, tmp_path, llava_folder, monkeypatch):
    with pytest.raises(ValueError, match=r"weights='full'$"):
        save.save_vlm(loaded[1], tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    # The check comes before any file is read.
    monkeypatch.setattr("stepprune_jax.checkpoints.load.read_folder", None)
    with pytest.raises(ValueError, match=r"^weights is 'int4', expected one of full, int8$"):
        load_vlm(llava_folder, weights="int4")


def test_a_backward_pass_stores_no_dequantized_matrix(qwen_folder):
    model = load_vlm(qwen_folder, dtype="float32", weights="int8", progress=False)
    text, language = model.config.text, model.params["language"]
    kernels = [leaf for leaf in flatten(language).values() if isinstance(leaf, Int8Kernel)]
    hidden = jnp.asarray(random_array(2, 9, text.hidden_size))
    sequence = from_embeddings(model.config, hidden, jnp.array([9, 6]))

    def run(language, hidden):
        rows = sequence.rows._replace(hidden=hidden)
        stage = decoder.run_layers(language, text, rows, (0, text.num_layers))
        return jnp.sin(stage.hidden).sum()

    def backward(language, hidden):
        return jax.vjp(functools.partial(run, language), hidden)[1]

    stored = jax.tree.leaves(jax.eval_shape(backward, language, hidden))
    assert not {k.shape for k in kernels} & {x.shape for x in stored if x.dtype != jnp.int8}
    integers = sum(x.size for x in stored if x.dtype == jnp.int8)
    assert integers <= sum(k.value.size for k in kernels)
    dequantized_language = jax.tree.map(
        lambda leaf: jnp.asarray(dequantized(leaf)) if isinstance(leaf, Int8Kernel) else leaf,
        language,
        is_leaf=lambda node: isinstance(node, Int8Kernel),
    )
    gradient = jax.jit(jax.grad(run, argnums=1))
    actual, expected = gradient(language, hidden), gradient(dequantized_language, hidden)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
