"""Jacobians that must be exactly zero, or must not be zero.

Sizes are tiny and everything runs in float64, so that an exact zero is a statement about the
program and not about rounding.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow

from stepprune_jax.policy import POINTER, DecoderFns, Inputs, Limits, encode, gate, select
from stepprune_jax.policy.noise import denoise
from stepprune_jax.policy.rollout import hard_feedback, straight_through

pytestmark = pytest.mark.usefixtures("x64")

# With two blocks, a leak through an intermediate token would be visible.
TWO_BLOCKS = dict(feature_width=4, width=4, text_width=3, encoder_layers=2)


def jacobian(function, x):
    return jax.tree.map(np.asarray, jax.jit(jax.jacrev(function))(x))


def test_the_denoiser_updates_each_token_from_itself(rng):
    config = cases.small_config(feature_width=4, width=2, num_heads=1)
    params = cases.random_weights(rng, config)
    flow = jacobian(functools.partial(denoise, params, config), rng.normal(size=(2, 3, 4)))
    flow = (
        np.abs(flow).max(axis=(2, 5)).reshape(6, 6)
    )  # From every (row, token) to every (row, token).
    assert (flow[~np.eye(6, dtype=bool)] == 0).all()
    assert (flow[np.eye(6, dtype=bool)] > 0).all()


@pytest.mark.parametrize("layers", quick_or_slow([1, 3], [1]))
def test_no_later_query_reaches_the_logits_of_an_earlier_step(rng, layers):
    config = cases.small_config(width=4, decoder_layers=layers)
    params = cases.random_weights(rng, config)
    slots = jnp.asarray(rng.normal(size=(1, 4, 4)))
    _, context, cache = POINTER.init(params, config, slots, jnp.ones((1, 4), bool), 4)

    def logits(queries):
        return POINTER.sequence(params, config, context, queries, cache)

    flow = np.abs(jacobian(logits, rng.normal(size=(1, 4, 4)))).max(axis=(0, 2, 3, 5))
    later = np.triu(np.ones((4, 4), bool), 1)  # [t, u]: from query u to logits t.
    assert (flow[later] == 0).all()
    assert (flow[~later] > 0).all()


@pytest.mark.parametrize("feedback", [straight_through, hard_feedback])
def test_only_earlier_steps_influence_the_probabilities_of_a_step(rng, feedback):
    """By a nudge of each step's query, and of its logits."""
    config = cases.small_config(width=4, min_tokens=0, decoder_layers=2)
    params, slots = cases.random_weights(rng, config), rng.normal(size=(1, 6, 4))

    def init(params, *arguments):
        return POINTER.init(params["policy"], *arguments)

    def step(params, config, context, query, cache, t):
        nudge = params["nudge"]
        query = query + nudge["query"][t]
        logits, cache = POINTER.step(params["policy"], config, context, query, cache, t)
        return logits + nudge["logits"][t], cache

    def probabilities(nudge):
        return cases.select(
            dict(policy=params, nudge=nudge),
            config,
            slots,
            max_steps=4,
            decoder=DecoderFns(init, step),
            loop={"feedback": feedback},
        ).prob[0]

    flow = jacobian(probabilities, dict(query=np.zeros((4, 4)), logits=np.zeros((4, 6))))
    by_query, by_logits = (np.abs(flow[name]).max(axis=(1, 3)) for name in ("query", "logits"))
    later, diagonal = np.triu(np.ones((4, 4), bool), 1), np.eye(4, dtype=bool)
    assert (by_query[later] == 0).all()
    assert (by_query[~later] > 0).all()
    # Those of a step reach later ones through straight-through alone.
    reached = ~later if feedback is straight_through else diagonal
    assert (by_logits[~reached] == 0).all()
    assert (by_logits[reached] > 0).all()


def whole_selection(params, config, inputs):
    run = select(params, config, inputs, Limits(max_steps=3, min_tokens=0))
    scores = jnp.where(run.prob > 0, run.log_prob, 0)
    return jnp.concatenate([run.prob, scores, run.stop_prob[..., None]], axis=-1)


