"""The policy at the number of visual tokens of LLaVA-1.5, on a model of no width."""

import importlib
import json
import pathlib

import jax
import numpy as np
import pytest

from stepprune_jax import load_policy, testing
from stepprune_jax.data.source import data_folder
from stepprune_jax.evaluation.settings import read_evaluation
from stepprune_jax.evaluation.sources import split_folders
from stepprune_jax.models import vlm
from stepprune_jax.pretrain.settings import read_pretraining
from stepprune_jax.pretrain.small_llava import TEMPLATE, model_config
from stepprune_jax.pretrain.vocabulary import build_tokenizer
from stepprune_jax.training import read_run, train

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    config = importlib.import_module("configs.shapes576").get_config()
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
    config.data.train_scenes, config.data.validation_scenes, config.data.test_scenes = 1, 0, 1
    return config


def test_data_are_drawn_at_the_size_of_the_configuration(config, tmp_path):
    config.data.test_seed = 7
    folders = split_folders(read_evaluation(config), tmp_path / "run")
    assert folders["validation"] == data_folder(read_run(config), tmp_path / "run")
    for folder in folders.values():
        manifest = json.loads((folder / "world.json").read_text())
        assert (manifest["side"], manifest["grid"]) == (336, 24)


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


def test_the_model_of_576_tokens_has_some_30_million_weights(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    config = importlib.import_module("configs.pretrain_shapes576").get_config()
    run = read_pretraining(config)
    run.check_world()
    model = model_config(run.model, build_tokenizer([], TEMPLATE))
    assert model.max_image_tokens == 576
    count = sum(leaf.size for leaf in jax.tree.leaves(vlm.abstract_params(model)))
    assert 25e6 < count < 35e6
