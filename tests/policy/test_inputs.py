"""Bad input is refused by name, shape and expectation, before anything runs."""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import PolicyConfig

SCRIPT = pathlib.Path(__file__).with_name("wrong_types.py")
CONFIG = PolicyConfig(feature_width=8, text_width=6, num_heads=2)
IMAGE, TEXT = jnp.ones((2, 5, 8)), jnp.ones((2, 3, 6))


@pytest.fixture(scope="module")
def params():
    return policy.init_policy(jax.random.key(0), CONFIG)


@pytest.fixture(scope="module")
def slots(params):
    encoded = jax.jit(policy.encode, static_argnums=1)(params, CONFIG, IMAGE, TEXT)
    return policy.memory(params, encoded)


@pytest.mark.parametrize(
    ("image", "text", "options", "message"),
    [
        (IMAGE[0], TEXT, {}, r"encode: image has shape \(5, 8\).*expected Float\[b n"),
        (IMAGE.astype(jnp.int32), TEXT, {}, "encode: image has shape .* dtype int32"),
        (IMAGE[..., :7], TEXT, {}, "width of image is 7, expected 8"),
        (IMAGE, TEXT[..., :5], {}, "width of text is 5, expected 6"),
        (IMAGE, TEXT[:1], {}, r"encode: text has shape \(1, 3, 6\).*with b=2"),
        (IMAGE[:, :0], TEXT, {}, "image is of shape .* expected at least one token"),
        (IMAGE.at[0, 1, 2].set(jnp.nan), TEXT, {}, "image is .* 1 non-finite values"),
        (IMAGE, TEXT.at[0].set(jnp.inf), {}, "text is .* 18 non-finite values"),
        (IMAGE, TEXT, {"image_mask": jnp.ones((2, 4), bool)}, r"image_mask has .* \(2, 4\).*n=5"),
        (IMAGE, TEXT, {"text_mask": jnp.ones((2, 3))}, "text_mask has .* expected Bool"),
    ],
)
def test_encode_refuses(params, image, text, options, message):
    with pytest.raises(ValueError, match=message):
        policy.encode(params, CONFIG, image, text, **options)


def test_a_policy_without_text_refuses_text():
    blind = dataclasses.replace(CONFIG, text_width=0)
    params = policy.init_policy(jax.random.key(0), blind)
    shape = jax.eval_shape(lambda p: policy.encode(p, blind, IMAGE, None), params).shape
    assert shape == (2, 5, 8)
    with pytest.raises(ValueError, match="expected no text"):
        policy.encode(params, blind, IMAGE, TEXT)


def test_non_finite_padding_is_nobodys_business(params):
    mask = jnp.ones((2, 5), bool).at[0, 1].set(False)
    broken = IMAGE.at[0, 1].set(jnp.nan)
    # What is checked are the arrays that are no arguments of the compiled function.
    run = jax.jit(lambda params: policy.encode(params, CONFIG, broken, TEXT, image_mask=mask))
    assert bool(jnp.isfinite(run(params)).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, r"max_steps \(T_max\) is 0, expected an integer from 1"),
        ({"budget": 3}, r"budget is 3, expected within \[1, 2\]"),
        ({"budget": 0}, r"budget is 0, expected within \[1, 2\]"),
        ({"budget": jnp.array([1, 9])}, r"budget is 1 to 9, expected within \[1, 2\]"),
        ({"budget": jnp.array([1, 2, 1])}, r"budget is of shape \(3,\).*int\[2\]"),
        ({"budget": 1.5}, "budget is of shape .* dtype float64, expected an integer"),
        ({"budget": 1, "max_tokens": 2}, "budget is given with min_tokens or max_tokens"),
        ({"max_tokens": 6}, r"max_tokens is 6, expected within \[0, 5\]"),
        ({"min_tokens": 3}, r"min_tokens is 3, expected within \[0, 2\]"),
        ({"min_tokens": 2, "max_tokens": 1}, r"min_tokens is 2, expected at most max_tokens \(1\)"),
        ({"stop_bias": math.nan}, "stop_bias is nan, expected finite values"),
        ({"stop_bias": jnp.array([1.0, jnp.inf])}, r"stop_bias is .*\(2,\) with 1 non-finite"),
        ({"stop_bias": jnp.ones((2, 1))}, r"stop_bias is of shape \(2, 1\).* or float\[2\]"),
        ({"stop_bias": jnp.ones(3)}, r"stop_bias is of shape \(3,\).*expected a number or float"),
        ({"image_mask": jnp.ones((2, 4), bool)}, r"image_mask is of shape \(2, 4\)"),
    ],
)
@pytest.mark.parametrize("chooser", [policy.select, policy.select_parallel, policy.pick])
def test_selection_refuses(params, slots, chooser, options, message):
    with pytest.raises(ValueError, match=message):
        chooser(params, CONFIG, slots, **options)


