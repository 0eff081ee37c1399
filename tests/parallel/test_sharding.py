import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from visual import random_bytes, visual_of

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.efficiency.model_shapes import KNOWN, MODELS, find_backbone
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.llava.weights import SHARDING_RULES
from stepprune_jax.models.weights import join_kernels
from stepprune_jax.parallel.compiling import usage
from stepprune_jax.parallel.placement import local_rows
from stepprune_jax.parallel.sharding import BATCH_RULES, build_mesh, matches, path_name, shardings
from stepprune_jax.testing import tiny_hf_config
from tools.bench import memory

DEVICES = {"single": 1, "data": 2, "tensor": 2, "data_tensor": 4}


ODD_KERNEL = jax.ShapeDtypeStruct((6, 9), jnp.float32)


def mesh_of(preset):
    return build_mesh(preset, jax.devices()[: DEVICES[preset]])


def leaves(tree):
    """Returns pairs (path, leaf)."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("fsdp_tensor", (1, 4, 2)),
        ("data_fsdp", (1, 8, 1)),  # one process, so all devices shard the weights
        ({"tensor": 4, "data": -1}, (2, 1, 4)),
        ("tensor=4, data=-1", (2, 1, 4)),
    ],
)
def test_a_preset_determines_the_axes_of_a_mesh(preset, sizes):
    mesh = build_mesh(preset)
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_a_single_process_holds_all_rows():
    assert local_rows(None, 6) == slice(0, 6)
    assert local_rows(build_mesh({"data": 4, "tensor": 2}), 8) == slice(0, 8)
    # 8 devices do not divide 12 rows, so each device holds all rows.
    assert local_rows(build_mesh("data"), 12) == slice(0, 12)


BAD_SIZES = ({"tensor": 3, "data": -1}, {"tensor": -1, "data": -1})


@pytest.mark.parametrize("preset", ["pipeline", "data=2,fsdp", "data=8,model=1", *BAD_SIZES])
def test_meshes_that_do_not_fit_the_devices_are_refused(preset):
    with pytest.raises(ValueError, match="mesh"):
        build_mesh(preset)


@pytest.mark.parametrize("name", KNOWN)
def test_each_weight_has_a_valid_rule_and_each_rule_has_a_weight(name):
    backbone = find_backbone(name)
    params, rules = vlm.abstract_params(backbone), backbone.SHARDING_RULES
    shardings(params, rules, build_mesh("fsdp_tensor"))
    # The first matching rule applies, so a long pattern must come before its suffixes.
    applied_patterns = {
        next(pattern for pattern, _ in rules if matches(path, pattern))
        for path, _ in [*leaves(params), *leaves(jax.eval_shape(join_kernels, params))]
    }
    tied = {"language/head/kernel"} if backbone.config.text.tie_embeddings else set()
    assert applied_patterns | tied == {pattern for pattern, _ in rules}


@pytest.mark.parametrize("name", MODELS)
def test_all_large_weights_are_sharded(name):
    mesh, params = build_mesh("fsdp_tensor"), vlm.abstract_params(find_backbone(name))
    leaf_shardings = jax.tree.leaves(shardings(params, SHARDING_RULES, mesh))
    replicated_sizes = [
        leaf.size
        for (_, leaf), sharding in zip(leaves(params), leaf_shardings, strict=True)
        if math.prod(sharding.shard_shape(leaf.shape)) * mesh.size != leaf.size
    ]
    # Scales, biases, and the first layer of the vision tower.
    assert max(replicated_sizes) < 2**20 and sum(replicated_sizes) < 2e6


# From the index files of the published models: half of `total_size`, for two bytes per weight.
@pytest.mark.parametrize(
    "name, weights",
    [
        ("qwen2.5-vl-3b", 3_754_622_976),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen3-vl-2b", 2_127_532_032),
        ("qwen3-vl-8b", 8_767_123_696),
    ],
)
def test_a_qwen_has_the_published_number_of_weights(name, weights):
    params = vlm.abstract_params(find_backbone(name))
    assert sum(leaf.size for _, leaf in leaves(params)) == weights


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ({"head": {"kernel": ODD_KERNEL}}, r"language/head/kernel of shape \(6, 9\): 9 is not"),
        ({"tail": ODD_KERNEL}, "no sharding rule matches 'language/tail'"),
    ],
)
def test_a_weight_that_cannot_be_sharded_is_named(language, message):
    with pytest.raises(ValueError, match=message):
        shardings({"language": language}, SHARDING_RULES, mesh_of("tensor"))


@pytest.mark.parametrize("name", ["llava-7b", "qwen2.5-vl-3b"])
def test_joined_matrices_are_sharded_along_their_input_axis(name):
    backbone = find_backbone(name)
    joined = jax.eval_shape(join_kernels, vlm.abstract_params(backbone))
    mesh = build_mesh("fsdp", jax.devices()[:2])
    language = shardings(joined, backbone.SHARDING_RULES, mesh)["language"]["layers"]
    kernels = language["attention"]["query_key_value"], language["mlp"]["gate_up"]
    assert [kernel["kernel"].spec for kernel in kernels] == [P(None, "fsdp", None)] * 2


def test_prefill_and_decode_of_a_7b_model_fit_the_expected_memory():
    backbone, mesh, num_parts = find_backbone("llava-7b"), mesh_of("data_tensor"), 2
    programs = ("prefill", "decode")
    compiled = memory.compiled_programs(backbone, mesh, 2, 640, 64, programs)
    params = vlm.abstract_params(backbone)
    weights = sum(leaf.size * 2 for _, leaf in leaves(params["language"]["layers"]))
    for program in programs:
        row = usage(compiled[program])
        assert row.arguments > weights / num_parts
        # A copy of the layers, or of the cache in the prefill, would exceed this.
        assert row.total < 1.35 * weights / num_parts
        assert row.total == row.arguments + row.outputs + row.temporary


def test_decode_on_a_data_mesh_needs_no_communication():
    config = LlavaConfig.from_hf(tiny_hf_config())
    compiled = memory.compiled_programs(Llava(config), mesh_of("data"), 4, 8, 4, ["decode"])
    program = compiled["decode"].as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f"{collective}(" not in program


def test_a_sharded_model_computes_the_results_of_one_device():
    vision = {"image_size": 28, "patch_size": 7}
    raw = tiny_hf_config(64, vision=vision, text={"num_key_value_heads": 2})
    backbone = Llava.read(raw, None)
    config, rng = backbone.config, np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32),
        vlm.abstract_params(backbone, jnp.float32),
    )
    pixels = random_bytes(0, 4, 3, 28, 28)
    index = jnp.broadcast_to(jnp.array([0, 3, 9]), (4, 1, 3))
    valid = jnp.arange(3) < jnp.arange(4)[:, None, None]
    ids = jnp.array([[1, IMAGE_TOKEN, 5, 6]] * 4)
    length = jnp.array([4, 3, 4, 2])

    @jax.jit
    def answer(params, pixels, ids, length, valid, index):
        features, _ = backbone.encode_image(params, pixels)
        kept = jnp.take_along_axis(features[:, None], index[..., None], axis=2)
        visual = visual_of(config, backbone.project(params, kept), index, valid)
        sequence = assemble(params, backbone, ids, length, *visual)
        first, cache, *_ = vlm.prefill(params, config, sequence, 2)
        second, cache = vlm.decode_step(params, config, jnp.argmax(first, -1), cache)
        return first, second, cache

    inputs = (pixels, ids, length, valid, index)
    expected = answer(params, *inputs)
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = jax.device_put(params, shardings(params, SHARDING_RULES, mesh))
    inputs = jax.device_put(inputs, shardings(inputs, BATCH_RULES, mesh))
    results = answer(params, *inputs)
    for sharded, single in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(sharded - single).max() <= 1e-5 * max(jnp.abs(single).max(), 1)
    cache_shardings = shardings(results[2], memory.CACHE_RULES, mesh)
    assert cache_shardings.key.spec == P(None, ("data", "fsdp"), "tensor")


def test_the_memory_tool_prints_a_table(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(448)))
    memory.main(["--model", str(tmp_path), "--mesh", "tensor", "--batch", "1", "--length", "8"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "batch 1, 8 + 64 tokens, bfloat16, GiB per device"
    assert [line.split(" | ")[3] for line in printed[3:]] == ["encode", "prefill", "decode"]
