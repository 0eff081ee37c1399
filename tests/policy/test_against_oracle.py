"""The policy against `oracle.py` on random batches."""

import functools
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quick import quick_or_slow

from stepprune_jax.policy import Inputs, trajectory_scores
from stepprune_jax.policy.encoder import encode_with_query, memory

CASES = 20  # of each group
KINDS = ("plain", "ties", "stop at once", "never stop", "empty row")
if jax.__version_info__ < (0, 6):  # products of equal rows may differ in the last bit there
    KINDS = tuple(kind for kind in KINDS if kind != "ties")


class Group(NamedTuple):
    """Static parameters of 20 cases, which share one compiled program."""

    fields: dict[str, Any]
    b: int = 2
    n: int = 6
    l: int = 3
    steps: int = 5
    exact: bool = False
    literal: bool = False

    @property
    def config(self):
        return (cases.small_literal if self.literal else cases.small_config)(**self.fields)


CAUSAL = dict(encoder_attention="causal", encoder_layers=2)
GROUPS = {
    "one token": Group(dict(num_heads=1), n=1, l=0, steps=1),
    "literal": Group(dict(encoder_layers=2), literal=True),
    "three layers": Group(dict(num_heads=4, encoder_layers=2, decoder_layers=3)),
    "causal, softmax stop": Group(dict(CAUSAL, stop="softmax")),
    "causal, printed gate": Group(dict(CAUSAL, text_gate="printed")),
    "hazard": Group(dict(stop="hazard")),
    "hazard, three layers": Group(dict(stop="hazard", decoder_layers=3, text_width=0), l=0),
    "own width, exact": Group(dict(feature_width=6, width=8, num_heads=4), exact=True),
    "temperatures": Group(
        dict(num_heads=1, encoder_layers=2, temperature=0.5, stop_temperature=1.5), n=7, l=4
    ),
    "literal, all steps": Group(
        dict(encoder_layers=2, decoder_layers=3, temperature=0.7, stop_bias=-0.3),
        b=1,
        n=9,
        l=2,
        steps=9,
        literal=True,
    ),
    "no text, exact": Group(dict(text_width=0, encoder_layers=3), l=0, exact=True),
}


