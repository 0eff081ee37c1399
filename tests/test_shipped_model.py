"""The shipped models and policies answer new questions about new scenes."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import stepprune_jax as sp
from experiments.shapes import write_world
from stepprune_jax.benchmarks.folder import is_right
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.checkpoints.shipped import MODELS, POLICIES, SHAPES_MODEL, policy_names
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.inference import Generator, RunOptions
from stepprune_jax.inference.dataset import Batching
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.pruning import FastV
from stepprune_jax.registry import build_pruner

EXPERIMENTS = Path(__file__).parents[1] / "experiments" / "policies"


@pytest.fixture(scope="module")
def model():
    return load_vlm(SHAPES_MODEL, dtype=jnp.float32)


def make_ask(model, folder, **world):
    """Returns a function that answers new questions with a method.

    Its results are the fraction of correct answers, and the number of kept tokens per question.
    """
    write_world(folder / "w", seed=987654, train=0, validation=0, test=24, **world)
    split = read_split(folder / "w", "test")
    encoded = encode_questions(model, split.questions, batch_size=32)

    @functools.cache
    def ask(name=None, budget=None, policy=None):
        policy = policy and load_policy(policy)
        pruner, options = build_pruner(name, budget, policy=policy), RunOptions(max_tokens=3)
        batching = Batching(32, (36, model.config.max_image_tokens), (32,))
        (answers,) = Generator(model, pruner, options=options).answer_set(encoded, batching)
        pairs = zip(answers.texts, split.answers, strict=True)
        return np.mean([is_right(*pair) for pair in pairs]), answers.kept

    return ask


@pytest.fixture(scope="module")
def ask(model, tmp_path_factory):
    return make_ask(model, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def qwen():
    return load_vlm("shapes_qwen", dtype=jnp.float32)


def test_the_shipped_policy_with_its_learned_stop_loses_little_accuracy(ask):
    accuracy, kept = ask(policy="shapes")  # experiments/RESULTS.md has other questions
    all_tokens, all_counts = ask("all")
    random_36, _ = ask("random", 36)
    random_16, counts_16 = ask("random", 16)
    assert (all_counts == 144).all() and (counts_16 == 16).all()
    assert 0.8 * all_tokens < random_36 < all_tokens
    assert 12 < kept.mean() < 26 and kept.std() > 4
    # The standard error of the accuracy is 1.9 %.
    assert all_tokens > 0.92 and accuracy > 0.95 * all_tokens and accuracy > random_16 + 0.08


@pytest.mark.slow
def test_the_small_qwen_answers_about_images_of_three_sizes(qwen, tmp_path):
    ask = make_ask(qwen, tmp_path, sizes=(64, 88, 112), side=112, grid=14)
    all_tokens, counts = ask("all")
    assert sorted({*counts.tolist()}) == [64, 121, 196]
    accuracy, kept = ask(policy="shapes_qwen")
    random_16, _ = ask("random", 16)
    assert all_tokens > 0.9 and accuracy > 0.95 * all_tokens and accuracy > random_16 + 0.08
    assert 10 < kept.mean() < 40 and kept.std() > 4


def test_the_python_interface_works_as_documented(model, tmp_path):
    folder = write_world(tmp_path / "w", seed=3, train=0, validation=0, test=1)
    question = read_split(folder, "test").questions[0]
    (answer,) = sp.generate(model, [question.text], [question.image], FastV(budget=64, layer=2))
    assert (answer.visual_tokens, answer.kept) == (144, 64) and answer.text
    policy = sp.load_policy("shapes")
    (answer,) = sp.generate(model, [question.text], [question.image], policy)
    assert 0 < answer.kept < 144


def test_every_shipped_model_has_a_policy():
    assert policy_names() == sorted(MODELS)


@pytest.mark.parametrize(
    "file", [*POLICIES.iterdir(), *EXPERIMENTS.iterdir()], ids=lambda file: file.stem
)
def test_policies_fit_their_model_and_record_their_origin(model, qwen, file):
    policy = load_policy(file)
    folder = EXPERIMENTS.parent / "models" / "moving_shapes_qwen3"
    configs = {"shapes_qwen": qwen.config, "moving_shapes": inspect_folder(folder).config}
    policy.check_fits(configs.get(file.stem, model.config))
    assert policy.stats is not None
    _, metadata = safetensors.read_contents(file)
    assert {"seed", "commit", "command"} <= json.loads(metadata["about"]).keys()
