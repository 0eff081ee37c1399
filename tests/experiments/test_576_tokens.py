"""The policy at the number of visual tokens of LLaVA-1.5, on a model of no width."""

import jax
import numpy as np
import pytest
import tiny_run

from experiments.shapes import write_world
from stepprune_jax import load_policy, testing
from stepprune_jax.training import train


@pytest.mark.slow
def test_a_training_step_of_576_tokens_and_288_pointer_steps(tmp_path):
    vision, text = {"image_size": 336, "patch_size": 14}, {"max_position_embeddings": 1024}
    model = testing.tiny_llava(tmp_path / "model", vision=vision, text=text)
    data = write_world(tmp_path / "data", seed=0, train=1, validation=0, test=0, side=336, grid=24)
    small = {"width": 4, "num_heads": 1, "mlp_ratio": 1, "encoder_layers": 1}
    ones = ("steps", "batch_size", "model.rows_at_once", "log_every", "data.stats_images")
    run = tiny_run.load_config("shapes576").replace(
        {"model.folder": str(model), "data.folder": str(data), "mesh": "single"}
        | {"data.length_multiple": 256, "optimizer.warmup": 0}
        | {f"policy.{name}": value for name, value in small.items()}
        | dict.fromkeys(ones, 1)
    )
    train(run, tmp_path / "run")
    (row,) = tiny_run.metrics(tmp_path / "run")
    assert row["step"] == 1 and row["skipped"] == 0 and np.isfinite(row["loss"])
    assert row["grad_norm"] > 0 and 1 <= row["k_mean"] <= 288
    policy = load_policy(tmp_path / "run" / "policy.safetensors")
    assert policy.config.max_steps == 288
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.params))
