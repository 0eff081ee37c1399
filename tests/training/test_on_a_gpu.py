"""A CUDA device computes what the CPU does; without one these are skipped and say so."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import at_line, make_run, metrics, open_tiny

from stepprune_jax import load_vlm, policy
from stepprune_jax.models.attention import Segment, attend, self_attend
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.training import settings, step, train

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The first CUDA device; full float32 products, so that results can be compared."""
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a CUDA device, jax has {jax.default_backend()!r}")
    with jax.default_matmul_precision("highest"):
        yield jax.devices()[0]


@pytest.fixture(scope="module")
def cpu():
    return jax.devices("cpu")[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("xla", "float32", 1e-5), ("xla", "bfloat16", 2e-2), ("cudnn", "bfloat16", 2e-2)],
)
def test_every_attention_is_that_of_the_products(
    gpu, cpu, implementation, dtype, tolerance, causal
):
    shape, keys = (2, 8, 96, 64), jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(key, shape).astype(dtype) for key in keys]
    mask = jnp.tri(shape[2], dtype=bool)[None] if causal else None
    query, key, value = (jax.device_put(x.astype(jnp.float32), cpu) for x in inputs)
    expected = np.asarray(
        jax.jit(lambda q, k, v: attend(q, [Segment(k, v, mask)]))(query, key, value)
    )
    there = [jax.device_put(x, gpu) for x in inputs]
    options = {"causal": causal, "implementation": implementation}
    result = jax.jit(lambda q, k, v: self_attend(q, k, v, **options))(*there)
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, atol=tolerance)
    products = jax.jit(lambda q, k, v: attend(q, [Segment(k, v, mask)]))(*there)
    np.testing.assert_allclose(np.asarray(products, np.float32), expected, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("stop", ["hazard", "aligned", "softmax"])
def test_a_gpu_chooses_what_select_chooses_on_the_cpu(gpu, cpu, rows, stop):
    config = PolicyConfig(
        feature_width=64, text_width=0, num_heads=4, stop=stop, batch_budget="own"
    )
    params = policy.init_policy(jax.random.key(0), config)
    inputs = policy.Inputs(3 * jax.random.normal(jax.random.key(1), (rows, 144, 64)))
    params, inputs = jax.device_put((params, inputs), cpu)
    expected = jax.jit(policy.select)(params, config, inputs)
    params, inputs = jax.device_put((params, inputs), gpu)
    result = jax.jit(policy.choose)(params, config, inputs)
    assert int(expected.count.min()) > 0
    np.testing.assert_array_equal(result.action, expected.action)
    np.testing.assert_array_equal(result.count, expected.count)


def test_an_updates_loss_is_that_of_the_cpu(gpu, cpu, world, tmp_path):
    run = make_run(*world)
    model = load_vlm(world[0], None, jnp.float32, use="training", progress=False)
    setup = settings.make_step_config(run, model.backbone)
    batch, stats = open_tiny(run, tmp_path)[0], FeatureStats.start(model.config.feature_width)
    # Compiled, as in a run: made eagerly it held a buffer twice, and was refused as a donation.
    state = jax.jit(step.init_state, static_argnums=1)(jax.random.key(0), setup)
    arguments = (state, stats, batch, jax.random.key(1))
    result = {}
    for name, device in (("gpu", gpu), ("cpu", cpu)):
        params, rest = jax.device_put((model.params, arguments), device)
        _, scalars = step.update(params, *rest, jnp.int32(0), setup=setup)
        result[name] = jax.tree.map(float, scalars)
    for scalar in ("loss", "lm_loss", "grad_norm", "k_mean"):
        assert result["gpu"][scalar] == pytest.approx(result["cpu"][scalar], rel=1e-3), scalar


def test_a_run_goes_on_bit_for_bit_on_the_same_card(world, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make_run(*world), whole)
    at_line(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(make_run(*world), parts)
    assert "Stopped after step 4 of 6" in capsys.readouterr().out
    train(make_run(*world), parts)
    assert metrics(parts) == metrics(whole)
    name = "policy.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
