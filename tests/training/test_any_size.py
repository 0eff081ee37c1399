"""Training on a model whose images differ in their number of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow
from tiny_qwen import tiny_qwen, tiny_qwen3
from tiny_run import load_config, make_run, metrics, open_tiny, write_data
from visual import noise

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.cli.export import latest_policy, same_policy
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.models.qwen2_5_vl.images import num_padded_tokens
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.training import train
from stepprune_jax.training.batches import Batches, Bucket, Loading
from stepprune_jax.training.dry_run import dry_run, trace_update
from stepprune_jax.training.settings import make_step_config
from stepprune_jax.training.step import encode_rows, init_state

SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))
TOKENS = (35, 22, 6, 32, 9, 25)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny Qwen2.5-VL, and six images of different sizes."""
    return write_world(tmp_path_factory.mktemp("world"), tiny_qwen)


def write_world(folder, write_model):
    data = write_data(folder / "data")
    for number, size in enumerate(SIZES):
        noise(number, size).save(data / "images" / f"{number}.png")
    return write_model(folder / "model"), data


def small_run(world, **changes):
    small = {"steps": 2, "batch_size": 12, "data.stats_images": 6, "optimizer.warmup": 1}
    return make_run(*world, **small | changes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gate", "auto"])
def test_a_policy_is_trained(world, tmp_path, recipe):
    run = small_run(world, recipe=recipe, steps=5, **{"optimizer.warmup": 0})
    train(run, tmp_path)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)
    assert lines[0]["k_mean"] <= max(TOKENS) // 2
    policy = load_policy(tmp_path / "policy.safetensors")
    assert policy.config.feature_width == policy.config.text_width == 48
    # Statistics are those of all tokens of the six images, and of nothing else.
    assert float(policy.stats.count) == sum(TOKENS)


@pytest.mark.slow
def test_a_policy_of_tokens_with_deep_features_is_trained(tmp_path):
    """Its file knows nothing of them, and a run can begin with it."""
    world, first = write_world(tmp_path / "world", tiny_qwen3), tmp_path / "first"
    train(small_run(world), first)
    policy = load_policy(first / "policy.safetensors")
    assert policy.stats.mean.shape == (48,) and float(policy.stats.count) == sum(TOKENS)
    step, latest, _ = latest_policy(first)
    assert step == 2 and same_policy(latest, policy)
    train(small_run(world, start=str(first / "policy.safetensors")), tmp_path / "second")
    lines = metrics(tmp_path / "second")
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)
    again = load_policy(tmp_path / "second" / "policy.safetensors")
    np.testing.assert_array_equal(again.stats.mean, policy.stats.mean)


@pytest.mark.parametrize("samples", quick_or_slow([0, 2], [0]))
def test_updates_are_traced_through_deep_features(tmp_path, samples):
    run = small_run((tiny_qwen3(tmp_path), tmp_path), **{"policy_gradient.samples": samples})
    setup = make_step_config(run, inspect_folder(tmp_path).backbone)
    traced = trace_update(setup, jnp.float32, 12, Bucket(64, 32, 4))
    (state, scalars), weights = traced.out_info, traced.in_avals[0][0]
    assert (
        scalars["loss"].shape == () and weights["deepstack_mergers"]["up"]["kernel"].shape[0] == 2
    )
    assert jax.tree.structure(state) == jax.tree.structure(
        jax.eval_shape(lambda key: init_state(key, setup), jax.random.key(0))
    )


def test_hosts_that_share_a_batch_pad_to_one_size(world, tmp_path):
    run = small_run(world)
    whole = open_tiny(run, tmp_path)
    setup = make_step_config(run, inspect_folder(world[0]).backbone)
    batch = whole[0]
    padded = num_padded_tokens(max(TOKENS), setup.backbone.config.max_image_tokens)
    assert batch.pixels.values.shape[1] == 4 * padded
    largest = setup.backbone.largest_pixel_shapes(1)
    parts = [
        Batches(whole._corpus, whole._images, 12, run.seed, 64, loading=Loading(local=rows))[0]
        for rows in (slice(0, 6), slice(6, 12))
    ]
    joined = np.concatenate([part.pixels.values for part in parts])
    assert joined.shape[1] == largest.values.shape[1]
    width = batch.pixels.values.shape[1]
    np.testing.assert_array_equal(joined[:, :width], batch.pixels.values)
    assert not joined[:, width:].any()
    grids = np.concatenate([part.targets.grid for part in parts])
    np.testing.assert_array_equal(grids, batch.targets.grid)


def test_a_number_of_steps_is_refused(world):
    run = small_run(world, **{"policy.max_steps": 4})
    with pytest.raises(ValueError, match=r"config.policy.max_steps is 4, expected None"):
        make_step_config(run, inspect_folder(world[0]).backbone)


@pytest.mark.slow
def test_a_dry_run_plans_for_images_of_the_largest_size(world, tmp_path, capsys):
    """Of the paper's configuration, but for the widths of model and policy."""
    run = load_config("qwen25vl_7b").replace(
        {
            "model.folder": str(world[0]),
            "model.min_pixels": 256,
            "model.max_pixels": 2304,
            "data.train_file": str(world[1] / "train.json"),
            "data.image_folder": str(world[1] / "images"),
            "policy.width": 16,
            "policy.num_heads": 2,
        }
    )
    found = dry_run(run, tmp_path)
    assert found.devices == 2 and found.flops > 0
    printed = capsys.readouterr().out
    assert "rtx-a6000" in printed and "hours for 1280 updates" in printed


def test_the_papers_second_model_has_the_papers_values():
    run, first = load_config("qwen25vl_7b"), load_config("llava7b")
    changed = {key for key, value in run.flat().items() if first.flat()[key] != value}
    assert {key for key in changed if not key.startswith("eval.")} == {
        "model.folder",
        "model.min_pixels",
        "model.max_pixels",
        "data.context_limit",
        "policy.max_steps",
    }
    model = find_backbone("qwen2.5-vl-7b")
    model = model.bound_images(None, run.model.min_pixels, run.model.max_pixels)
    setup = make_step_config(run, model, build_mesh(run.mesh, jax.devices()[:2]))
    assert model.config.max_image_tokens == 2048 and setup.method.longest(1000) == 500
    # Shapes only: the tower at the largest size, in the dtype of the run.
    pixels = model.largest_pixel_shapes(2)
    features = jax.eval_shape(
        functools.partial(encode_rows, setup=setup),
        jax.eval_shape(model.init_params, jax.random.key(0)),
        pixels=pixels,
    )
    assert features.shape == (2, 2048, setup.method.config.feature_width) == (2, 2048, 3584)
