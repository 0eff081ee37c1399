"""A policy as one object: it prunes with what belongs to its weights."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy as functions
from stepprune_jax.policy import DecoderFns, FeatureStats, Inputs, PolicyConfig
from stepprune_jax.policy.noise import gate_tokens
from stepprune_jax.registry import build_pruner, selector_of
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig, StepPrune, autoselect
from stepprune_jax.selectors.base import nonzero_tokens
from stepprune_jax.selectors.calibration import calibrate, read_calibration
from stepprune_jax.user_input import UserError

WIDTHS = {"feature_width": 16, "text_width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
CONFIG = PolicyConfig(decoder_layers=1, min_tokens=2, **WIDTHS)
B, N = 24, 20


@pytest.fixture(scope="module")
def world():
    """Features far from standard, and questions."""
    image = 40 + 7 * jax.random.normal(jax.random.key(0), (B, N, 16))
    return image, jax.random.normal(jax.random.key(1), (B, 3, 8))


@pytest.fixture(scope="module")
def policy(world):
    stats = functions.update_stats(FeatureStats.start(16), world[0])
    drawn = StepPrune.init(jax.random.key(2), CONFIG, stats)
    # Sharp: counts differ between rows.
    return drawn.replace(params=jax.tree.map(lambda x: 3 * x, drawn.params), stop_bias=0.5)


@pytest.fixture(scope="module")
def calibrated(policy, world):
    image, text = world
    return policy.calibrate([(image[:16], text[:16]), (image[16:], text[16:])])


def test_it_prunes_with_its_statistics_and_its_stop(policy, world):
    found = policy.prune(*world)
    inputs = Inputs(*world, stats=policy.stats)
    expected = functions.prune(policy.params, CONFIG, inputs, stop_bias=policy.stop_bias)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    inputs = Inputs(*world)
    without_stats = functions.prune(policy.params, CONFIG, inputs, stop_bias=policy.stop_bias)
    assert found.index.tolist() != without_stats.index.tolist()


def test_select_keeps_the_same_tokens_in_a_jitted_function_compiled_once_a_kind_of_budget(
    calibrated, world
):
    mask = jnp.arange(N) < jnp.where(jnp.arange(B) % 2 == 0, 7, N)[:, None]
    select = jax.jit(
        lambda policy, mask: policy.select(*world, capacity=10, image_mask=mask),
    )
    # The last share has too many digits to be a number of a program.
    budgets = {"own": 1, 4: 2, 7: 2, 1: 2, "1/3": 3, "50%": 3, "1/7": 3, "12.3456789%": 4}
    for budget, programs in (budgets | {"mean:5": 5, "mean:6.5": 5, "mean:4": 5}).items():
        policy = calibrated.with_budget(budget)
        found, expected = select(policy, mask), policy.prune(*world, image_mask=mask)
        assert select._cache_size() == programs, budget
        np.testing.assert_array_equal(found.count, expected.count)
        size = min(found.index.shape[1], expected.index.shape[1])
        np.testing.assert_array_equal(found.index[:, :size], expected.index[:, :size])
        np.testing.assert_allclose(found.tokens[:, :size], expected.tokens[:, :size], rtol=1e-6)
        if policy.budget.kind == "rate":
            exact = [policy.budget.count(size) for size in (7, N)] * (B // 2)
            assert found.count.tolist() == exact
    placed = jax.device_put(calibrated.with_budget("1/3"))
    assert str(placed.budget) == "1/3" and placed.budget.count(N) == 7
    np.testing.assert_array_equal(placed.prune(*world).count, np.full(B, 7))


def test_a_small_capacity_cuts_the_last_choices_in_a_jitted_function_or_outside(calibrated, world):
    policy = calibrated.with_budget(4)
    expected = policy.prune(*world, order="pick")
    cut = jax.jit(lambda policy, image, text: policy.select(image, text, capacity=2))
    for found in (cut(policy, *world), policy.select(*world, capacity=2)):
        np.testing.assert_array_equal(found.index, np.sort(expected.index[:, :2], axis=1))
        np.testing.assert_array_equal(found.count, np.minimum(expected.count, 2))


def test_the_mean_count_is_the_one_that_was_asked_for(calibrated, world):
    table = calibrated.calibration
    assert table.questions == B and table.num_tokens == N
    assert list(table.mean_count) == sorted(table.mean_count)
    for mean in (3.0, 5.0, 8.0):
        found = float(calibrated.with_budget(f"mean:{mean}").prune(*world).count.mean())
        assert found == pytest.approx(mean, abs=0.5)
    assert table.mean_count[0] >= 2 and table.mean_count[-1] <= 10


def own_start(params, config, memory, memory_mask, steps):
    return jnp.zeros_like(memory[:, 0]), memory @ params["decoder"], ()


def own_step(params, config, context, query, cache, step):
    return jnp.einsum("bmd,bd->bm", context, query - 1), cache


def test_a_decoder_of_ones_own_keeps_a_mean_count(policy, world):
    own = policy.replace(params=policy.params | {"decoder": 0.1 * jnp.eye(16)})
    decoder = DecoderFns(own_start, own_step)
    own = own.calibrate([world], decoder)
    low, high = own.calibration.mean_count[0], own.calibration.mean_count[-1]
    mean = (low + high) / 2
    found = own.with_budget(f"mean:{mean}").prune(*world, decoder=decoder)
    assert float(found.count.mean()) == pytest.approx(mean, abs=0.5)


def test_budgets_that_a_policy_cannot_keep_are_refused(policy, calibrated, world):
    with pytest.raises(ValueError, match="no calibration"):
        policy.with_budget("mean:5")
    with pytest.raises(ValueError, match="no calibration"):
        policy.replace(budget="mean:5").prune(*world)
    with pytest.raises(ValueError, match="mean budget is 19"):
        calibrated.with_budget("mean:19")
    with pytest.raises(ValueError, match="does not support the budget all"):
        policy.with_budget("all")
    with pytest.raises(ValueError, match="does not support the budget all"):
        policy.replace(budget="all").prune(*world)


def test_a_count_that_hardly_varies_is_said():
    # All but one row stop at once, at any bias above -3.
    margin = np.full((40, 6), -9.0)
    margin[:39, 1] = 3.0
    table = calibrate(margin, np.full(40, 12), 1)
    assert table.at_floor[0] >= 0.97
    with pytest.warns(UserWarning, match="is the least"):
        table.bias_at(1.1)
    with pytest.warns(UserWarning, match="is the largest"):
        table.bias_at(table.mean_count[-1])
    # Two of four images have a T_max of 4, below the minimum of 8.
    margin = np.where(np.arange(20) < 5, -1.0, 1.0) * np.ones((4, 1))
    margin[:2, 4:] = np.inf
    mixed = calibrate(margin, np.array([8, 8, 40, 40]), 8)
    assert mixed.mean_count == (6.0, 12.0) and mixed.at_floor[0] == 1
    same = read_calibration(json.loads(json.dumps(table.as_json())))
    assert same == table and hash(same) == hash(table)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mean_count", [2.0, 1.0]),
        ("mean_count", [1.0, 10.0]),
        ("stop_bias", [0.0, 1.0]),
        ("stop_bias", [0.0]),
        ("at_floor", [-0.1, 0.0]),
        ("at_cap", [0.0, float("nan")]),
        ("questions", 4.5),
        ("num_tokens", [1]),
        ("fields", 1),
    ],
)
def test_a_table_that_is_none_is_refused(field, value):
    good = {"mean_count": [1.0, 2.0], "stop_bias": [1.0, 0.0], "at_floor": [1.0, 0.0]}
    good |= {"at_cap": [0.0, 0.5], "num_tokens": 9.0, "questions": 4}
    assert read_calibration(good).bias_at(1.5) == 0.5
    with pytest.raises(ValueError, match=f"^the calibration's {field} "):
        read_calibration(good | {field: value})


def test_a_mean_budget_of_a_method_is_a_bias_of_its_calibration(calibrated):
    assert build_pruner(None, "mean:5", policy=calibrated).bias == calibrated.bias_at(5)
    assert build_pruner(None, "mean:5", policy=calibrated, stop_bias=2.0).bias == 2.0


def test_it_is_a_pytree_of_its_arrays(calibrated):
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(calibrated)
    assert doubled.config == CONFIG and doubled.calibration == calibrated.calibration
    np.testing.assert_allclose(doubled.params["stop"], 2 * calibrated.params["stop"])


@pytest.mark.parametrize("config", [CONFIG, AutoSelectConfig(**WIDTHS)], ids=["steps", "scores"])
def test_draws_are_those_of_the_key(world, config):
    image, text = world
    drawn = type(selector_of(config)).init(jax.random.key(3), config, FeatureStats.start(16))

    @jax.jit
    def select(policy, image, text, key):
        return policy.select(image, text, capacity=5, budget=5, key=key)

    first, again, other = (
        np.asarray(drawn.prune(image, text, budget=5, key=key).index[:, :5])
        for key in (None, jax.random.key(0), jax.random.key(1))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    found = select(drawn, image, text, jax.random.key(1))
    np.testing.assert_array_equal(found.index, other)
    # The same question has the same tokens, wherever it stands in a batch.
    one = drawn.prune(image[7:8], text[7:8], budget=5)
    np.testing.assert_array_equal(one.index[0, :5], first[7])


def test_a_one_shot_scorer_prunes_to_an_exact_budget(world):
    image, text = world
    config = AutoSelectConfig(draw=0.0, **WIDTHS)
    scorer = AutoSelect.init(jax.random.key(3), config, FeatureStats.start(16))
    mask = jnp.arange(N) < jnp.where(jnp.arange(B) == 0, 3, N)[:, None]
    found = scorer.prune(image, text, budget=5, image_mask=mask, order="pick")
    assert found.count.tolist() == [3] + [5] * (B - 1)
    inputs = Inputs(image, text, mask, stats=scorer.stats)
    scores = autoselect.scores(scorer.params, scorer.config, inputs)
    np.testing.assert_array_equal(found.index[1:, :5], np.argsort(-scores, 1)[1:, :5])
    with pytest.raises(ValueError, match="no learned stop"):
        scorer.prune(image, text, budget=4, max_steps=5)
    for prune in (scorer.prune, functools.partial(scorer.select, capacity=4)):
        with pytest.raises(UserError, match="'autoselect' needs a budget"):
            prune(image, text)
    with pytest.raises(ValueError, match="does not support the budget mean:4"):
        scorer.with_budget("mean:4")
    for wrong in (0, N + 1, 2.5):
        with pytest.raises(ValueError, match=f"budget is {wrong}, expected"):
            scorer.prune(image, text, budget=wrong)
    with pytest.raises(ValueError, match="budget is 0, expected"):
        jax.jit(lambda scorer: scorer.select(image, text, capacity=N, budget=0))(scorer)


@pytest.mark.parametrize("config", [CONFIG, AutoSelectConfig(**WIDTHS)])
def test_the_temperature_of_draws_is_an_option(config):
    policy = type(selector_of(config)).init(jax.random.key(0), config, None)
    drawn = build_pruner(budget=3, policy=policy)
    greedy = build_pruner(budget=3, policy=policy, options={"draw": "0"})
    assert greedy.config == drawn.config == config and config.draw > 0
    still = policy.replace(config=dataclasses.replace(config, draw=0)).with_budget(3)
    image_key, text_key = jax.random.split(jax.random.key(1))
    inputs = (
        jax.random.normal(image_key, (B, N, config.feature_width)),
        jax.random.normal(text_key, (B, 3, config.text_width)),
    )
    found = [x.prune(*inputs).index.tolist() for x in (drawn, greedy, still)]
    assert found[0] != found[1] == found[2]
    with pytest.raises(ValueError, match=r"draw is -1\.0, expected"):
        build_pruner(budget=3, policy=policy, options={"draw": -1})


def test_tokens_that_carry_nothing_are_left_out_by_the_gate():
    """Vectors of zeros, such as the ends of rows of LLaVA-NeXT's tiles, are no noise."""
    image = jax.random.normal(jax.random.key(0), (1, 6, 16)).at[0, 2].set(0)
    stats = FeatureStats(*(jnp.full(16, x) for x in (0.5, 2.0)), jnp.ones(()))
    inputs = Inputs(image, image_mask=nonzero_tokens(image, jnp.ones((1, 6), bool)), stats=stats)
    params = functions.init_policy(jax.random.key(1), CONFIG)
    gated = gate_tokens(params, CONFIG, jax.random.key(2), inputs, jnp.full((1, 6), 0.3))
    changed = np.asarray(jnp.any(gated != image, axis=-1))[0]
    assert changed.tolist() == [True, True, False, True, True, True]
