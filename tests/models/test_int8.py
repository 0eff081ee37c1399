"""The language model's matrices as int8: worked values, products, layouts, shards, slopes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from stepprune_jax import testing
from stepprune_jax.checkpoints import save
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import load_params, load_vlm
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.int8 import Int8Kernel, quantize
from stepprune_jax.models.layers import product, wide_product
from stepprune_jax.models.sequence import from_embeddings
from stepprune_jax.models.stack import take_layer
from stepprune_jax.models.weights import flatten
from stepprune_jax.parallel.sharding import build_mesh, shardings


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def on_device(kernel):
    return jax.tree.map(jnp.asarray, kernel)


def dequantized(kernel):
    return np.asarray(kernel.value, np.float32) * np.asarray(kernel.scale)[..., None, :]


def test_a_matrix_worked_by_hand():
    # The largest of the columns are 127, 254, 0 and 12.7: scales of 1, 2, 0 and .1.
    kernel = np.float32([[127, 3, 0, -12.7], [-0.4, -254, 0, 0.26], [1.6, 5, 0, 6]])
    value, scale = quantize(kernel)
    assert value.dtype == np.int8 and scale.dtype == np.float32
    # 1.5 and 2.5 steps are rounded to the even 2.
    assert value.tolist() == [[127, 2, 0, -127], [0, -127, 0, 3], [2, 2, 0, 60]]
    np.testing.assert_allclose(scale, [1, 2, 0, 0.1], rtol=1e-6)


def test_no_element_is_off_by_more_than_half_a_step_even_if_it_is_tiny():
    kernel = drawn(3, 40, 24) * np.float32(10) ** np.arange(-40, 32, 3, dtype=np.float32)
    found = quantize(kernel)
    error = np.abs(dequantized(found).astype(np.float64) - kernel)
    half = found.scale[:, None].astype(np.float64) / 2
    # Scales below the normal numbers are themselves rounded, by 1e-45.
    assert (error <= half * (1 + 1e-5) + 127e-45).all()
    assert np.abs(found.value.astype(int)).max() == 127
    np.testing.assert_array_equal(quantize(kernel[1]).value, found.value[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("k", [5, 128, 300])
@pytest.mark.parametrize("lead", [(1,), (2, 3), (1, 1)])
def test_a_product_is_that_of_the_dequantized_matrix(dtype, k, lead):
    kernel, x = on_device(quantize(drawn(k, 24))), jnp.asarray(drawn(*lead, k, seed=1), dtype)
    expected = np.asarray(x, np.float32) @ dequantized(kernel)
    wide, found = wide_product(x, kernel), product(x, kernel)
    assert wide.dtype == jnp.float32 and found.dtype == dtype
    # The integers are exact in any of the dtypes, and sums are float32.
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found, wide.astype(dtype))


def test_the_slope_is_that_of_the_dequantized_matrix_and_weights_get_none():
    kernel, x = on_device(quantize(drawn(300, 24))), jnp.asarray(drawn(2, 300, seed=1))
    full = jnp.asarray(dequantized(kernel))
    found = jax.grad(lambda x: jnp.sin(product(x, kernel)).sum())(x)
    expected = jax.grad(lambda x: jnp.sin(product(x, full)).sum())(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    half = jax.grad(lambda x: product(x, kernel).astype(jnp.float32).sum())(x.astype("bfloat16"))
    assert half.dtype == jnp.bfloat16
    scales = jax.grad(lambda scale: product(x, kernel._replace(scale=scale)).sum())(kernel.scale)
    assert not scales.any()


def test_slices_of_a_stack_and_joined_columns_are_products_of_their_parts():
    kernels = [on_device(quantize(drawn(2, 48, n, seed=n))) for n in (24, 8)]
    x = jnp.asarray(drawn(3, 48))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *kernels)
    assert joined.shape == (2, 48, 32)
    for layer in (1, jnp.int32(1)):
        found = product(x, take_layer(joined, layer))
        parts = [product(x, on_device(quantize(drawn(2, 48, n, seed=n)[1]))) for n in (24, 8)]
        np.testing.assert_allclose(found, jnp.concatenate(parts, -1), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config):
    """Logits of every place of two rows, and of the token after them."""
    ids = jnp.asarray(np.random.default_rng(3).integers(3, 60, (2, 9)))
    hidden = decoder.embed(params["language"], ids)
    sequence = from_embeddings(config, hidden, jnp.array([9, 6]))
    found = vlm.prefill(params, config, sequence, 1, all_logits=True)
    after, _ = vlm.decode_step(params, config, ids[:, 0], found.cache)
    return jnp.concatenate([found.logits, after[:, None]], 1)


def distance(found, expected):
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


@pytest.fixture(params=["llava_folder", "qwen_folder"])
def loaded(request):
    """A tiny model of each family with full and with int8 matrices; that of Qwen has biases."""
    folder = request.getfixturevalue(request.param)
    return [load_vlm(folder, dtype="float32", weights=w, progress=False) for w in ("full", "int8")]


def test_a_model_of_either_family_answers_nearly_as_with_full_weights(loaded):
    full, small = loaded
    own, expected = (flatten(model.params) for model in (small, full))
    kept = {path for path, leaf in own.items() if isinstance(leaf, Int8Kernel)}
    assert kept == {x for x in own if x.startswith("language/") and x.endswith("kernel")}
    assert len(kept) == 7 + ("language/head/kernel" in own)
    for path, leaf in own.items():
        if path in kept:
            wanted = quantize(np.asarray(expected[path]))
            jax.tree.map(np.testing.assert_array_equal, leaf, wanted)
        else:
            np.testing.assert_array_equal(leaf, expected[path])
    found, wanted = (logits(model.params, model.config) for model in (small, full))
    assert 1e-4 < distance(found, wanted) < 0.02


@pytest.mark.parametrize("name", ["shapes", "shapes_qwen"])
def test_a_shipped_model_is_as_near(name):
    full, small = (load_vlm(name, dtype="float32", weights=w) for w in ("full", "int8"))
    found, expected = (logits(model.params, model.config) for model in (small, full))
    assert distance(found, expected) < 0.02


def test_a_tied_head_stays_as_the_embeddings_are(tmp_path):
    folder = testing.tiny_llava(tmp_path, text={"tie_word_embeddings": True})
    full, small = (load_vlm(folder, dtype="float32", weights=w) for w in ("full", "int8"))
    assert "head" not in small.params["language"]
    assert small.params["language"]["embed"]["embedding"].dtype == jnp.float32
    assert distance(*(logits(model.params, model.config) for model in (small, full))) < 0.02


def test_shards_are_slices_of_the_whole_and_give_its_logits(tmp_path):
    # Rows and columns are divided, by each other's axis.
    text = {"vocab_size": 448, "num_key_value_heads": 2}
    source = inspect_folder(testing.tiny_llava(tmp_path, text=text))
    how = {"dtype": jnp.float32, "weights": "int8", "progress": False}
    whole = load_params(source, **how)
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    cut = load_params(source, mesh, **how)
    jax.tree.map(np.testing.assert_array_equal, cut, whole)
    wanted = shardings(cut, source.backbone.SHARDING_RULES, mesh)
    same = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), cut, wanted)
    assert all(jax.tree.leaves(same))
    down = flatten(wanted)["language/layers/mlp/down/kernel"]
    assert down.value.spec == P(None, "tensor", "fsdp") and down.scale.spec == P(None, "fsdp")
    expected = logits(whole, source.config)
    np.testing.assert_allclose(logits(cut, source.config), expected, rtol=1e-4, atol=1e-4)


def test_what_int8_cannot_do_is_refused_in_a_line(loaded, tmp_path, llava_folder, monkeypatch):
    with pytest.raises(ValueError, match=r"weights='full'$"):
        save.save_vlm(loaded[1], tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    monkeypatch.setattr("stepprune_jax.checkpoints.load.read_folder", None)  # nothing is read
    with pytest.raises(ValueError, match=r"^weights is 'int4', expected one of full, int8$"):
        load_vlm(llava_folder, weights="int4")


def test_a_backward_pass_through_the_model_stores_no_matrix(qwen_folder):
    small = load_vlm(qwen_folder, dtype="float32", weights="int8", progress=False)
    text, language = small.config.text, small.params["language"]
    kernels = [leaf for leaf in flatten(language).values() if isinstance(leaf, Int8Kernel)]
    hidden = jnp.asarray(drawn(2, 9, text.hidden_size))
    sequence = from_embeddings(small.config, hidden, jnp.array([9, 6]))

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
    full = jax.tree.map(
        lambda leaf: jnp.asarray(dequantized(leaf)) if isinstance(leaf, Int8Kernel) else leaf,
        language,
        is_leaf=lambda node: isinstance(node, Int8Kernel),
    )
    slope = jax.jit(jax.grad(run, argnums=1))
    found, expected = slope(language, hidden), slope(full, hidden)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
