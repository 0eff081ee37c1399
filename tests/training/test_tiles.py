"""Training, its plan and an evaluation on a model that sees images in tiles."""

import numpy as np
import pytest
from tiny_llava_next import tiny_llava_next
from tiny_run import make_run, metrics, write_data, write_questions
from visual import noise

from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.training import train

SIZES = ((50, 70), (20, 90), (9, 8), (64, 31), (24, 24), (40, 40))
TOKENS = (37, 39, 18, 37, 24, 51)


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
    # Statistics are those of all tokens of the six images, and of nothing else.
    assert float(policy.stats.count) == sum(TOKENS)
