"""Losses of a user's function: a wrong shape is named where it would broadcast in silence."""

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
GIVEN = jax.random.key(2), jnp.zeros((B, N, 4)), None
# Without a stop, so that few programs are compiled.
SCORER = AutoSelect.init(jax.random.key(0), AutoSelectConfig(**SHAPE), FeatureStats.start(4))


def sums(kept):
    return kept.tokens.sum((2, 3))


WRONG = {
    "rows": (lambda kept: sums(kept)[:, 0], r"\(4,\)"),
    "sets": (lambda kept: sums(kept)[0], r"\((3|1),\)"),
    "swapped": (lambda kept: sums(kept).T, r"\((3|1), 4\)"),
    "mean": (lambda kept: sums(kept).mean(), r"\(\)"),
    "tokens": (lambda kept: kept.tokens[..., 0], r"\(4, \d, \d\)"),
    "pair": (lambda kept: (sums(kept), sums(kept)), r"\(\(4, (3|1)\), \(4, (3|1)\)\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_of_sets_have_a_row_and_a_set(name):
    losses, shape = WRONG[name]
    inputs, said = Inputs(GIVEN[1]), f"answer_loss_fn returned losses of shape {shape}, expected"
    for loss in (
        lambda: SCORER.rloo_loss(*GIVEN, losses, SETTINGS),
        lambda: subset_rewards(SCORER, SETTINGS, GIVEN[0], inputs, losses),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(loss)


def test_swapped_losses_are_named_where_there_are_as_many_sets_as_rows():
    shape = (B, B)
    kept = Pruned(np.zeros((*shape, 2), int), np.ones((*shape, 2, 4)), np.ones((*shape, 2)), None)
    kept = kept._replace(count=np.full(shape, 2))
    with pytest.raises(ValueError, match=r"shape \(1, 4\), expected \(4, 1\), a loss for each of"):
        _answer_losses(lambda kept: sums(kept).T, kept)
    assert _answer_losses(sums, kept).shape == shape
    # A program that reads values cannot be traced.
    assert _answer_losses(lambda kept: np.asarray(kept.tokens).sum((2, 3)), kept).shape == shape


def test_the_loss_of_the_gate_is_a_scalar():
    def by_row(tokens):
        return tokens.mean((1, 2))

    config = PolicyConfig(**SHAPE)
    params = policy.abstract_policy(config)
    plain = functools.partial(policy.train_loss, config=config, lm_loss_fn=by_row)
    for loss in (
        lambda: SCORER.train_loss(*GIVEN, by_row),
        lambda: jax.eval_shape(
            lambda params: plain(params, key=GIVEN[0], inputs=Inputs(GIVEN[1])), params
        ),
    ):
        with pytest.raises(ValueError, match=r"lm_loss_fn returned losses of shape \(4,\), expect"):
            jax.eval_shape(loss)


def test_a_diagnosis_takes_a_loss_and_an_answer_of_each_row():
    def answers(pruned):
        return pruned.tokens.sum((1, 2)), pruned.tokens.sum(2) > 0

    with pytest.raises(ValueError, match=r"loss_fn returned losses of shape \(4, 9\), expected on"):
        SCORER.diagnose(answers, GIVEN[1], None, [2])
