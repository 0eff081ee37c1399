import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.inference import Sampling, nucleus, sample
from stepprune_jax.inference.sampling import penalise

PROB = np.array([0.05, 0.4, 0.1, 0.25, 0.2])


def draws(logits, temperature, top_p, num_samples=20_000):
    """How often each token was drawn."""
    tokens = jax.jit(sample)(
        jax.random.key(0), jnp.broadcast_to(logits, (num_samples, len(logits))), temperature, top_p
    )
    return np.bincount(np.asarray(tokens), minlength=len(logits))


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 5), (0.66, 3), (0.6, 2), (1e-9, 1)])
def test_the_nucleus_is_the_smallest_set_that_has_the_mass(top_p, kept):
    # In order of likelihood 1, 3, 4, 2, 0 with masses .4, .65, .85, .95, 1.
    expected = np.isin(np.arange(5), [1, 3, 4, 2, 0][:kept])
    np.testing.assert_array_equal(nucleus(jnp.log(PROB), top_p), expected)


def test_of_equally_likely_tokens_the_lower_ids_are_kept():
    np.testing.assert_array_equal(nucleus(jnp.zeros(4), 0.5), [True, True, False, False])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.02, 0.98))
def test_the_nucleus_is_that_of_the_reference(seed, top_p):
    logits = np.random.default_rng(seed).standard_normal((3, 50)).astype(np.float32) * 2
    warper = transformers.TopPLogitsWarper(top_p)
    expected = torch.isfinite(warper(None, torch.from_numpy(logits))).numpy()
    np.testing.assert_array_equal(nucleus(jnp.asarray(logits), top_p), expected)


def test_a_repetition_penalty_by_hand():
    logits = jnp.array([[2.0, -2.0, 0.0, 2.0, -2.0]])
    is_seen = jnp.array([[True, True, True, False, False]])
    np.testing.assert_array_equal(penalise(logits, is_seen, 2.0), [[1.0, -4.0, 0.0, 2.0, -2.0]])


def test_draws_follow_the_tempered_distribution():
    expected = np.sqrt(PROB) * 20_000 / np.sqrt(PROB).sum()
    counts = draws(jnp.log(PROB), 2.0, 1.0)
    # Chi-square with 4 degrees of freedom: above 23.5 once in ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


def test_draws_from_the_nucleus_keep_their_proportions():
    counts = draws(jnp.log(PROB), 1.0, 0.8)
    assert counts[[0, 2]].sum() == 0
    expected = 20_000 * PROB[[1, 3, 4]] / PROB[[1, 3, 4]].sum()
    # 2 degrees of freedom: above 18.4 once in ten thousand.
    assert ((counts[[1, 3, 4]] - expected) ** 2 / expected).sum() < 18.4


def test_temperature_zero_takes_the_first_of_the_largest():
    logits = jnp.array([[1.0, 3.0, 3.0], [5.0, -jnp.inf, 2.0]])
    np.testing.assert_array_equal(sample(jax.random.key(0), logits, 0.0, 0.5), [1, 0])


def test_a_tiny_temperature_is_finite_and_greedy():
    assert draws(jnp.array([1e3, -1e3, 999.0]), 1e-30, 0.9, 100)[0] == 100


def test_a_seed_is_an_integer_or_a_key():
    for seed in (3, np.int64(3), jax.random.key(3), jax.random.PRNGKey(3)):
        sampling = Sampling(seed, np.float32(0.5), np.float64(0.9))
        sampling.check()
        key_data = jax.random.key_data(sampling.resolve([2], 1.0).key)
        np.testing.assert_array_equal(key_data, jax.random.PRNGKey(3))
    for seed in (None, 3.5, "3", True, -1, 1 << 32, jax.random.split(jax.random.key(3))):
        with pytest.raises(ValueError, match=r"(?s)seed is .*, expected an integer from 0"):
            Sampling(seed).check()


def test_bfloat16_logits_are_sampled_in_float32():
    logits = jnp.log(jnp.asarray(PROB)).astype(jnp.bfloat16)
    token = sample(jax.random.key(3), logits, 1.0, 0.9)
    assert token == sample(jax.random.key(3), logits.astype(jnp.float32), 1.0, 0.9)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"key": -1}, "seed"),
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(setting, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**setting).check()
