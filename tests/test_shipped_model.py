"""The small LLaVA that ships with the package answers questions about scenes nobody has seen."""

import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.benchmarks.shapes import is_right
from stepprune_jax.checkpoints.frozen import ASSETS, SHAPES_MODEL
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import check_fits, load_policy
from stepprune_jax.data.shapes import write_world
from stepprune_jax.evaluation.encode import encode_questions
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.inference.decoding import RunOptions
from stepprune_jax.inference.sets import Batching, answer_all
from stepprune_jax.pruning import Ranking, make_method


@pytest.fixture(scope="module")
def model():
    return load_vlm(SHAPES_MODEL, dtype=jnp.float32)


def test_it_is_small():
    size = sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file())
    assert size < 10e6


def test_it_answers_with_all_tokens_and_degrades_gracefully(model, tmp_path):
    folder = write_world(tmp_path / "w", seed=987654, train=0, validation=0, test=24)
    split = read_split(folder, "test")
    encoded = encode_questions(model, split.questions, batch_size=32)
    n, total = model.config.max_image_tokens, len(split.questions)
    assert n == 144
    order = np.stack([np.random.default_rng(0).permutation(n) for _ in range(total)])
    ranking = Ranking(order.astype(np.int32))

    def accuracy(kept):
        said = answer_all(
            model,
            make_method("random", kept),
            encoded.prompts,
            encoded.images,
            RunOptions(max_tokens=3),
            Batching(32, (36, n)),
            ranking=ranking,
        ).texts
        return np.mean([is_right(*pair) for pair in zip(said, split.answers, strict=True)])

    whole, quarter = accuracy(n), accuracy(36)
    assert whole > 0.82
    assert 0.8 * whole < quarter < whole


@pytest.mark.parametrize("name", ["autoselect", "literal"])
def test_shipped_policies_fit_it(model, name):
    policy = load_policy(ASSETS / "policies" / f"{name}.safetensors")
    check_fits(policy, model.config)
    assert policy.stats is not None
