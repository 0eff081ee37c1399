"""Counts of a learned stop, and warnings if they are at a bound."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import Inputs, PolicyConfig
from stepprune_jax.selectors import StepPrune
from stepprune_jax.selectors.calibration import count_stops, describe_counts, log_stops
from stepprune_jax.selectors.diagnosis import ALL, NONE, POLICY, RANDOM, describe, measure_stop

INF = np.inf


def test_counts_follow_from_margins_and_stop_bias():
    margin = np.array([[-1.0, -2, 1, 1], [-1, -2, -1, INF], [-1, 3, 3, 3]], np.float32)
    stops = count_stops(margin, np.array([8, 6, 10]), min_tokens=1, stop_bias=0.0)
    assert (stops.mean, stops.num_tokens) == (2.0, 8.0)  # 2, 3 and 1 of 8, 6 and 10
    assert stops.deviation == pytest.approx((2 / 3) ** 0.5)
    assert stops.at_floor == pytest.approx(1 / 3) and stops.at_cap == pytest.approx(1 / 3)
    assert str(stops) == (
        "the learned stop keeps 2.0 +- 0.8 of 8 tokens; 33% of the counts are the minimum, 33% "
        "are T_max"
    )
    assert not stops.finding
    assert count_stops(margin, np.array([8, 6, 10]), 1, -9.0).at_cap == 1
    assert count_stops(margin, np.array([8, 6, 10]), 1, 9.0).at_floor == 1


def test_a_bound_is_a_finding_and_a_warning(caplog):
    shortest, longest, num_tokens = np.full(20, 1), np.full(20, 20), np.full(20, 40)
    findings = {}
    for name, count in (("T_max", longest), ("the minimum", shortest)):
        stops = describe_counts(count, shortest, longest, num_tokens)
        with caplog.at_level(logging.INFO, logger="stepprune_jax"):
            log_stops(stops)
        findings[name] = stops.finding
        assert f"the learned stop sits at {name}: 100% of the counts" in stops.finding
    assert "raise `length_weight`" in findings["T_max"]
    # One token may suffice, so the minimum alone is no fault.
    assert "right if so few tokens suffice; if more tokens help, lower" in findings["the minimum"]
    # An image with a single possible count is not at a bound.
    assert not describe_counts(shortest, shortest, shortest, num_tokens).finding
    # Nine of ten rows at a bound are reported, eight of ten are not.
    for count, is_at_bound in ((18, True), (16, False)):
        mixed_counts = np.where(np.arange(20) < count, 20, 7)
        stops = describe_counts(mixed_counts, shortest, longest, num_tokens)
        assert bool(stops.finding) == is_at_bound


def test_a_diagnosis_names_the_bound():
    losses = {ALL: 0.1, NONE: 3.1, RANDOM: 2.5, POLICY: 0.4}
    losses = {name: np.full(8, value) for name, value in losses.items()}
    shortest, longest, num_tokens = np.full(8, 1), np.full(8, 20), np.full(8, 40)
    at_bound, inside = (
        describe_counts(count, shortest, longest, num_tokens) for count in (longest, np.full(8, 5))
    )
    (finding,) = describe(4, losses, stops=at_bound).findings
    assert finding.startswith("the learned stop sits at T_max")
    diagnosis = describe(4, losses, stops=inside)
    assert not diagnosis.findings and "keeps 5.0 +- 0.0 of 40 tokens" in str(diagnosis)


def test_the_learned_stop_is_measured_at_its_bias_with_any_budget():
    config = PolicyConfig(feature_width=4, text_width=0, num_heads=2, encoder_layers=1)
    policy = StepPrune.init(jax.random.key(0), config, None, budget=3)
    mask = np.arange(12) < np.array([[12], [4]])
    inputs = Inputs(jax.random.normal(jax.random.key(1), (2, 12, 4)), None, jnp.asarray(mask))
    longest, shortest = (
        measure_stop(policy.replace(stop_bias=jnp.float32(bias)), inputs) for bias in (-99, 99)
    )
    assert (longest.mean, longest.at_cap, longest.num_tokens) == (4, 1, 8)  # 6 of 12, 2 of 4
    assert (shortest.mean, shortest.at_floor) == (1, 1)
