"""The policy at the number of visual tokens of LLaVA-1.5, on a model of no width."""

import json
import pathlib

import jax
import numpy as np
import pytest

from experiments.shapes import write_world
from stepprune_jax import configurations, load_policy, testing
from stepprune_jax.training import train

CONFIGS = pathlib.Path(__file__).parents[2] / "experiments" / "configs"


@pytest.fixture
def run(tmp_path):
    model = str(
        testing.tiny_llava(
            tmp_path / "model",
            vision={
                "image_size": 336,
                "patch_size": 14,
                "hidden_size": 8,
                "num_attention_heads": 1,
                "intermediate_size": 8,
                "num_hidden_layers": 2,
            },
            text={
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "num_hidden_layers": 1,
                "max_position_embeddings": 1024,
            },
        )
    )
    world = {"train": 1, "validation": 0, "test": 1, "side": 336, "grid": 24}
    data = str(write_world(tmp_path / "data", seed=0, **world))
    run = configurations.load(str(CONFIGS / "shapes576.py"))
    return run.replace({"model.folder": model, "data.folder": data})


@pytest.mark.slow
def test_a_training_step_of_576_tokens_and_288_pointer_steps(run, tmp_path):
    assert run.policy.max_steps == 288
    small = {"width": 4, "num_heads": 1, "mlp_ratio": 1, "encoder_layers": 1}
    ones = ("steps", "batch_size", "model.rows_at_once", "log_every", "data.stats_images")
    run = run.replace(
        {f"policy.{name}": value for name, value in small.items()}
        | dict.fromkeys(ones, 1)
        | {"mesh": "single", "data.length_multiple": 256, "optimizer.warmup": 0}
    )
    train(run, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["step"] == 1 and row["skipped"] == 0 and np.isfinite(row["loss"])
    assert row["grad_norm"] > 0 and 1 <= row["k_mean"] <= 288
    policy = load_policy(tmp_path / "run" / "policy.safetensors")
    assert policy.config.max_steps == 288
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.params))
