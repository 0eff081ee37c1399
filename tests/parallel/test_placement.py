"""Placement of weights, and programs that `jit_for_weights` compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stepprune_jax.models import stack
from stepprune_jax.parallel import placement, programs
from stepprune_jax.parallel.sharding import build_mesh


def test_answering_programs_read_large_layers_without_a_copy(monkeypatch):
    layers_of_traces = []

    def multiply_last(params, x):
        layers_of_traces.append(params["a"]["layers"])
        return params["a"]["layers"][-1]["w"] * x

    monkeypatch.setattr(stack, "_LARGE_LAYER_BYTES", 4096)
    w = jnp.arange(3 * 1024, dtype=jnp.float32).reshape(3, 1024)
    weights = {"a": {"layers": {"w": w}, "b": w[0]}}
    run = programs.jit_for_weights(multiply_last, (), answers=True)
    np.testing.assert_array_equal(run(weights, 2.0), w[-1] * 2)
    run(weights, 3.0)
    assert [len(layers) for layers in layers_of_traces] == [3] and run.num_compiled() == 1
    views = programs._layer_views(weights)["a"]["layers"]
    start = w.unsafe_buffer_pointer()
    assert [layer["w"].ctypes.data - start for layer in views] == [0, 4096, 8192]
    assert not placement.decodes_by_step(weights)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights
    )
    assert run.trace(shapes, 2.0).lower()


def test_matrices_are_joined_on_gpus_that_hold_all_heads(monkeypatch):
    def prepared_matrices(platform, mesh):
        monkeypatch.setattr(placement, "devices_of", lambda params: (platform, 2))
        mlp = {name: {"kernel": jnp.ones((2, 4, 6))} for name in ("gate", "up", "down")}
        params = {"language": {"layers": {"mlp": mlp}}}
        if mesh is not None:
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        return {*placement.prepare_to_answer(params)["language"]["layers"]["mlp"]}

    separate, joined = {"gate", "up", "down"}, {"gate_up", "down"}
    meshes = [build_mesh(preset, jax.devices()[:2]) for preset in ("fsdp", "tensor")]
    on_gpu = [prepared_matrices("gpu", mesh) for mesh in (None, *meshes)]
    assert on_gpu == [joined, joined, separate]
    assert [prepared_matrices(platform, None) for platform in ("cpu", "tpu")] == [separate] * 2


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setattr(programs, "_cpu_functions", [])
    return programs.jit_for_weights(lambda params, x: params["w"] * x, ())


def test_programs_on_cpus_are_limited_and_dropped_ones_are_counted(double, monkeypatch):
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 3)
    (program,) = programs._cpu_functions
    weights, sizes = {"w": jnp.full((), 2.0)}, []
    for size in range(1, 11):
        np.testing.assert_array_equal(double(weights, jnp.ones(size)), np.full(size, 2.0))
        sizes.append(program._cache_size())
    assert max(sizes) == 3 and double.num_compiled() == 10
    double(weights, jnp.ones(10))
    assert double.num_compiled() == 10  # the last program was not dropped
