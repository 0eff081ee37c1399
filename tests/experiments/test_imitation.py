"""Imitation of paths: what counts as followed, and that no step sees a later one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.imitation import followed, learners, order, step_by_step
from stepprune_jax.policy import Inputs, PolicyConfig
from stepprune_jax.policy.params import draw_params

pytestmark = pytest.mark.slow
CONFIG = PolicyConfig(feature_width=8, text_width=8, width=8, num_heads=2)
KEYS = jax.random.split(jax.random.key(0), 3)
INPUTS = Inputs(
    jax.random.normal(KEYS[0], (2, 12, 8)),
    jax.random.normal(KEYS[1], (2, 3, 8)),
    text_mask=jnp.ones((2, 3), bool),
)


def test_a_path_is_followed_if_all_of_it_is_among_the_first_tokens():
    path = np.array([[3, 5, -1, -1], [7, 2, -1, -1], [1, 2, 3, -1], [1, 2, 3, 4]])
    order = np.array([[5, 3, *range(6, 12)], [7, 0, 2, *range(8, 13)], [9] * 8, [4, 3, 2, 1] * 2])
    found = followed(order, path)
    assert (found["one step, path"], found["one step, 4"]) == (50.0, 100.0)
    assert found["two steps, 8"] == 0.0 and found["three steps, path"] == 100.0


@pytest.mark.parametrize("name", learners(CONFIG))
def test_a_learner_keeps_different_tokens(name):
    learner = learners(CONFIG)[name]
    kept = np.asarray(order(learner, draw_params(KEYS[2], learner.specs), INPUTS, 8))
    assert all(len(set(row)) == 8 for row in kept.tolist())


@pytest.mark.parametrize("name", [n for n in learners(CONFIG) if n.startswith("pointer")])
def test_a_step_sees_the_patches_before_it_and_no_later_one(name):
    learner = learners(CONFIG)[name]
    params = draw_params(KEYS[2], learner.specs)
    path = jnp.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    run = jax.jit(lambda path: step_by_step(params, learner.config, INPUTS, path))
    logits, other = run(path), run(path.at[:, 1].set(9))
    np.testing.assert_array_equal(logits[:, :2], other[:, :2])
    assert (np.abs(logits[:, 2:] - other[:, 2:]).max(axis=(0, 2)) > 0).all()
