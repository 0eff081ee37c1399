"""Gradients against central finite differences, in float64."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow

from stepprune_jax.policy import (
    Inputs,
    Limits,
    Progress,
    encode,
    gate,
    noise_gate,
    sample,
    soft_topk,
    train_loss,
)
from stepprune_jax.policy.noise import denoise
from stepprune_jax.policy.objective import length_penalty
from stepprune_jax.policy.params import param_paths
from stepprune_jax.policy.rollout import hard_feedback, straight_through
from stepprune_jax.policy.scores import expected_count, soft_scores

pytestmark = pytest.mark.usefixtures("x64")


def test_soft_topk_gradient_in_scores_k_and_temperature(rng):
    where = np.array([[True] * 6, [True, False, True, True, False, True], [True] * 6])
    x = dict(scores=rng.normal(size=(3, 6)), k=np.array([2.3, 1.4, 5.2]), tau=np.array([1, 0.2, 3]))
    functional = cases.weighted_sum(rng, x["scores"])

    def function(x):
        return functional(soft_topk(x["scores"], x["k"], x["tau"], where=where))

    cases.assert_finite_differences(function, x, rng)
    gradient = jax.jit(jax.grad(function))(x)
    assert (gradient["scores"][~where] == 0).all()
    # A constant added to the scores changes nothing, so the Jacobian annihilates it.
    np.testing.assert_allclose(gradient["scores"].sum(1), 0, atol=1e-12)


def test_soft_topk_gradient_is_zero_at_budgets_of_no_and_all_tokens(rng):
    scores, k = rng.normal(size=(2, 4)), np.array([0.0, 4.0])

    def function(scores, k, tau):
        return jnp.sum(soft_topk(scores, k, tau) * scores)

    alpha = jax.jit(soft_topk)(scores, k, 0.5)
    np.testing.assert_array_equal(alpha, [[0.0] * 4, [1.0] * 4])
    by_scores, by_k, by_tau = jax.jit(jax.grad(function, (0, 1, 2)))(scores, k, 0.5)
    np.testing.assert_array_equal(by_scores, alpha)  # The outer factor alone.
    assert (by_k == 0).all() and by_tau == 0


@pytest.mark.parametrize("aggregation", ["discounted", "last"])
def test_score_gradients(rng, aggregation):
    x = dict(prob=rng.uniform(0.05, 0.9, (2, 4, 3)), stop_prob=rng.uniform(0.1, 0.9, (2, 4)))
    functional = cases.weighted_sum(rng, [x["prob"][:, 0]] * 2)
    options = dict(decay=0.7, aggregation=aggregation)
    cases.assert_finite_differences(
        lambda x: functional([soft_scores(**x, **options), cases.log_scores(**x, **options)]),
        x,
        rng,
    )


def test_the_log_score_of_an_unreachable_token_has_no_gradient():
    prob, stop_prob = np.full((1, 3, 2), 0.25), np.full((1, 3), 0.5)
    prob[..., 1] = 0.0

    def never(prob, stop_prob):
        return cases.log_scores(prob, stop_prob, decay=0.9)[0, 1]

    by_prob, by_stop = jax.jit(jax.grad(never, (0, 1)))(prob, stop_prob)
    np.testing.assert_array_equal(by_prob, 0)
    np.testing.assert_array_equal(by_stop, 0)


def test_the_length_penalty_has_the_gradient_of_the_expected_count(rng):
    count, x = np.array([2, 0, 3], np.int32), rng.uniform(0.1, 0.9, (3, 4))

    def penalty(p):
        return length_penalty(count, expected_count(p), np.array([4, 5, 6]), np.ones(3))

    # The value is hard: (2/4 + 0 + 3/6) / 3 = 1/3. Its gradient is that of the expected count.
    np.testing.assert_allclose(penalty(x), 1 / 3)
    cases.assert_finite_differences(
        lambda p: jnp.mean(expected_count(p) / np.array([4, 5, 6])), x, rng, gradient_of=penalty
    )


def test_noise_gate_and_denoise_gradients(rng):
    config = cases.small_config(feature_width=6, width=4)
    params = cases.random_weights(rng, config)
    image, noise = rng.normal(size=(2, 2, 3, 6))
    x = dict(params=params, image=image, noise=noise, alpha=rng.uniform(0.1, 0.9, (2, 3)))
    functional = cases.weighted_sum(rng, image)

    def function(x):
        noisy = noise_gate(None, x["image"], x["alpha"], noise=x["noise"])
        return functional(denoise(x["params"], config, noisy))

    cases.assert_finite_differences(function, x, rng)


@pytest.mark.parametrize("text_gate", quick_or_slow(["attention", "printed"], ["attention"]))
def test_encode_gradient_in_weights_image_text_and_gate(rng, text_gate):
    attention = "causal" if text_gate == "printed" else "bidirectional"
    config = cases.small_config(
        feature_width=6, width=4, encoder_layers=2, text_gate=text_gate, encoder_attention=attention
    )
    masks = np.array([[True, True, False]]), np.array([[False, True]])
    x = dict(
        params=cases.random_weights(rng, config),
        image=rng.normal(size=(1, 3, 6)),
        text=rng.normal(size=(1, 2, 5)),
        gate=np.float64(0.6),
    )
    functional = cases.weighted_sum(rng, np.zeros((1, 3, 4)))

    def function(x):
        inputs = Inputs(x["image"], x["text"], *masks)
        return functional(encode(x["params"], config, inputs, x["gate"]))

    cases.assert_finite_differences(function, x, rng)
    gradient = jax.jit(jax.grad(function))(x)
    assert gradient["gate"] != 0


def open_trajectory(trajectory):
    """Returns the floats of a trajectory, with zeros at impossible events."""
    possible = trajectory.prob > 0
    is_open = jnp.any(possible, axis=-1)
    return dict(
        prob=trajectory.prob,
        log_prob=jnp.where(possible, trajectory.log_prob, 0),
        stop_prob=trajectory.stop_prob,
        log_continue=jnp.where(is_open, trajectory.log_continue, 0),
        margin=jnp.where(is_open, trajectory.margin, 0),
    )


@pytest.mark.parametrize("stop", quick_or_slow(["aligned", "softmax"], ["aligned"]))
def test_select_with_hard_feedback_has_exact_gradients_between_changes_of_choice(rng, stop):
    config = cases.small_config(width=4, decoder_layers=2, stop=stop, temperature=0.7)
    masks = np.array([[True] * 5, [True, False, True, True, False]])
    x = dict(
        params=cases.random_weights(rng, config),
        memory=rng.normal(size=(2, 6, 4)),
        stop_bias=np.array([0.3, -0.2]),
    )

    def run(x):
        return cases.select(
            x["params"],
            config,
            x["memory"],
            mask=masks,
            max_steps=4,
            min_tokens=1,
            max_tokens=np.array([4, 2]),
            stop_bias=x["stop_bias"],
            loop={"feedback": hard_feedback},
        )

    trajectory = jax.jit(run)(x)
    functional = cases.weighted_sum(rng, open_trajectory(trajectory))
    # Far from a change of choice, so that the differences never cross one.
    log_prob = np.sort(trajectory.log_prob, axis=-1)
    assert np.all(
        np.abs(log_prob[..., -1] - log_prob[..., -2]) > 1e-2, where=trajectory.stop_prob < 1
    )
    cases.assert_finite_differences(lambda x: functional(open_trajectory(run(x))), x, rng)


def test_straight_through_has_value_and_gradient_as_printed(rng):
    """M^T (onehot(a) - sg(p) + p), Eq. (9)."""
    memory, prob = jnp.array(rng.normal(size=(3, 7, 4))), jnp.array(rng.random((3, 7)))
    choice, cotangent = jnp.array([0, 6, 2]), jnp.array(rng.normal(size=(3, 4)))
    arguments = memory, prob

    def printed(memory, prob):
        mixed = jax.nn.one_hot(choice, 7) - jax.lax.stop_gradient(prob) + prob
        return jnp.einsum("bmd,bm->bd", memory, mixed)

    value, backward = jax.vjp(lambda *arguments: straight_through(*arguments, choice), *arguments)
    expected, backward_as_printed = jax.vjp(printed, *arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    cases.assert_trees_close(backward(cotangent), backward_as_printed(cotangent), 1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(group=3),  # the steps are no whole number of groups
        pytest.param(dict(decoder_layers=3), marks=pytest.mark.slow),
        pytest.param(dict(decoder_layers=2, stop="hazard", group=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_select_parallel_is_select_with_the_feedback_gradient_cut(rng, fields):
    config = cases.small_config(**fields)
    x = dict(
        params=cases.random_weights(rng, config),
        memory=rng.normal(size=(3, 10, 8)),
        stop_bias=rng.normal(size=3),
    )
    options = dict(mask=cases.random_mask(rng, 3, 9), max_steps=7)
    options |= dict(min_tokens=np.array([1, 0, 0]), max_tokens=np.array([6, 2, 0]))
    functional = cases.weighted_sum(
        rng, [np.zeros((3, 7, 9)), np.zeros((3, 7)), np.zeros((3, 7, 9))]
    )

    def value_and_gradient(chooser, **extra_options):
        def loss(x):
            arguments = (x["params"], config, x["memory"])
            trajectory = chooser(*arguments, stop_bias=x["stop_bias"], **options, **extra_options)
            return functional(
                [
                    trajectory.prob,
                    trajectory.stop_prob,
                    jnp.where(trajectory.prob > 0, trajectory.log_prob, 0),
                ]
            )

        return jax.jit(jax.value_and_grad(loss))(x)

    value, gradient = value_and_gradient(cases.select_parallel)
    expected_value, expected_gradient = value_and_gradient(
        cases.select, loop={"feedback": hard_feedback}
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-9)
    cases.assert_trees_close(gradient, expected_gradient, 1e-9)
    assert np.abs(gradient["params"]["decoder"]["pointer"]["key"]["kernel"]).max() > 0


@pytest.mark.parametrize("estimator", ["parallel", "straight_through"])
def test_log_probabilities_of_sampled_subsets_have_exact_gradients(rng, estimator):
    """The estimator does not matter if the stop cuts no gradient."""
    config = cases.small_config(estimator=estimator, max_steps=3)
    inputs = Inputs(rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 2, 5)))
    keys = jax.random.split(jax.random.key(1), 4)
    functional = cases.weighted_sum(rng, np.zeros((4, 2)))

    def value(params):
        return functional(sample(params, config, inputs, Limits(min_tokens=1), keys).log_prob)

    cases.assert_finite_differences(value, cases.random_weights(rng, config, 0.3), rng, size=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("score_space", ["log", "linear"])
def test_train_loss_has_exact_gradients_without_straight_through_terms(rng, score_space):
    """Parallel estimator, frozen k: the loss is smooth but for the hard value of the penalty."""
    config = cases.small_config(soft_budget="batch_mean", score_space=score_space, max_steps=3)
    inputs = Inputs(rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 2, 5)))
    functional, key = cases.weighted_sum(rng, inputs.image), jax.random.key(1)
    progress = Progress(text_gate=0.5)
    x = dict(params=cases.random_weights(rng, config, 0.3), stop_bias=np.float64(0.1))

    def lm_loss(tokens):
        return functional(jnp.tanh(tokens))

    def differentiable(x):
        arrays = gate(x["params"], config, key, inputs, progress, stop_bias=x["stop_bias"])
        mean_fraction = jnp.mean(expected_count(arrays.trajectory.stop_prob)) / 5
        return lm_loss(arrays.tokens) + 0.3 * mean_fraction

    def loss(x):
        arguments = (x["params"], config, key, inputs, lm_loss, progress, x["stop_bias"])
        return cases.train_loss(*arguments)[0]

    cases.assert_finite_differences(differentiable, x, rng, gradient_of=loss, rtol=1e-4, size=1e-6)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (cases.small_config, dict(text_width=0)),
        pytest.param(
            cases.small_config,
            dict(encoder_layers=2, decoder_layers=3, feature_width=6, width=8),
            marks=pytest.mark.slow,
        ),
        (cases.small_literal, dict(decoder_layers=2)),
    ],
    ids=["default-1-blind", "default-3-wide", "literal-2"],
)
def test_every_weight_receives_a_gradient_from_the_training_loss(rng, make, fields):
    config = make(max_steps=5, **fields)
    # Random weights: with the denoiser's initial zeros, weights before it get no gradient.
    params = cases.random_weights(rng, config, 0.3)
    image = rng.normal(size=(4, 6, config.feature_width))
    text = rng.normal(size=(4, 3, 5)) if config.text_width else None
    functional = cases.weighted_sum(rng, image)

    def loss(params):
        return train_loss(
            params,
            config,
            jax.random.key(2),
            Inputs(image, text),
            lambda x: functional(jnp.tanh(x)),
            progress=Progress(text_gate=0.7),
        )[0]

    gradient = jax.jit(jax.grad(loss))(params)
    sizes = [np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)]
    dead = [
        path for path, size in zip(param_paths(gradient), sizes, strict=True) if not size > 1e-9
    ]
    assert not dead
    assert np.isfinite(sizes).all()
