"""Names of targets, and the cases that once failed to compile for them."""

import types

import jax
import jax.numpy as jnp
import pytest
from aot_targets import made
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
def test_names_are_read(name, expected):
    assert aot_targets.read_name(name) == expected
    assert expected[3] in ACCELERATORS


@pytest.mark.parametrize("name", ["h20", "h200:0", "a6000:2x2", "v5e:8"])
def test_bad_names_are_refused_whatever_is_installed(name):
    for function in (aot_targets.read_name, aot_targets.missing, aot_targets.make_target):
        with pytest.raises(ValueError, match=f"target '{name}' is unknown"):
            function(name)


@pytest.mark.parametrize(("name", "kind"), [("h200", "CUDA"), ("v5e", "TPU")])
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, kind):
    monkeypatch.setattr(aot_targets.importlib.util, "find_spec", lambda module: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(ValueError, match=rf"XLA's {kind} compiler is missing: pip install .*\[aot"):
        aot_targets.make_target(name)


@pytest.mark.parametrize("name", ["h200", "a6000:2", "v5e:2x4", "v6e", "v5p"])
def test_devices_are_those_of_the_name(name):
    target, named = made(name), aot_targets.read_name(name)
    assert target.name == name and len(target.devices) == named.count
    assert {known_as(device.device_kind) for device in target.devices} == {named.accelerator}


def test_a_layout_that_no_machine_has_is_refused():
    made("v5e")
    with pytest.raises(ValueError, match="target 'v5e:3x7': libtpu has no such layout of chips"):
        aot_targets.make_target("v5e:3x7")


def trace_pick(target, config, rows, num_tokens, **options):
    """`pick` from shapes alone, on the first device; `options` are shapes, too."""
    at = NamedSharding(build_mesh("single", target.devices), P())
    memory = (rows, num_tokens + 1, config.policy_width)
    memory = jax.ShapeDtypeStruct(memory, config.dtype or jnp.float32)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
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
    """A concatenation fused with the hazard's readout ended XLA's CUDA compiler at 2 rows and 8."""
    target = made(name)
    # A softmax has no margin of the stop to probe.
    kind = {"decoder_layers": layers, "stop": stop, "batch_budget": "own", "dtype": dtype}
    config = PolicyConfig(feature_width=64, text_width=0, num_heads=4, **kind)
    compiled = target.compile(trace_pick(target, config, rows, 144).lower())
    steps, blocks = sorted(loops(compiled.as_text()), key=lambda loop: -len(loop.name))
    assert blocks.name.endswith("pick)/while") and steps.name.startswith(blocks.name)
    # A pass of the inner loop is eight steps with one decoder layer, one with two.
    assert 10 < steps.kernels < (200 if layers == 1 else 150) and 3 < blocks.kernels < 300
    assert usage(compiled).total > 4 * 64 * 64


@pytest.mark.parametrize(("rows", "most"), [(1, 8), (8, 10)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pointer_step_is_few_kernels_at_the_papers_size(rows, most, dtype):
    """With one decoder layer; at a budget nothing looks at the stop."""
    target = made("h200")
    config = PolicyConfig(text_width=0, decoder_layers=1, dtype=dtype)
    budget = jax.ShapeDtypeStruct((rows,), jnp.int32)
    compiled = target.compile(trace_pick(target, config, rows, 576, budget=budget).lower())
    steps, blocks = sorted(loops(compiled.as_text()), key=lambda loop: -len(loop.name))
    each = steps.kernels / UNROLL + blocks.kernels / BLOCK
    assert 4 < each <= most


def test_the_soft_top_k_has_no_window_on_a_tpu():
    """A running logsumexp as a window, fused with its neighbours, took the compiler minutes."""
    target = made("v5e")
    at = NamedSharding(build_mesh("single", target.devices), P())
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at) for shape in ((32, 144), (32,))]
    traced = jax.jit(lambda scores, k: policy.soft_topk(scores, k, 0.4)).trace(*shapes)
    assert "reduce_window" not in traced.lower().as_text()
    assert usage(target.compile(traced.lower())).total > 4 * 32 * 144


def test_a_product_without_tiles_is_compiled_without_triton():
    def compile_with(compiler_options):
        if "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise jax.errors.JaxRuntimeError("Couldn't find output tile sizes that satisfy hlo")
        return compiler_options

    target = aot_targets.Target("h200", (), {"xla_gpu_autotune_level": 0})
    given = target.compile(types.SimpleNamespace(compile=compile_with))
    assert given == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def test_other_failures_are_not_tried_again():
    def fail(compiler_options):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Reshape input and output shapes")

    lowered = types.SimpleNamespace(compile=fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Reshape"):
        aot_targets.Target("h200", (), {}).compile(lowered)
