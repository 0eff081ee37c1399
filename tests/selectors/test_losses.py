"""Errors for losses of a user's function whose shape would broadcast silently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import FeatureStats, Inputs, PolicyConfig, Pruned
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig, RlooSettings
from stepprune_jax.selectors.rloo import _answer_losses, subset_rewards

B, N, G = 4, 9, 3
SHAPE = {"feature_width": 4, "text_width": 0, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
SETTINGS = RlooSettings(samples=G, longest=0.5)
ARGUMENTS = jax.random.key(2), jnp.zeros((B, N, 4)), None
# A method without a stop compiles few programs.
SCORER = AutoSelect.init(jax.random.key(0), AutoSelectConfig(**SHAPE), FeatureStats.start(4))


def sums(kept):
    return kept.tokens.sum((2, 3))


INVALID_LOSSES = {
    "rows": (lambda kept: sums(kept)[:, 0], r"\(4,\)"),
    "sets": (lambda kept: sums(kept)[0], r"\((3|1),\)"),
    "swapped": (lambda kept: sums(kept).T, r"\((3|1), 4\)"),
    "mean": (lambda kept: sums(kept).mean(), r"\(\)"),
    "tokens": (lambda kept: kept.tokens[..., 0], r"\(4, \d, \d\)"),
    "pair": (lambda kept: (sums(kept), sums(kept)), r"\(\(4, (3|1)\), \(4, (3|1)\)\)"),
}


@pytest.mark.parametrize("name", INVALID_LOSSES)
def test_losses_of_subsets_have_shape_rows_by_subsets(name):
    losses, shape = INVALID_LOSSES[name]
    inputs = Inputs(ARGUMENTS[1])
    message = f"answer_loss_fn returned losses of shape {shape}, expected"
    for loss in (
        lambda: SCORER.rloo_loss(*ARGUMENTS, losses, SETTINGS),
        lambda: subset_rewards(SCORER, SETTINGS, ARGUMENTS[0], inputs, losses),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(loss)


def test_swapped_losses_are_refused_with_equally_many_rows_and_subsets():
    shape = (B, B)
    kept = Pruned(np.zeros((*shape, 2), int), np.ones((*shape, 2, 4)), np.ones((*shape, 2)), None)
    kept = kept._replace(count=np.full(shape, 2))
    with pytest.raises(ValueError, match=r"shape \(1, 4\), expected \(4, 1\), a loss for each of"):
        _answer_losses(lambda kept: sums(kept).T, kept)
    assert _answer_losses(sums, kept).shape == shape
    # A function that reads concrete values cannot be traced, and is not checked by a trace.
    assert _answer_losses(lambda kept: np.asarray(kept.tokens).sum((2, 3)), kept).shape == shape


def test_the_loss_of_the_gate_is_a_scalar():
    def by_row(tokens):
        return tokens.mean((1, 2))

    config = PolicyConfig(**SHAPE)
    params = policy.abstract_policy(config)
    train_loss = functools.partial(policy.train_loss, config=config, lm_loss_fn=by_row)
    for loss in (
        lambda: SCORER.train_loss(*ARGUMENTS, by_row),
        lambda: jax.eval_shape(
            lambda params: train_loss(params, key=ARGUMENTS[0], inputs=Inputs(ARGUMENTS[1])), params
        ),
    ):
        with pytest.raises(ValueError, match=r"lm_loss_fn returned losses of shape \(4,\), expect"):
            jax.eval_shape(loss)


def test_a_diagnosis_refuses_answers_of_another_shape():
    def answers(pruned):
        return pruned.tokens.sum((1, 2)), pruned.tokens.sum(2) > 0

    with pytest.raises(ValueError, match=r"loss_fn returned losses of shape \(4, 9\), expected on"):
        SCORER.diagnose(answers, ARGUMENTS[1], None, [2])
