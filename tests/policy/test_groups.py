"""Several tokens from one pointer distribution: by hand, and the same by every way of selecting."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import DecoderFns, trajectory_scores
from stepprune_jax.policy.rollout import hard_feedback

A, B, C, D = range(4)
MEMORY = jnp.array([[[1, 2], [0.9, 0], [0.8, 0.5], [0.5, 1], [0, 0]]])


def init(params, config, memory, memory_mask, steps):
    return jnp.array([[1.0, 0.0]]), memory, ()


def step(params, config, context, query, cache, step):
    return jnp.einsum("bmd,bd->bm", context, query), cache


@functools.partial(jax.jit, static_argnames=("group", "max_steps"))
def worked(group, max_steps=4, **limits):
    """Points with M q from [1, 0], without any weights; the stop's logit is 0."""
    config = cases.plain_config(
        feature_width=2,
        text_width=0,
        num_heads=1,
        stop="softmax",
        stop_bias=0.0,
        min_tokens=0,
        score_space="linear",
    )
    parts = dict(decoder=DecoderFns(init, step), max_steps=max_steps, group=group)
    run = cases.select({}, config, MEMORY, **parts, **limits)
    return run, cases.pick({}, config, MEMORY, **parts, **limits), trajectory_scores(config, run)


@pytest.mark.parametrize(
    ("group", "order"),
    [
        # From A = [1, 2] the others look like .9, 1.8, 2.5; from D = [.5, 1] like .45 and .9.
        (1, [A, D, C, B]),
        # By [1, 0]: 1, .9, .8, .5. From B, the last of the first two: C .72, D .45.
        (2, [A, B, C, D]),
        (3, [A, B, C, D]),
        (8, [A, B, C, D]),
    ],
)
def test_the_next_query_is_the_last_of_a_group(group, order):
    run, picks, _ = worked(group)
    np.testing.assert_array_equal(run.choice, [order])
    np.testing.assert_array_equal(picks.action, run.action)


def test_probabilities_and_scores_are_read_token_by_token():
    run, _, scores = worked(2)
    # Of 1, .9, .8, .5 and the stop's 0; without the first; of .72, .45 and 0; of .45 and 0.
    rows = [
        [0.270418, 0.244685, 0.221400, 0.164017],
        [0, 0.335376, 0.303461, 0.224809],
        [0, 0, 0.444419, 0.339260],
        [0, 0, 0, 0.610639],
    ]
    np.testing.assert_allclose(run.prob[0], rows, atol=2e-6)
    np.testing.assert_allclose(
        run.stop_prob[0], [0.099481, 0.136354, 0.216321, 0.389361], atol=2e-6
    )
    # The best one left beats the stop by so much.
    np.testing.assert_allclose(run.margin[0], [-1, -0.9, -0.72, -0.45], atol=1e-6)
    # .9 * .270418; .9 * .244685 + .81 * .900519 * .335376
    np.testing.assert_allclose(scores[0, :2], [0.243376, 0.464846], atol=2e-6)


@pytest.mark.parametrize(
    ("layers", "stop", "group"),
    [(1, "aligned", 3), pytest.param(2, "hazard", 2, marks=pytest.mark.slow)],
)
def test_both_estimators_and_pick_agree_with_groups(layers, stop, group):
    """Values, gradients and decisions; the steps are no whole number of groups."""
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        config = cases.small_config(text_width=0, decoder_layers=layers, stop=stop, group=group)
        params, slots = cases.random_weights(rng, config), rng.normal(size=(2, 10, 8))
        weigh = cases.weighted_sum(rng, [np.zeros((2, 7, 9)), np.zeros((2, 7))])

        def value(chooser, **options):
            def run(params, slots):
                found = chooser(params, config, slots, max_steps=7, min_tokens=0, **options)
                return weigh([found.prob, found.margin]), found

            return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(params, slots)

        (_, looped), gradient = value(cases.select, loop={"feedback": hard_feedback})
        (_, parallel), of_parallel = value(cases.select_parallel)
        cases.assert_trees_close(parallel, looped, 1e-9)
        cases.assert_trees_close(of_parallel, gradient, 1e-9)
        assert np.abs(gradient[0]["decoder"]["pointer"]["key"]["kernel"]).max() > 0
        through, plainly = value(cases.select), value(cases.select_plainly)
        cases.assert_trees_close(through, plainly, 1e-9)
        picks = jax.jit(
            lambda params, slots: cases.pick(params, config, slots, max_steps=7, min_tokens=0)
        )(params, slots)
        np.testing.assert_array_equal(picks.action, looped.action)
