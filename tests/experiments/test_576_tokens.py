"""The policy at the number of visual tokens of LLaVA-1.5, on a model of no width."""

import json
import pathlib

import jax
import numpy as np
import pytest

from experiments.pretrain.settings import read_pretraining
from experiments.pretrain.small_llava import TEMPLATE, model_config
from experiments.pretrain.vocabulary import build_tokenizer
from experiments.shapes import write_world
from stepprune_jax import load_policy, testing
from stepprune_jax.configurations import load_config
from stepprune_jax.models import vlm
from stepprune_jax.training import read_run, train

CONFIGS = pathlib.Path(__file__).parents[2] / "experiments" / "configs"


@pytest.fixture
def config(tmp_path):
    config = load_config(str(CONFIGS / "shapes576.py"))
    config.model.folder = str(
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
    config.data.folder = str(write_world(tmp_path / "data", seed=0, **world))
    return config


@pytest.mark.slow
def test_a_training_step_of_576_tokens_and_288_pointer_steps(config, tmp_path):
    config.policy.update({"width": 4, "num_heads": 1, "mlp_ratio": 1, "encoder_layers": 1})
    assert config.policy.max_steps == 288
    config.steps = config.batch_size = config.model.rows_at_once = config.log_every = 1
    config.mesh = "single"
    config.data.length_multiple, config.data.stats_images, config.optimizer.warmup = 256, 1, 0
    train(read_run(config), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["step"] == 1 and row["skipped"] == 0 and np.isfinite(row["loss"])
    assert row["grad_norm"] > 0 and 1 <= row["k_mean"] <= 288
    policy = load_policy(tmp_path / "run" / "policy.safetensors")
    assert policy.config.max_steps == 288
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.params))


def test_the_model_of_576_tokens_has_some_30_million_weights():
    run = read_pretraining(load_config(str(CONFIGS / "pretrain_shapes576.py")))
    model = model_config(run.model, build_tokenizer([], TEMPLATE))
    assert model.max_image_tokens == 576
    count = sum(leaf.size for leaf in jax.tree.leaves(vlm.abstract_params(model)))
    assert 25e6 < count < 35e6