def make_case(group, kind, seed):
    """Returns the weights and inputs of one case as numpy arrays."""
    rng, config = np.random.default_rng(seed), group.config
    b, n, l, steps = group.b, group.n, group.l, group.steps
    image = rng.standard_normal((b, n, config.feature_width))
    image_mask = cases.random_mask(rng, b, n)
    stop_bias = rng.normal(0.0, 2.0, b)
    min_tokens, max_tokens = np.sort(rng.integers(0, steps + 1, (2, b)), axis=0)
    source = np.arange(n)
    if kind == "ties":
        image_mask[:] = True
        source = rng.integers(0, max(1, n // 2), n)
        # A causal encoder tells twins apart by their past, so they are made twins behind it.
        if config.encoder_attention == "bidirectional":
            image, source = image[:, source], np.arange(n)
    if kind == "stop at once":
        min_tokens[:], stop_bias[:] = 0, 40.0
    if kind == "never stop":
        max_tokens[:], stop_bias[:] = steps, -40.0
    if kind == "empty row":
        image_mask[0] = False
    if group.exact:
        min_tokens = max_tokens = rng.integers(1, steps + 1, b)
    text = text_mask = None
    if l:
        text_mask = cases.random_mask(rng, b, l)
        text = cases.poison(rng, rng.standard_normal((b, l, config.text_width)), text_mask)
    return dict(
        params=cases.random_weights(rng, config),
        image=cases.poison(rng, image, image_mask),
        text=text,
        source=source,
        image_mask=image_mask,
        text_mask=text_mask,
        gate=float(rng.choice([0.0, 0.3, 1.0])),
        min_tokens=min_tokens.astype(np.int32),
        max_tokens=max_tokens.astype(np.int32),
        stop_bias=stop_bias,
    )


@functools.partial(jax.jit, static_argnames=("config", "steps", "exact"))
def run_package(config, steps, exact, case):
    """Returns (H, select, select_parallel, pick, scores); the memory has NaN in its padding."""
    params, image_mask = case["params"], case["image_mask"]
    inputs = Inputs(case["image"], case["text"], image_mask, case["text_mask"])
    encoded, question = encode_with_query(params, config, inputs, case["gate"])
    encoded = encoded[:, case["source"]]
    slots = memory(params, jnp.where(image_mask[..., None], encoded, jnp.nan))
    bounds = dict(min_tokens=case["min_tokens"], max_tokens=case["max_tokens"])
    arguments = dict(
        mask=image_mask,
        max_steps=steps,
        stop_bias=case["stop_bias"],
        question=0.0 if question is None else question,
        **(dict(budget=case["min_tokens"]) if exact else bounds),
    )
    trajectory = cases.select(params, config, slots, **arguments)
    parallel = cases.select_parallel(params, config, slots, **arguments)
    picks = cases.pick(params, config, slots, **arguments)
    return encoded, trajectory, parallel, picks, trajectory_scores(config, trajectory)


def run_oracle(config, steps, case, row):
    """Returns (H, Row) of one row of a case."""
    text, text_mask = (None if case[k] is None else case[k][row] for k in ("text", "text_mask"))
    encoded = oracle.encode_row(
        case["params"],
        config,
        case["image"][row],
        text,
        case["image_mask"][row],
        text_mask,
        case["gate"],
    )[case["source"]]
    trajectory = oracle.select_row(
        case["params"],
        config,
        oracle.memory_row(case["params"], encoded),
        case["image_mask"][row],
        steps=steps,
        min_tokens=case["min_tokens"][row],
        max_tokens=case["max_tokens"][row],
        stop_bias=case["stop_bias"][row],
        question=oracle.first_query_row(case["params"], config, text, text_mask, case["gate"]),
    )
    return encoded, trajectory


def assert_same(actual, expected, row):
    """Asserts that a row of a `Trajectory` equals a `Row` of the oracle."""
    actual_fields = {name: np.asarray(value)[row] for name, value in actual._asdict().items()}
    for name in ("action", "alive", "count", "selected"):
        np.testing.assert_array_equal(actual_fields[name], getattr(expected, name), err_msg=name)
    # Choice and margin are undefined at steps without a remaining token.
    has_token = expected.open
    np.testing.assert_array_equal(actual_fields["choice"][has_token], expected.choice[has_token])
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    assert_close(actual_fields["margin"][has_token], expected.margin[has_token], err_msg="margin")
    for name in ("log_prob", "prob", "stop_prob", "log_continue"):
        assert_close(actual_fields[name], getattr(expected, name), err_msg=name)


QUICK = ("literal", "three layers", "hazard")


@pytest.mark.parametrize("name", quick_or_slow(GROUPS, QUICK))
def test_encode_select_parallel_and_pick_equal_the_oracle_on_random_cases(name):
    group = GROUPS[name]
    config = group.config
    counts = []
    first = 1000 * list(GROUPS).index(name)
    for index in range(CASES):
        case = make_case(group, KINDS[index % len(KINDS)], first + index)
        with jax.enable_x64(True):
            results = run_package(config, group.steps, group.exact, case)
        encoded, trajectory, parallel, picks, scores = jax.tree.map(np.asarray, results)
        for row in range(group.b):
            expected_h, expected = run_oracle(config, group.steps, case, row)
            np.testing.assert_allclose(encoded[row], expected_h, rtol=1e-9, atol=1e-9)
            assert_same(trajectory, expected, row)
            assert_same(parallel, expected, row)
            for field in ("action", "count", "selected"):
                np.testing.assert_array_equal(getattr(picks, field)[row], getattr(expected, field))
            assert_same_scores(config, scores[row], expected)
            counts.append(expected.count)
    # The cases are not trivial if their counts differ.
    assert len(set(counts)) > 1


def assert_same_scores(config, actual, row):
    linear = oracle.soft_scores(row.prob, row.stop_prob, config.decay, "discounted")
    if config.score_space == "linear":
        np.testing.assert_allclose(actual, linear, rtol=1e-9, atol=1e-9)
    else:
        # Below 1e-250 the oracle's linear sum loses digits; the logarithm must not.
        is_precise = linear > 1e-250
        np.testing.assert_allclose(
            actual[is_precise], np.log(linear[is_precise]), rtol=1e-9, atol=1e-9
        )
        assert np.isfinite(actual).all() and (actual[~is_precise] < -500).all()
