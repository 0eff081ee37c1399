"""Training with a model whose images differ in their number of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow
from tiny_qwen import tiny_qwen, tiny_qwen3
from tiny_run import load_config, make_run, metrics, open_tiny_batches, write_data
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
from stepprune_jax.training.step import encode_rows, init_state
from stepprune_jax.training.step_config import make_step_config

IMAGE_SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))
NUM_TOKENS = (35, 22, 6, 32, 9, 25)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a tiny Qwen2.5-VL, and of data with images of different sizes."""
    return write_world(tmp_path_factory.mktemp("world"), tiny_qwen)


def write_world(folder, write_model):
    data = write_data(folder / "data")
    for number, size in enumerate(IMAGE_SIZES):
        noise(number, size).save(data / "images" / f"{number}.png")
    return write_model(folder / "model"), data


def make_small_run(world, **changes):
    small = {"steps": 2, "batch_size": 12, "data.stats_images": 6, "optimizer.warmup": 1}
    return make_run(*world, **small | changes)


@pytest.mark.supports("qwen2_5_vl", "train")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gate", "auto"])
def test_a_policy_is_trained(world, tmp_path, recipe):
    run = make_small_run(world, recipe=recipe, steps=5, **{"optimizer.warmup": 0})
    train(run, tmp_path)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    assert rows[0]["k_mean"] <= max(NUM_TOKENS) // 2
    policy = load_policy(tmp_path / "policy.safetensors")
    assert policy.config.feature_width == policy.config.text_width == 48
    # The statistics count the real tokens of the six images, without padding.
    assert float(policy.stats.count) == sum(NUM_TOKENS)


@pytest.mark.supports("qwen3_vl", "train")
@pytest.mark.slow
def test_a_policy_file_of_a_model_with_deep_features_can_start_a_run(tmp_path):
    """The file has no statistics of deep features."""
    world, first_run = write_world(tmp_path / "world", tiny_qwen3), tmp_path / "first"
    train(make_small_run(world), first_run)
    policy = load_policy(first_run / "policy.safetensors")
    assert policy.stats.mean.shape == (48,) and float(policy.stats.count) == sum(NUM_TOKENS)
    step, latest, _ = latest_policy(first_run)
    assert step == 2 and same_policy(latest, policy)
    second_run = tmp_path / "second"
    train(make_small_run(world, start=str(first_run / "policy.safetensors")), second_run)
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in metrics(second_run))
    second_policy = load_policy(second_run / "policy.safetensors")
    np.testing.assert_array_equal(second_policy.stats.mean, policy.stats.mean)


@pytest.mark.parametrize("recipe", quick_or_slow(["gate", "rloo"], ["gate"]))
def test_updates_with_deep_features_are_traced(tmp_path, recipe):
    run = make_small_run((tiny_qwen3(tmp_path), tmp_path), recipe=recipe, **{"rloo.samples": 2})
    config = make_step_config(run, inspect_folder(tmp_path).backbone)
    traced = trace_update(config, jnp.float32, 12, Bucket(64, 32, 4))
    (state, scalars), weights = traced.out_info, traced.in_avals[0][0]
    assert scalars["loss"].shape == ()
    assert weights["deepstack_mergers"]["up"]["kernel"].shape[0] == 2
    assert jax.tree.structure(state) == jax.tree.structure(
        jax.eval_shape(lambda key: init_state(key, config), jax.random.key(0))
    )


def test_hosts_that_share_a_batch_pad_images_to_one_size(world, tmp_path):
    run = make_small_run(world)
    batches = open_tiny_batches(run, tmp_path)
    config = make_step_config(run, inspect_folder(world[0]).backbone)
    batch = batches[0]
    padded = num_padded_tokens(max(NUM_TOKENS), config.backbone.config.max_image_tokens)
    assert batch.pixels.values.shape[1] == 4 * padded
    largest = config.backbone.largest_pixel_shapes(1)
    parts = [
        Batches(
            batches.corpus,
            batches._images,
            batch_size=12,
            seed=run.seed,
            multiple=64,
            loading=Loading(local=rows),
        )[0]
        for rows in (slice(0, 6), slice(6, 12))
    ]
    joined = np.concatenate([part.pixels.values for part in parts])
    assert joined.shape[1] == largest.values.shape[1]
    width = batch.pixels.values.shape[1]
    np.testing.assert_array_equal(joined[:, :width], batch.pixels.values)
    assert not joined[:, width:].any()
    grids = np.concatenate([part.targets.grid for part in parts])
    np.testing.assert_array_equal(grids, batch.targets.grid)


def test_a_fixed_number_of_steps_is_refused(world):
    run = make_small_run(world, **{"policy.max_steps": 4})
    with pytest.raises(ValueError, match=r"config.policy.max_steps is 4, expected None"):
        make_step_config(run, inspect_folder(world[0]).backbone)


@pytest.mark.slow
def test_a_dry_run_plans_for_images_of_the_largest_size(world, tmp_path, capsys):
    """The configuration is the paper's, with smaller widths of model and policy."""
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
    cost = dry_run(run, tmp_path)
    assert cost.devices == 2 and cost.flops > 0
    output = capsys.readouterr().out
    assert "rtx-a6000" in output and "hours for 1600 updates" in output


def test_the_papers_second_model_has_the_papers_values():
    run, llava_run = load_config("qwen25vl_7b"), load_config("llava7b")
    llava_fields = llava_run.flat()
    changed = {name for name, value in run.flat().items() if llava_fields[name] != value}
    assert {name for name in changed if not name.startswith("eval.")} == {
        "model.folder",
        "model.min_pixels",
        "model.max_pixels",
        "data.context_limit",
        "policy.max_steps",
    }
    model = find_backbone("qwen2.5-vl-7b")
    model = model.bound_images(None, run.model.min_pixels, run.model.max_pixels)
    config = make_step_config(run, model, build_mesh(run.mesh, jax.devices()[:2]))
    assert model.config.max_image_tokens == 2048 and config.selector.longest(1000) == 500
    # Only shapes: the tower at the largest size, in the dtype of the run.
    features = jax.eval_shape(
        functools.partial(encode_rows, config=config),
        jax.eval_shape(model.init_params, jax.random.key(0)),
        pixels=model.largest_pixel_shapes(2),
    )
    assert features.shape == (2, 2048, config.selector.config.feature_width) == (2, 2048, 3584)
