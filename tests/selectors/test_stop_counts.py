"""What a learned stop keeps by itself, in words, and the bounds that it must not sit at."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import Inputs, PolicyConfig
from stepprune_jax.selectors import StepPrune
from stepprune_jax.selectors.calibration import count_stops, describe_counts, log_stops
from stepprune_jax.selectors.diagnosis import ALL, NONE, OWN, RANDOM, describe, measure_stop

INF = np.inf


def test_counts_are_those_of_the_margins_at_a_stop_bias():
    margin = np.array([[-1.0, -2, 1, 1], [-1, -2, -1, INF], [-1, 3, 3, 3]], np.float32)
    found = count_stops(margin, np.array([8, 6, 10]), min_tokens=1, stop_bias=0.0)
    assert (found.mean, found.num_tokens) == (2.0, 8.0)  # 2, 3 and 1 of 8, 6 and 10
    assert found.deviation == pytest.approx((2 / 3) ** 0.5)
    assert found.at_floor == pytest.approx(1 / 3) and found.at_cap == pytest.approx(1 / 3)
    assert str(found) == (
        "the learned stop keeps 2.0 +- 0.8 of 8 tokens; 33% of the counts are the minimum, 33% "
        "are T_max"
    )
    assert not found.finding
    assert count_stops(margin, np.array([8, 6, 10]), 1, -9.0).at_cap == 1
    assert count_stops(margin, np.array([8, 6, 10]), 1, 9.0).at_floor == 1


def test_a_bound_is_a_finding_and_a_warning(caplog):
    few, many, tokens = np.full(20, 1), np.full(20, 20), np.full(20, 40)
    named = {}
    for name, count in (("T_max", many), ("the minimum", few)):
        stops = describe_counts(count, few, many, tokens)
        with caplog.at_level(logging.INFO, logger="stepprune_jax"):
            log_stops(stops)
        named[name] = stops.finding
        assert f"the learned stop sits at {name}: 100% of the counts" in stops.finding
    assert "raise `length_weight`" in named["T_max"] and "lower" in named["the minimum"]
    # An image with one count says nothing of the stop.
    assert not describe_counts(few, few, few, tokens).finding
    # Nine of ten rows are a bound, eight of ten are none.
    for count, sits in ((18, True), (16, False)):
        mixed = np.where(np.arange(20) < count, 20, 7)
        assert bool(describe_counts(mixed, few, many, tokens).finding) == sits


def test_a_diagnosis_names_the_bound():
    losses = {ALL: 0.1, NONE: 3.1, RANDOM: 2.5, OWN: 0.4}
    losses = {name: np.full(8, value) for name, value in losses.items()}
    few, many, tokens = np.full(8, 1), np.full(8, 20), np.full(8, 40)
    (said,) = describe(4, losses, stops=describe_counts(many, few, many, tokens)).findings
    assert said.startswith("the learned stop sits at T_max")
    found = describe(4, losses, stops=describe_counts(np.full(8, 5), few, many, tokens))
    assert not found.findings and "keeps 5.0 +- 0.0 of 40 tokens" in str(found)


def test_the_stop_of_a_policy_is_counted_at_its_own_bias_whatever_its_budget():
    config = PolicyConfig(feature_width=4, text_width=0, num_heads=2, encoder_layers=1)
    policy = StepPrune.init(jax.random.key(0), config, None, budget=3)
    mask = np.arange(12) < np.array([[12], [4]])
    inputs = Inputs(jax.random.normal(jax.random.key(1), (2, 12, 4)), None, jnp.asarray(mask))
    longest, shortest = (
        measure_stop(policy.replace(stop_bias=jnp.float32(bias)), inputs) for bias in (-99, 99)
    )
    assert (longest.mean, longest.at_cap, longest.num_tokens) == (4, 1, 8)  # 6 of 12, 2 of 4
    assert (shortest.mean, shortest.at_floor) == (1, 1)
