"""Values of single equations that were computed by hand, or in float64 outside this project."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, budget, noise, scores
from stepprune_jax.policy.rollout import straight_through


def init(params, config, memory, memory_mask, steps):
    return params["start"], memory, ()


def step(params, config, context, query, cache, t):
    return jnp.einsum("bmd,bd->bm", context, query), cache


@functools.partial(jax.jit, static_argnames=("config", "max_steps", "group", "feedback"))
def select(config, memory, start, max_steps, group=1, feedback=straight_through):
    """Selects with pointer logits M q, without weights."""
    options = {"max_steps": max_steps, "group": group, "decoder": DecoderFns(init, step)}
    start, memory = jnp.array([start]), jnp.array([memory])
    return cases.select({"start": start}, config, memory, loop={"feedback": feedback}, **options)


SOFTMAX = cases.plain_config(
    feature_width=2, text_width=0, num_heads=1, stop="softmax", stop_bias=0.0, min_tokens=0
)
# Of PtrAttn(q, M) = M q / sqrt(2): the numbers below are those before.
SCALE = 2**-0.25
START = SCALE * np.array([1, 0.5])
MEMORY = SCALE * np.array([[1, 0], [0.9, 0.3], [0, 1], [-0.5, 0.2], [-0.2, -0.4]])


def test_the_pointer_loop_equals_values_computed_by_hand():
    trajectory = select(SOFTMAX, MEMORY, START, max_steps=4)
    np.testing.assert_array_equal(trajectory.action, [[1, 0, 2, 3]])
    np.testing.assert_array_equal(trajectory.count, [4])
    rows = [
        [0.287243, 0.297581, 0.201699, 0.106738],
        [0.402585, 0, 0.263392, 0.161699],
        [0, 0, 0.389058, 0.273192],
        [0, 0, 0, 0.604503],
    ]
    np.testing.assert_allclose(trajectory.prob[0], rows, atol=1e-6)
    np.testing.assert_allclose(
        trajectory.stop_prob[0], [0.106738, 0.172324, 0.337750, 0.395497], atol=1e-6
    )
    alive = scores.alive_probability(trajectory.stop_prob)[0]
    np.testing.assert_allclose(alive, [1, 0.893262, 0.739331, 0.489622], atol=1e-6)
    soft_scores = scores.soft_scores(trajectory.prob, trajectory.stop_prob, decay=0.9)[0]
    np.testing.assert_allclose(soft_scores, [0.549806, 0.267823, 0.581795, 0.554495], atol=1e-6)
    np.testing.assert_allclose(scores.expected_count(trajectory.stop_prob), [2.418192], atol=1e-6)


def test_feedback_receives_the_probabilities():
    """The next query is M^T p = [.480349, .269626]."""

    def expected_slot(memory, prob, choice):
        return jnp.einsum("bmd,bm->bd", memory, prob)

    trajectory = select(SOFTMAX, MEMORY, START, max_steps=2, feedback=expected_slot)
    # Of .339658, .190654, -.131699 and the stop's -.144194.
    np.testing.assert_allclose(trajectory.prob[0, 1], [0.322360, 0, 0.277734, 0.201202], atol=2e-6)
    np.testing.assert_allclose(trajectory.stop_prob[0, 1], 0.198704, atol=2e-6)


def test_the_aligned_stop_is_one_half_in_a_tie():
    # One step, logits [.6, .2 | stop .6] / sqrt(2): margin 0, sigmoid 1/2; a tie keeps the token.
    memory = SCALE * np.array([[0.6, 0], [0.2, 0], [0.6, 0]])
    trajectory = select(dataclasses.replace(SOFTMAX, stop="aligned"), memory, START, max_steps=1)
    np.testing.assert_allclose(trajectory.stop_prob, [[0.5]])
    np.testing.assert_array_equal(trajectory.action, [[0]])
    # p(i) = (1 - p_stop) softmax_i: gap .4 / sqrt(2) gives odds e^.282843, halves .285121 + .214879
    np.testing.assert_allclose(trajectory.prob[0, 0], [0.285121, 0.214879], atol=2e-6)


A, B, C, D = range(4)
GROUPED = np.array([[1, 2], [0.9, 0], [0.8, 0.5], [0.5, 1], [0, 0]])  # the stop's logit is 0


def test_tokens_are_chosen_one_at_a_time_or_in_groups():
    # From A = [1, 2] the others look like .9, 1.8, 2.5; from D = [.5, 1] like .45 and .9.
    # By [1, 0]: 1, .9, .8, .5; the last group is cut where the episode ends.
    for group, order in ((1, [A, D, C, B]), (3, [A, B, C, D])):
        trajectory = select(SOFTMAX, GROUPED, np.array([1, 0.0]), max_steps=4, group=group)
        np.testing.assert_array_equal(trajectory.choice, [order])


def test_probabilities_and_scores_of_groups_are_computed_per_token():
    trajectory = select(SOFTMAX, GROUPED, np.array([1, 0.0]), max_steps=4, group=2)
    # Of 1, .9, .8, .5 and the stop's 0; without the first. From B, the last of the first two,
    # C .72, D .45 and 0; of .45 and 0.
    np.testing.assert_array_equal(trajectory.choice, [[A, B, C, D]])
    rows = [
        [0.270418, 0.244685, 0.221400, 0.164017],
        [0, 0.335376, 0.303461, 0.224809],
        [0, 0, 0.444419, 0.339260],
        [0, 0, 0, 0.610639],
    ]
    np.testing.assert_allclose(trajectory.prob[0], rows, atol=2e-6)
    np.testing.assert_allclose(
        trajectory.stop_prob[0], [0.099481, 0.136354, 0.216321, 0.389361], atol=2e-6
    )
    # Minus the logit of the best remaining token, as the stop's logit is 0.
    np.testing.assert_allclose(trajectory.margin[0], [-1, -0.9, -0.72, -0.45], atol=1e-6)
    # .9 * .270418; .9 * .244685 + .81 * .900519 * .335376
    soft_scores = scores.soft_scores(trajectory.prob, trajectory.stop_prob, decay=0.9)[0]
    np.testing.assert_allclose(soft_scores[:2], [0.243376, 0.464846], atol=2e-6)


def test_running_count_starts_at_the_first_batch():
    first = budget.update_running_count(jnp.array(0.0), jnp.array([4, 8]))
    np.testing.assert_allclose(first, 6.0)
    second = budget.update_running_count(first, jnp.array([10, 12]))
    np.testing.assert_allclose(second, 6.5, rtol=1e-6)  # .9 * 6 + .1 * 11


def test_feature_statistics_merge_exactly():
    x = jax.random.normal(jax.random.key(0), (6, 5, 3)) * jnp.array([1.0, 20, 0.1]) + 4
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (6, 5))
    stats, update_stats = policy.FeatureStats.start(3), jax.jit(policy.update_stats)
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        stats = update_stats(stats, x[rows], mask[rows])
    real = np.asarray(x)[np.asarray(mask)]
    np.testing.assert_allclose(stats.mean, real.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.var, real.var(0), rtol=1e-4)
    assert int(stats.count) == len(real)
    z = noise.standardise(x, stats)
    np.testing.assert_allclose(noise.restore(z, stats), x, rtol=1e-4, atol=1e-4)
