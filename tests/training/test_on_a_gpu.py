"""A CUDA device computes what the CPU computes. Without a CUDA device, the tests are skipped."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import call_at_line, make_run, metrics, open_tiny_batches

from stepprune_jax import load_vlm, policy
from stepprune_jax.models.attention import Segment, attend, self_attend
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.training import step, train
from stepprune_jax.training.step_config import make_step_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The first CUDA device, with float32 products at full precision for exact comparisons."""
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
def test_attention_kernels_equal_explicit_products(
    gpu, cpu, implementation, dtype, tolerance, causal
):
    shape, keys = (2, 8, 96, 64), jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(key, shape).astype(dtype) for key in keys]
    mask = jnp.tri(shape[2], dtype=bool)[None] if causal else None

    @jax.jit
    def attend_by_products(query, key, value):
        return attend(query, [Segment(key, value, mask)])

    cpu_inputs = [jax.device_put(x.astype(jnp.float32), cpu) for x in inputs]
    expected = np.asarray(attend_by_products(*cpu_inputs))
    gpu_inputs = [jax.device_put(x, gpu) for x in inputs]
    options = {"causal": causal, "implementation": implementation}
    kernel = jax.jit(lambda q, k, v: self_attend(q, k, v, **options))
    for result in (kernel(*gpu_inputs), attend_by_products(*gpu_inputs)):
        np.testing.assert_allclose(np.asarray(result, np.float32), expected, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("stop", ["hazard", "aligned", "softmax"])
def test_a_gpu_chooses_the_tokens_that_the_cpu_chooses(gpu, cpu, rows, stop):
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


def test_the_loss_of_an_update_equals_the_cpus(gpu, cpu, world, tmp_path):
    run = make_run(*world)
    model = load_vlm(world[0], None, jnp.float32, use="training", progress=False)
    config = make_step_config(run, model.backbone)
    batch = open_tiny_batches(run, tmp_path)[0]
    stats = FeatureStats.start(model.config.feature_width)
    # Compiled, as in a run. An eager state holds a buffer twice, which cannot be donated.
    state = jax.jit(step.init_state, static_argnums=1)(jax.random.key(0), config)
    arguments = (state, stats, batch), jax.random.key(1)
    results = {}
    for name, device in (("gpu", gpu), ("cpu", cpu)):
        params, (inputs, key) = jax.device_put((model.params, arguments), device)
        _, scalars = step.update(params, *inputs, key=key, step=jnp.int32(0), config=config)
        results[name] = jax.tree.map(float, scalars)
    for name in ("loss", "lm_loss", "grad_norm", "k_mean"):
        assert results["gpu"][name] == pytest.approx(results["cpu"][name], rel=1e-3), name


def test_a_run_resumes_bit_for_bit_on_the_same_card(world, tmp_path, monkeypatch, capsys):
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    train(make_run(*world), uninterrupted)
    call_at_line(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(make_run(*world), resumed)
    assert "Stopped after step 4 of 6" in capsys.readouterr().out
    train(make_run(*world), resumed)
    assert metrics(resumed) == metrics(uninterrupted)
    name = "policy.safetensors"
    assert (resumed / name).read_bytes() == (uninterrupted / name).read_bytes()