@pytest.mark.parametrize("estimator", quick_or_slow(["straight_through", "parallel"], ["parallel"]))
def test_neither_rows_nor_padding_reach_other_results_and_text_does(rng, estimator):
    config = cases.small_config(**TWO_BLOCKS, estimator=estimator)
    params = cases.random_weights(rng, config)
    x = dict(image=rng.normal(size=(2, 4, 4)), text=rng.normal(size=(2, 3, 3)))
    masks = dict(
        image_mask=np.array([[True, False, True, True], [True, True, True, False]]),
        text_mask=np.array([[True, True, False], [False, True, True]]),
    )
    flow = jacobian(lambda x: whole_selection(params, config, Inputs(**x, **masks)), x)
    for name, mask in (("image", masks["image_mask"]), ("text", masks["text_mask"])):
        by_token = np.abs(flow[name]).max(axis=(1, 2, 5))  # [row, from row, from token]
        for row in range(2):
            assert (by_token[row, 1 - row] == 0).all()
            np.testing.assert_array_equal(by_token[row, row] > 0, mask[row])


def test_a_causal_encoder_hides_later_tokens_and_shows_the_text(rng):
    config = cases.small_config(**TWO_BLOCKS, encoder_attention="causal", text_gate="printed")
    params = cases.random_weights(rng, config)
    x = dict(image=rng.normal(size=(1, 4, 4)), text=rng.normal(size=(1, 2, 3)))
    flow = jacobian(lambda x: encode(params, config, Inputs(**x), 0.5), x)
    by_token = {name: np.abs(f).max(axis=(0, 2, 3, 5)) for name, f in flow.items()}
    later = np.triu(np.ones((4, 4), bool), 1)
    assert (by_token["image"][later] == 0).all()
    assert (by_token["image"][~later] > 0).all()
    assert (by_token["text"] > 0).all()


@pytest.mark.parametrize("text_gate", quick_or_slow(["attention", "printed"], ["attention"]))
def test_a_closed_text_gate_hides_the_text(rng, text_gate):
    config = cases.small_config(**TWO_BLOCKS, text_gate=text_gate)
    params = cases.random_weights(rng, config)
    image, text = rng.normal(size=(1, 4, 4)), rng.normal(size=(2, 1, 2, 3))
    run = jax.jit(lambda text: encode(params, config, Inputs(image, text), 0.0))
    np.testing.assert_allclose(run(text[0]), run(100 * text[1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", quick_or_slow(["straight_through", "parallel"], ["parallel"]))
def test_padding_changes_no_value_and_no_gradient(rng, estimator):
    """Through the whole training pathway; the consumer ignores tokens at padded positions."""
    config = cases.small_config(estimator=estimator, max_steps=3)
    params = cases.random_weights(rng, config)
    masks = dict(
        image_mask=np.array([[True, False, True, True], [True, True, True, False]]),
        text_mask=np.array([[True, True, False], [False, True, True]]),
    )
    clean = {
        name: np.where(masks[f"{name}_mask"][..., None], rng.normal(size=shape), 0.0)
        for name, shape in (("image", (2, 4, 8)), ("text", (2, 3, 5)))
    }

    def loss(params, image, text):
        gated = gate(params, config, jax.random.key(0), Inputs(image, text, **masks))
        tokens = jnp.where(masks["image_mask"][..., None], gated.tokens, 0)
        return jnp.sum(jnp.sin(tokens)) + jnp.sum(gated.trajectory.stop_prob), gated.alpha

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = run(params, **clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    (_, alpha), _ = expected
    assert (np.asarray(alpha)[~masks["image_mask"]] == 0).all()
    for padding in (1e30, np.inf, np.nan):
        dirty = {
            name: np.where(masks[f"{name}_mask"][..., None], x, padding)
            for name, x in clean.items()
        }
        jax.tree.map(np.testing.assert_array_equal, run(params, **dirty), expected)
