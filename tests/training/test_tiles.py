"""Training, its plan and an evaluation on a model that sees images in tiles."""

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
from stepprune_jax.training.settings import make_step_config

SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))
TOKENS = (37, 39, 18, 37, 24, 51)
ENDS = (4, 3, 3, 7, 3, 6)  # one for each row of the tiles, among them


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny LLaVA-NeXT, and six images of different sizes."""
    folder = tmp_path_factory.mktemp("world")
    data = write_data(folder / "data")
    for number, size in enumerate(SIZES):
        noise(number, size).save(data / "images" / f"{number}.png")
    return tiny_llava_next(folder / "model"), write_questions(data)


@pytest.mark.slow
def test_a_policy_is_trained_and_validated(world, tmp_path):
    small = {"steps": 2, "batch_size": 4, "data.stats_images": 6, "optimizer.warmup": 1}
    train(make_run(*world, **small, **{"validation.every": 2, "validation.overlays": 3}), tmp_path)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)
    policy = load_policy(tmp_path / "policy.safetensors")
    assert policy.config.feature_width == 32  # the tower's: one of LLaVA-1.5 fits
    # Statistics are those of all patches of the six images: the ends of rows carry nothing.
    assert float(policy.stats.count) == sum(TOKENS) - sum(ENDS)


def test_the_configuration_differs_from_the_first_models_in_a_few_values():
    run, first = load_config("llava_next_7b"), load_config("llava7b")
    changed = {key for key, value in run.flat().items() if first.flat()[key] != value}
    named = {"model.folder", "data.context_limit", "policy.max_steps", "eval.budgets"}
    assert changed == named and run.eval.budgets == (640, 320, 160)
    setup = make_step_config(
        run, find_backbone("llava-next-7b"), build_mesh(run.mesh, jax.devices()[:2])
    )
    assert setup.method.longest(2928) == 1464
    assert setup.method.config.feature_width == 1024  # as of a policy of LLaVA-1.5
