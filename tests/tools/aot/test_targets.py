"""Names of targets, and programs that once failed to compile for them."""

import types

import jax
import jax.numpy as jnp
import pytest
from aot_targets import find_target
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stepprune_jax import policy
from stepprune_jax.parallel import aot_targets
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as
from stepprune_jax.parallel.compiling import usage
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.policy import PolicyConfig, selection
from stepprune_jax.policy.rollout import start_episode
from stepprune_jax.policy.selection import BLOCK, UNROLL
from tools.aot.hlo import loops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200", ("h200", "1", 1, "h200")),
        ("a100:16", ("a100", "16", 16, "a100-80")),
        ("v5e", ("v5e", "1x1", 1, "tpu-v5e")),
        ("v5p:2x2x4", ("v5p", "2x2x4", 16, "tpu-v5p")),
    ],
)
def test_names_of_targets_are_parsed(name, expected):
    assert aot_targets.read_name(name) == expected
    assert expected[3] in ACCELERATORS


@pytest.mark.parametrize("name", ["h20", "h200:0", "a6000:2x2", "v5e:8"])
def test_invalid_names_are_refused_with_any_compiler(name):
    for function in (aot_targets.read_name, aot_targets.missing, aot_targets.make_target):
        with pytest.raises(ValueError, match=f"target '{name}' is unknown"):
            function(name)


@pytest.mark.parametrize(("name", "kind"), [("h200", "CUDA"), ("v5e", "TPU")])
def test_the_error_of_a_missing_compiler_has_the_pip_command(monkeypatch, name, kind):
    monkeypatch.setattr(aot_targets.importlib.util, "find_spec", lambda module: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(ValueError, match=rf"XLA's {kind} compiler is missing: pip install .*\[aot"):
        aot_targets.make_target(name)


@pytest.mark.parametrize("name", ["h200", "a6000:2", "v5e:2x4", "v6e", "v5p"])
def test_a_target_has_the_devices_of_its_name(name):
    target, target_name = find_target(name), aot_targets.read_name(name)
    assert target.name == name and len(target.devices) == target_name.count
    assert {known_as(device.device_kind) for device in target.devices} == {target_name.accelerator}


def test_an_impossible_layout_of_chips_is_refused():
    find_target("v5e")
    with pytest.raises(ValueError, match="target 'v5e:3x7': libtpu has no such layout of chips"):
        aot_targets.make_target("v5e:3x7")


def trace_pick(target, config, rows, num_tokens, **options):
    """Traces `pick` from shapes, on the first device. `options` are shapes of `Limits`."""
    sharding = NamedSharding(build_mesh("single", target.devices), P())
    memory = (rows, num_tokens + 1, config.policy_width)
    memory = jax.ShapeDtypeStruct(memory, config.dtype or jnp.float32)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (policy.abstract_policy(config), memory, options),
    )

    @jax.jit
    def pick(params, memory, options):
        limits = policy.Limits(**options)
        return selection.choose_tokens(
            params, config, start_episode(params, config, memory, limits=limits)
        )

    return pick.trace(*shapes)


@pytest.mark.parametrize("name", ["h200", "a6000", "v5e"])
@pytest.mark.parametrize(
    ("rows", "dtype", "stop", "layers"),
    [(1, None, "hazard", 1), (2, None, "hazard", 2), (8, "bfloat16", "hazard", 1)]
    + [(2, None, "softmax", layers) for layers in (1, 2)],
)
def test_pick_compiles_for_every_number_of_rows(name, rows, dtype, stop, layers):
    """A concatenation fused with the readout of the hazard crashed XLA's compiler at 2 rows."""
    target = find_target(name)
    # A softmax stop has no margin.
    options = {"decoder_layers": layers, "stop": stop, "batch_budget": "own", "dtype": dtype}
    config = PolicyConfig(feature_width=64, text_width=0, num_heads=4, **options)
    compiled = target.compile(trace_pick(target, config, rows, 144).lower())
    steps, blocks = sorted(loops(compiled.as_text()), key=lambda loop: -len(loop.name))
    assert blocks.name.endswith("pick)/while") and steps.name.startswith(blocks.name)
    # An iteration of the inner loop has eight steps with one decoder layer, and one with two.
    assert 10 < steps.kernels < (200 if layers == 1 else 150) and 3 < blocks.kernels < 300
    assert usage(compiled).total > 4 * 64 * 64


@pytest.mark.parametrize(("rows", "max_kernels"), [(1, 8), (8, 10)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pointer_step_is_few_kernels_at_the_papers_size(rows, max_kernels, dtype):
    """The policy has one decoder layer. At an exact budget, no kernel computes the stop."""
    target = find_target("h200")
    config = PolicyConfig(text_width=0, decoder_layers=1, dtype=dtype)
    budget = jax.ShapeDtypeStruct((rows,), jnp.int32)
    compiled = target.compile(trace_pick(target, config, rows, 576, budget=budget).lower())
    steps, blocks = sorted(loops(compiled.as_text()), key=lambda loop: -len(loop.name))
    step_kernels = steps.kernels / UNROLL + blocks.kernels / BLOCK
    assert 4 < step_kernels <= max_kernels


def test_the_soft_top_k_has_no_window_on_a_tpu():
    """A running logsumexp as a window, fused with other operations, took minutes to compile."""
    target = find_target("v5e")
    sharding = NamedSharding(build_mesh("single", target.devices), P())
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in ((32, 144), (32,))
    ]
    traced = jax.jit(lambda scores, k: policy.soft_topk(scores, k, 0.4)).trace(*shapes)
    assert "reduce_window" not in traced.lower().as_text()
    assert usage(target.compile(traced.lower())).total > 4 * 32 * 144


def test_a_product_without_tiles_is_compiled_without_triton():
    def compile_with(compiler_options):
        if "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise jax.errors.JaxRuntimeError("Couldn't find output tile sizes that satisfy hlo")
        return compiler_options

    target = aot_targets.Target("h200", (), {"xla_gpu_autotune_level": 0})
    options = target.compile(types.SimpleNamespace(compile=compile_with))
    assert options == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def test_other_compile_errors_are_raised():
    def fail(compiler_options):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Reshape input and output shapes")

    lowered = types.SimpleNamespace(compile=fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Reshape"):
        aot_targets.Target("h200", (), {}).compile(lowered)
