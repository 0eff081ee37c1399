"""Policies: pruning, budgets, calibration and pytree behavior."""

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
from stepprune_jax.selectors import (
    AutoSelect,
    AutoSelectConfig,
    RlooSettings,
    StepPrune,
    autoselect,
)
from stepprune_jax.selectors.base import nonzero_tokens
from stepprune_jax.selectors.calibration import calibrate, read_calibration
from stepprune_jax.user_input import UserError

WIDTHS = {"feature_width": 16, "text_width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
CONFIG = PolicyConfig(decoder_layers=1, min_tokens=2, **WIDTHS)
B, N = 24, 20


@pytest.fixture(scope="module")
def world():
    """Features with a large mean and variance, and questions."""
    image = 40 + 7 * jax.random.normal(jax.random.key(0), (B, N, 16))
    return image, jax.random.normal(jax.random.key(1), (B, 3, 8))


@pytest.fixture(scope="module")
def policy(world):
    stats = functions.update_stats(FeatureStats.start(16), world[0])
    initial = StepPrune.init(jax.random.key(2), CONFIG, stats)
    # Larger weights make the counts differ between rows.
    return initial.replace(params=jax.tree.map(lambda x: 3 * x, initial.params), stop_bias=0.5)


@pytest.fixture(scope="module")
def calibrated(policy, world):
    image, text = world
    return policy.calibrate([(image[:16], text[:16]), (image[16:], text[16:])])


def test_a_policy_prunes_with_its_statistics_and_its_stop(policy, world):
    pruned = policy.prune(*world)
    inputs = Inputs(*world, stats=policy.stats)
    expected = functions.prune(policy.params, CONFIG, inputs, stop_bias=policy.stop_bias)
    jax.tree.map(np.testing.assert_array_equal, pruned, expected)
    inputs = Inputs(*world)
    without_stats = functions.prune(policy.params, CONFIG, inputs, stop_bias=policy.stop_bias)
    assert pruned.index.tolist() != without_stats.index.tolist()


def test_a_jitted_select_equals_prune_and_compiles_once_per_kind_of_budget(calibrated, world):
    mask = jnp.arange(N) < jnp.where(jnp.arange(B) % 2 == 0, 7, N)[:, None]
    select = jax.jit(lambda policy, mask: policy.select(*world, capacity=10, image_mask=mask))
    # The last fraction has too many digits to be a traced number.
    budgets = {"own": 1, 4: 2, 7: 2, 1: 2, "1/3": 3, "50%": 3, "1/7": 3, "12.3456789%": 4}
    for budget, num_programs in (budgets | {"mean:5": 5, "mean:6.5": 5, "mean:4": 5}).items():
        policy = calibrated.with_budget(budget)
        selected, expected = select(policy, mask), policy.prune(*world, image_mask=mask)
        assert select._cache_size() == num_programs, budget
        np.testing.assert_array_equal(selected.count, expected.count)
        size = min(selected.index.shape[1], expected.index.shape[1])
        np.testing.assert_array_equal(selected.index[:, :size], expected.index[:, :size])
        np.testing.assert_allclose(selected.tokens[:, :size], expected.tokens[:, :size], rtol=1e-6)
        if policy.budget.kind == "rate":
            expected_counts = [policy.budget.count(size) for size in (7, N)] * (B // 2)
            assert selected.count.tolist() == expected_counts
    on_device = jax.device_put(calibrated.with_budget("1/3"))
    assert str(on_device.budget) == "1/3" and on_device.budget.count(N) == 7
    np.testing.assert_array_equal(on_device.prune(*world).count, np.full(B, 7))


def test_a_small_capacity_cuts_the_last_choices_with_and_without_jit(calibrated, world):
    policy = calibrated.with_budget(4)
    expected = policy.prune(*world, order="pick")
    jitted = jax.jit(lambda policy, image, text: policy.select(image, text, capacity=2))
    for pruned in (jitted(policy, *world), policy.select(*world, capacity=2)):
        np.testing.assert_array_equal(pruned.index, np.sort(expected.index[:, :2], axis=1))
        np.testing.assert_array_equal(pruned.count, np.minimum(expected.count, 2))


def test_a_mean_budget_gives_its_mean_count(calibrated, world):
    table = calibrated.calibration
    assert table.questions == B and table.num_tokens == N
    assert list(table.mean_count) == sorted(table.mean_count)
    for mean in (3.0, 5.0, 8.0):
        mean_count = float(calibrated.with_budget(f"mean:{mean}").prune(*world).count.mean())
        assert mean_count == pytest.approx(mean, abs=0.5)
    assert table.mean_count[0] >= 2 and table.mean_count[-1] <= 10


def custom_init(params, config, memory, memory_mask, steps):
    return jnp.zeros_like(memory[:, 0]), memory @ params["decoder"], ()


def custom_step(params, config, context, query, cache, step):
    return jnp.einsum("bmd,bd->bm", context, query - 1), cache


def test_a_custom_decoder_can_be_calibrated(policy, world):
    custom = policy.replace(params=policy.params | {"decoder": 0.1 * jnp.eye(16)})
    decoder = DecoderFns(custom_init, custom_step)
    custom = custom.calibrate([world], decoder)
    low, high = custom.calibration.mean_count[0], custom.calibration.mean_count[-1]
    mean = (low + high) / 2
    pruned = custom.with_budget(f"mean:{mean}").prune(*world, decoder=decoder)
    assert float(pruned.count.mean()) == pytest.approx(mean, abs=0.5)


def test_unsupported_budgets_are_refused(policy, calibrated, world):
    unsupported = {"mean:5": "no calibration", "all": "does not support the budget all"}
    for budget, message in unsupported.items():
        with pytest.raises(ValueError, match=message):
            policy.with_budget(budget)
        with pytest.raises(ValueError, match=message):
            policy.replace(budget=budget).prune(*world)
    with pytest.raises(ValueError, match="mean budget is 19"):
        calibrated.with_budget("mean:19")


def test_unknown_keywords_are_refused(policy, world):
    """A misspelled mask is not ignored."""
    image, text = world
    key, importance = jax.random.key(0), jnp.ones(image.shape[:2])

    def answer_losses(kept):
        return jnp.zeros(kept.count.shape)

    for call in (
        functools.partial(policy.rloo_loss, key, image, text, answer_losses),
        functools.partial(policy.warm_start_loss, key, image, text, importance),
        functools.partial(policy.measure_subset_gain, key, image, text, answer_losses),
        functools.partial(policy.diagnose, answer_losses, image, text, [2]),
    ):
        with pytest.raises(TypeError, match=r"has no option 'text_msk'; .* mean text_mask\?"):
            call(text_msk=None)


def test_a_message_lists_the_options_of_the_function(policy, world):
    image, text = world
    subsets = jax.random.key(0), image, text, lambda kept: jnp.zeros(kept.count.shape)
    for call, options in (
        (functools.partial(policy.rloo_loss, *subsets), "settings, image_mask, text_mask"),
        (functools.partial(policy.measure_subset_gain, *subsets), "settings, image_mask"),
        (functools.partial(policy.diagnose, subsets[-1], image, text, [2]), "key, recipe, image"),
    ):
        with pytest.raises(TypeError, match=f"has no option 'longest'; its options: {options}"):
            call(longest=0.5)


def test_settings_in_python_are_not_named_as_fields_of_a_run():
    with pytest.raises(ValueError, match=r"^RlooSettings.longest is 4.*, expected a share in"):
        RlooSettings(longest=4.0)


def test_arguments_in_another_order_and_text_without_words_are_explained(world):
    image, text = world
    message = "text is a function, expected an array .*; check the order of the arguments$"
    with pytest.raises(ValueError, match=message):
        Inputs(image, lambda kept: kept).check(16, 8)
    message = r"question; for one vector for each question, give text\[:, None\]$"
    with pytest.raises(ValueError, match=message):
        Inputs(image, text[:, 0]).check(16, 8)


def test_a_mean_at_a_bound_warns():
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
    restored = read_calibration(json.loads(json.dumps(table.as_json())))
    assert restored == table and hash(restored) == hash(table)


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
def test_a_damaged_calibration_is_refused(field, value):
    valid_table = {"mean_count": [1.0, 2.0], "stop_bias": [1.0, 0.0], "at_floor": [1.0, 0.0]}
    valid_table |= {"at_cap": [0.0, 0.5], "num_tokens": 9.0, "questions": 4}
    assert read_calibration(valid_table).bias_at(1.5) == 0.5
    with pytest.raises(ValueError, match=f"^the calibration's {field} "):
        read_calibration(valid_table | {field: value})


def test_a_mean_budget_uses_the_bias_of_the_calibration(calibrated):
    assert build_pruner(None, "mean:5", policy=calibrated).bias == calibrated.bias_at(5)
    assert build_pruner(None, "mean:5", policy=calibrated, stop_bias=2.0).bias == 2.0


def test_a_policy_is_a_pytree_of_its_arrays(calibrated):
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(calibrated)
    assert doubled.config == CONFIG and doubled.calibration == calibrated.calibration
    np.testing.assert_allclose(doubled.params["stop"], 2 * calibrated.params["stop"])


@pytest.mark.parametrize("config", [CONFIG, AutoSelectConfig(**WIDTHS)], ids=["steps", "scores"])
def test_the_key_determines_the_sampled_tokens(world, config):
    image, text = world
    policy = type(selector_of(config)).init(jax.random.key(3), config, FeatureStats.start(16))

    @jax.jit
    def select(policy, image, text, key):
        return policy.select(image, text, capacity=5, budget=5, key=key)

    default_key, seed_0, seed_1 = (
        np.asarray(policy.prune(image, text, budget=5, key=key).index[:, :5])
        for key in (None, jax.random.key(0), jax.random.key(1))
    )
    np.testing.assert_array_equal(default_key, seed_0)
    assert (default_key != seed_1).any()
    selected = select(policy, image, text, jax.random.key(1))
    np.testing.assert_array_equal(selected.index, seed_1)
    # A question gets the same tokens at any position of a batch.
    single_row = policy.prune(image[7:8], text[7:8], budget=5)
    np.testing.assert_array_equal(single_row.index[0, :5], default_key[7])


def test_a_one_shot_scorer_prunes_to_an_exact_budget(world):
    image, text = world
    config = AutoSelectConfig(draw=0.0, **WIDTHS)
    scorer = AutoSelect.init(jax.random.key(3), config, FeatureStats.start(16))
    mask = jnp.arange(N) < jnp.where(jnp.arange(B) == 0, 3, N)[:, None]
    pruned = scorer.prune(image, text, budget=5, image_mask=mask, order="pick")
    assert pruned.count.tolist() == [3] + [5] * (B - 1)
    inputs = Inputs(image, text, mask, stats=scorer.stats)
    scores = jax.jit(autoselect.scores)(scorer.params, scorer.config, inputs)
    np.testing.assert_array_equal(pruned.index[1:, :5], np.argsort(-scores, 1)[1:, :5])
    with pytest.raises(ValueError, match="no learned stop"):
        scorer.prune(image, text, budget=4, max_steps=5)
    for prune in (scorer.prune, functools.partial(scorer.select, capacity=4)):
        with pytest.raises(UserError, match="'autoselect' needs a budget"):
            prune(image, text)
    with pytest.raises(ValueError, match="does not support the budget mean:4"):
        scorer.with_budget("mean:4")
    for invalid_budget in (0, N + 1, 2.5):
        with pytest.raises(ValueError, match=f"budget is {invalid_budget}, expected"):
            scorer.prune(image, text, budget=invalid_budget)
    with pytest.raises(ValueError, match="budget is 0, expected"):
        jax.jit(lambda scorer: scorer.select(image, text, capacity=N, budget=0))(scorer)


@pytest.mark.parametrize("config", [CONFIG, AutoSelectConfig(**WIDTHS)])
def test_the_sampling_temperature_is_an_option(config):
    policy = type(selector_of(config)).init(jax.random.key(0), config, None)
    sampling = build_pruner(budget=3, policy=policy)
    greedy = build_pruner(budget=3, policy=policy, options={"draw": "0"})
    assert greedy.config == sampling.config == config and config.draw > 0
    greedy_config = policy.replace(config=dataclasses.replace(config, draw=0)).with_budget(3)
    image_key, text_key = jax.random.split(jax.random.key(1))
    inputs = (
        jax.random.normal(image_key, (B, N, config.feature_width)),
        jax.random.normal(text_key, (B, 3, config.text_width)),
    )
    indices = [x.prune(*inputs).index.tolist() for x in (sampling, greedy, greedy_config)]
    assert indices[0] != indices[1] == indices[2]
    with pytest.raises(ValueError, match=r"draw is -1\.0, expected"):
        build_pruner(budget=3, policy=policy, options={"draw": -1})


def test_the_training_gate_leaves_zero_vectors_unchanged():
    """Zero vectors, such as the ends of rows of LLaVA-NeXT's tiles, get no noise."""
    image = jax.random.normal(jax.random.key(0), (1, 6, 16)).at[0, 2].set(0)
    stats = FeatureStats(*(jnp.full(16, x) for x in (0.5, 2.0)), jnp.ones(()))
    inputs = Inputs(image, image_mask=nonzero_tokens(image, jnp.ones((1, 6), bool)), stats=stats)
    params = functions.init_policy(jax.random.key(1), CONFIG)
    alpha = jnp.full((1, 6), 0.3)
    gated = jax.jit(gate_tokens)(params, CONFIG, jax.random.key(2), inputs, alpha)
    changed = np.asarray(jnp.any(gated != image, axis=-1))[0]
    assert changed.tolist() == [True, True, False, True, True, True]
