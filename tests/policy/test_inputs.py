"""Errors name the invalid argument, and padding does not change results."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, Limits, Picks, PolicyConfig, buckets

CONFIG = PolicyConfig(feature_width=8, text_width=6, num_heads=2)
IMAGE, TEXT = jnp.ones((2, 5, 8)), jnp.ones((2, 3, 6))
INPUTS = Inputs(IMAGE, TEXT)


@pytest.fixture(scope="module")
def params():
    return policy.init_policy(jax.random.key(0), CONFIG)


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (Inputs(IMAGE[..., :7], TEXT), "image"),
        (Inputs(IMAGE, TEXT[:1]), "text"),
        (Inputs(IMAGE, TEXT, jnp.ones((2, 4), bool)), "image_mask"),
        (Inputs(IMAGE, TEXT, None, jnp.ones(3, bool)), "text_mask"),
    ],
)
def test_inputs_that_do_not_fit_are_named(params, inputs, name):
    with pytest.raises(ValueError, match=f"^{name} is of shape"):
        policy.prune(params, CONFIG, inputs)


def test_checks_of_a_users_program_find_no_index_out_of_bounds(params):
    def keep(params, inputs):
        picks = policy.choose(params, CONFIG, inputs, Limits(max_steps=4))
        return policy.gather(picks, inputs.image, 4)

    error, pruned = jax.jit(checkify.checkify(keep, errors=checkify.index_checks))(params, INPUTS)
    assert error.get() is None and (pruned.count < 4).any()


@pytest.mark.skipif(not hasattr(jax, "P"), reason="jax 0.5 has no Explicit axes")
def test_arrays_on_explicit_mesh_axes_are_refused_by_name(params):
    """jax would say that the operands of a concatenation differ, and name no argument."""
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=explicit, devices=jax.devices()[:1])
    rows = jax.device_put(IMAGE, jax.NamedSharding(mesh, jax.P("data")))
    message = (
        r"^image is sharded over the mesh axes \['data'\] of type Explicit, expected type Auto"
    )
    for choose in (policy.prune, jax.jit(policy.choose, static_argnums=1)):
        with pytest.raises(ValueError, match=message):
            choose(params, CONFIG, Inputs(rows, TEXT))


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(max_steps=0), "max_steps"),
        (Limits(group=0), "group"),
        (Limits(budget=jnp.array([1, 9])), "budget"),
        (Limits(budget=jnp.array([1, 2, 1])), "budget"),
        (Limits(budget=1.5), "budget"),
        (Limits(budget=1, max_tokens=2), "budget"),
        (Limits(max_tokens=6), "max_tokens"),
        (Limits(min_tokens=2, max_tokens=1), "min_tokens"),
    ],
)
def test_limits_out_of_range_are_named(params, limits, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        policy.prune(params, CONFIG, INPUTS, limits)


def test_select_checks_limits(params):
    with pytest.raises(ValueError, match=r"budget is 3, expected within \[1, 2\]"):
        jax.eval_shape(lambda p: policy.select(p, CONFIG, INPUTS, Limits(budget=3)), params)


def test_a_bucket_that_is_too_small_is_named():
    with pytest.raises(ValueError, match="count is 2"):
        buckets.choose_bucket(np.array([1, 2]), (1,))
    selected = jnp.arange(5) < jnp.array([[2], [2]])
    picks = Picks(jnp.array([[0, 1], [0, 1]]), selected.sum(1), selected)
    for features, capacity, order, name in (
        (IMAGE, 1, "raster", "capacity"),
        (IMAGE[:, :4], 2, "raster", "features"),
        (IMAGE, 2, "spiral", "order"),
    ):
        with pytest.raises(ValueError, match=f"{name} is"):
            policy.gather(picks, features, capacity, order=order)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "hard"),
        ("num_heads", 3),
        ("temperature", 0.0),
        ("temperature", 10**400),
        ("max_steps", 0),
        ("stop_bias", math.nan),
        ("decay", 1.5),
    ],
)
def test_a_field_of_the_configuration_is_named(field, value):
    with pytest.raises(ValueError, match=rf"PolicyConfig\.{field} is "):
        dataclasses.replace(CONFIG, **{field: value})


def test_the_error_of_a_jitted_prune_names_alternatives(params):
    with pytest.raises(TypeError, match=r"jit choose\(params, .*gather\(picks, "):
        jax.jit(policy.prune)(params, CONFIG, INPUTS)


def test_an_image_has_at_most_as_many_steps_as_tokens(params):
    limits = Limits(budget=5, max_steps=9)
    assert policy.prune(params, CONFIG, INPUTS, limits).count.tolist() == [5, 5]
    config = dataclasses.replace(CONFIG, max_steps=9)
    assert (config.steps(5), config.steps(20)) == (5, 9)
    gated = jax.eval_shape(lambda p: policy.gate(p, config, jax.random.key(0), INPUTS), params)
    assert gated.trajectory.action.shape == (2, 5)


def test_t_max_is_half_of_the_tokens_of_each_image(params):
    mask = jnp.arange(5) < jnp.array([[5], [2]])
    inputs, choose = INPUTS._replace(image_mask=mask), jax.jit(policy.choose)
    for limits, expected_counts in ((Limits(), [2, 1]), (Limits(max_steps=4), [4, 2])):
        picks = choose(
            params, CONFIG, inputs, limits, stop_bias=-1e3
        )  # only T_max ends the episode
        assert picks.count.tolist() == expected_counts
    gated = jax.jit(policy.gate)(params, CONFIG, jax.random.key(0), inputs)
    assert gated.longest.tolist() == [2, 1] and (gated.stopped <= gated.longest).all()


def test_a_policy_without_text_does_not_read_it():
    config = dataclasses.replace(CONFIG, text_width=0)
    params = policy.init_policy(jax.random.key(0), config)
    encode = jax.jit(policy.encode)
    actual, expected = (encode(params, config, inputs) for inputs in (INPUTS, Inputs(IMAGE)))
    np.testing.assert_array_equal(actual, expected)


def test_float64_numpy_features_are_accepted(params):
    rng = np.random.default_rng(0)
    float64_inputs = Inputs(rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 3, 6)))
    float32_inputs = jax.tree.map(jnp.float32, float64_inputs)
    actual, expected = (
        policy.prune(params, CONFIG, x, Limits(budget=2)) for x in (float64_inputs, float32_inputs)
    )
    np.testing.assert_array_equal(actual.index, expected.index)