def test_selection_refuses_broken_memory(params, slots):
    with pytest.raises(ValueError, match=r"memory is .* non-finite"):
        policy.select(params, CONFIG, slots.at[0, 0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match="at least one token and the stop slot"):
        policy.select(params, CONFIG, slots[:, :1])


def test_soft_topk_refuses():
    scores = jnp.arange(5.0)
    for k in (-1, 5.5, 6):
        with pytest.raises(ValueError, match=r"k is .*, expected within \[0, 5\]"):
            policy.soft_topk(scores, k, 0.3)
    with pytest.raises(ValueError, match="temperature is 0"):
        policy.soft_topk(scores, 2, 0.0)
    with pytest.raises(ValueError, match="backend is 'softmax', expected one of"):
        policy.soft_topk(scores, 2, 0.3, backend="softmax")
    with pytest.raises(ValueError, match=r"soft_topk: scores has .* dtype int32"):
        policy.soft_topk(jnp.arange(5), 2, 0.3)


def test_gather_refuses(params, slots):
    t = jax.jit(lambda params, slots: policy.select(params, CONFIG, slots, budget=2))(params, slots)
    for capacity in (0, 6):
        with pytest.raises(ValueError, match=r"capacity is .* expected within \[1, 5\]"):
            policy.gather(t, IMAGE, capacity)
    with pytest.raises(ValueError, match="capacity is 1, expected at least the largest count, 2"):
        policy.gather(t, IMAGE, 1)
    with pytest.raises(ValueError, match=r"features is of shape \(2, 4, 8\)"):
        policy.gather(t, IMAGE[:, :4], 2)
    with pytest.raises(ValueError, match="order is 'spiral'"):
        policy.gather(t, IMAGE, 2, order="spiral")


def test_prune_refuses_before_compiling(params):
    for options, message in [
        ({"budget": 9}, r"budget is 9, expected within \[1, 2\]"),
        ({"budget": 0}, r"budget is 0, expected within \[1, 2\]"),
        ({"budget": 1, "max_tokens": 2}, "budget is given with min_tokens or max_tokens"),
        ({"ladder": (1,), "budget": 2}, "count is 2, expected at most the largest bucket, 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            policy.prune(params, CONFIG, IMAGE, TEXT, **options)
    with pytest.raises(ValueError, match=r"image is .* non-finite"):
        policy.prune(params, CONFIG, IMAGE * jnp.nan, TEXT)
    with pytest.raises(ValueError, match=r"text is .* 1 non-finite"):
        policy.prune(params, CONFIG, IMAGE, TEXT.at[0, 0, 0].set(jnp.inf))
    with pytest.raises(ValueError, match="stop_bias is nan"):
        policy.prune(params, CONFIG, IMAGE, TEXT, stop_bias=math.nan)


def test_an_image_has_at_most_as_many_steps_as_tokens(params, slots):
    assert policy.select(params, CONFIG, slots, max_steps=9).action.shape == (2, 5)
    assert policy.prune(params, CONFIG, IMAGE, TEXT, max_steps=9, budget=5).count.tolist() == [5, 5]
    long = dataclasses.replace(CONFIG, max_steps=9)
    assert (long.steps(5), long.steps(20)) == (5, 9)
    gated = jax.eval_shape(
        lambda p: policy.gate(p, long, jax.random.key(0), IMAGE, TEXT, max_steps=7), params
    )
    assert gated.trajectory.action.shape == (2, 5)


def test_prune_says_what_to_jit_in_its_place(params):
    with pytest.raises(TypeError, match=r"jit choose\(params, .*gather\(picks, ") as refusal:
        jax.jit(policy.prune)(params, CONFIG, IMAGE, TEXT)
    assert "\n" not in str(refusal.value)
    picks = jax.jit(policy.choose)(params, CONFIG, IMAGE, TEXT)
    pruned = policy.prune(params, CONFIG, IMAGE, TEXT)
    assert picks.count.tolist() == pruned.count.tolist()


def test_weights_of_another_kind_are_refused_by_name(params):
    with pytest.raises(ValueError, match=r"params\['encoder'\] is missing, expected a dict with"):
        policy.prune({}, CONFIG, IMAGE, TEXT)
    wide = dataclasses.replace(CONFIG, width=12)
    name = r"params\['encoder'\]\['block_0'\]\['norm1'\]\['scale'\]"
    with pytest.raises(ValueError, match=name + r" is of shape \(8,\) .*, expected float\[12\]"):
        policy.prune(params, wide, IMAGE, TEXT)
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(lambda p: policy.encode(p, wide, IMAGE, TEXT), params)
    few = {name: part for name, part in params.items() if name != "denoiser"}
    with pytest.raises(ValueError, match=r"params\['denoiser'\] is missing"):
        policy.gate(few, CONFIG, jax.random.key(0), IMAGE, TEXT)
    broken = jax.tree.map(lambda x: x, params)
    broken["stop"] = broken["stop"].at[1].set(jnp.nan)
    with pytest.raises(ValueError, match=r"params\['stop'\] is of shape \(8,\) with 1 non-finite"):
        policy.prune(broken, CONFIG, IMAGE, TEXT)
    stats = policy.FeatureStats.start(8)
    stats = stats._replace(mean=stats.mean.at[0].set(jnp.inf))
    with pytest.raises(ValueError, match=r"stats.mean is of shape"):
        policy.prune(params, CONFIG, IMAGE, TEXT, stats=stats)


def test_arguments_of_a_wrong_type_are_named():
    """In a process of its own: here, annotations are enforced before anything is called."""
    place = {"PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, SCRIPT]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "named\n"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", "hard", r"stop is 'hard', expected one of \('aligned', 'softmax', 'hazard'\)"),
        ("num_heads", 3, "num_heads is 3, expected a divisor of the policy width 8"),
        ("temperature", 0.0, "temperature is 0.0, expected a positive number"),
        ("decay", 1.5, "decay is 1.5"),
        ("max_steps", 0, "max_steps is 0"),
        ("encoder_layers", 10**9, "encoder_layers is 1000000000, expected an integer from 1 to 10"),
        ("min_tokens", -1, "min_tokens is -1"),
        ("stop_bias", math.nan, "stop_bias is nan, expected a finite number"),
        ("stop_bias", 1e300, r"stop_bias is 1e\+300, expected a finite number"),
        ("temperature", math.inf, "temperature is inf, expected a positive number"),
        ("temperature", 1e-320, "temperature is 1e-320, expected a positive number"),
        pytest.param("temperature", 10**400, "temperature is 1000", id="huge"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})
