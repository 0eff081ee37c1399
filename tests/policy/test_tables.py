"""Tables over slots make the choices of the step-by-step loop, in float32, ties included."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax import policy
from stepprune_jax.policy.pick import BLOCK

B, N, STEPS = 2, 32, BLOCK + 2  # more than a block, and no whole number of them
PROGRAMS = [  # decoder layers, stop, group
    (1, "hazard", 1),
    (1, "aligned", 1),
    (1, "softmax", 4),
    (2, "hazard", 3),
    (2, "softmax", 1),
    (3, "aligned", 1),
    (3, "hazard", 1),
]


def reference_step(*arguments):
    """Another function than `pointer_step`, so that no tables are made."""
    return policy.pointer_step(*arguments)


@functools.cache
def compiled(layers, stop, group):
    """Both ways to pick, within limits and at a budget, and both orders with their margins."""
    config = cases.small_config(
        dtype="float32",
        text_width=0,
        decoder_layers=layers,
        stop=stop,
        group=group,
        price_growth=float(layers == 1),
    )

    @jax.jit
    def run(params, slots, mask, least, most, bias):
        options = dict(image_mask=mask, max_steps=STEPS)
        bounds = dict(min_tokens=least, max_tokens=most, stop_bias=bias)

        def both(**more):
            ways = ({}, {"step_fn": reference_step})
            return [policy.pick(params, config, slots, **options, **more, **way) for way in ways]

        budget = jnp.clip(most, 1, STEPS)
        whole = policy.select(
            params, config, slots, **options, feedback_fn=policy.hard_feedback, budget=STEPS
        )
        ranked = policy.rank(params, config, slots, **options)
        return both(**bounds), both(budget=budget), (ranked, whole)

    return config, run


def twins(rng, slots, mask):
    """Some tokens are copies of others: their logits are equal to the last bit."""
    source = np.arange(N + 1)
    source[:N] = rng.integers(0, N // 2, N)
    return slots[:, source], mask[:, source[:N]]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tied=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    bounds=st.lists(
        st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)).map(sorted), min_size=B, max_size=B
    ),
    bias=st.lists(st.floats(-6, 6, width=32), min_size=B, max_size=B),
)
def test_tables_choose_what_the_loop_chooses(program, seed, tied, share, bounds, bias):
    config, run = compiled(*program)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    slots = np.float32(rng.normal(size=(B, N + 1, 8)))
    mask = cases.random_mask(rng, B, N, share)
    if tied:
        slots, mask = twins(rng, slots, mask)
    least, most = np.array(bounds, np.int32).T
    real = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    given = np.float32(cases.poison(rng, slots, real))
    found = run(params, given, mask, least, most, np.array(bias, np.float32))
    *picks, (ranked, whole) = jax.tree.map(np.asarray, found)
    for by_tables, by_steps in picks:
        for name in ("action", "count", "selected"):
            np.testing.assert_array_equal(getattr(by_tables, name), getattr(by_steps, name))
    left = np.arange(STEPS) < mask.sum(1)[:, None]  # steps with a token to point at
    np.testing.assert_array_equal(ranked.choice[left], whole.choice[left])
    np.testing.assert_allclose(ranked.margin[left], whole.margin[left], rtol=1e-3, atol=1e-3)
