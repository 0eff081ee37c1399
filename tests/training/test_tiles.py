"""Training and validation with a model that divides images into tiles."""

import jax
import numpy as np
import pytest
from tiny_llava_next import tiny_llava_next
from tiny_run import load_config, make_run, metrics, write_data, write_questions
from visual import noise

from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.training import train
from stepprune_jax.training.step_config import make_step_config

IMAGE_SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))
NUM_TOKENS = (37, 39, 18, 37, 24, 51)
NUM_ROW_ENDS = (4, 3, 3, 7, 3, 6)  # included in the tokens: one for each row of the tiles


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a tiny LLaVA-NeXT, and of data with images of different sizes."""
    folder = tmp_path_factory.mktemp("world")
    data = write_data(folder / "data")
    for number, size in enumerate(IMAGE_SIZES):
        noise(number, size).save(data / "images" / f"{number}.png")
    return tiny_llava_next(folder / "model"), write_questions(data)


@pytest.mark.supports("llava_next", "train")
@pytest.mark.slow
def test_a_policy_is_trained_and_validated(world, tmp_path):
    small = {"steps": 2, "batch_size": 4, "data.stats_images": 6, "optimizer.warmup": 1}
    train(make_run(*world, **small, **{"validation.every": 2, "validation.overlays": 3}), tmp_path)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    policy = load_policy(tmp_path / "policy.safetensors")
    # The width is the tower's, so a policy of LLaVA-1.5 also fits.
    assert policy.config.feature_width == 32
    # The statistics count the patches of the six images. The ends of rows have no features.
    assert float(policy.stats.count) == sum(NUM_TOKENS) - sum(NUM_ROW_ENDS)


def test_the_configuration_differs_from_llavas_in_a_few_values():
    run, llava_run = load_config("llava_next_7b"), load_config("llava7b")
    llava_fields = llava_run.flat()
    changed = {name for name, value in run.flat().items() if llava_fields[name] != value}
    assert changed == {"model.folder", "data.context_limit", "policy.max_steps", "eval.budgets"}
    assert run.eval.budgets == (640, 320, 160)
    config = make_step_config(
        run, find_backbone("llava-next-7b"), build_mesh(run.mesh, jax.devices()[:2])
    )
    assert config.selector.longest(2928) == 1464
    assert config.selector.config.feature_width == 1024  # as for LLaVA-1.5
