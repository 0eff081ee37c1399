"""Calls the policy with arguments of wrong types; prints "named" if each error names its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax import policy
from stepprune_jax.data.images import open_image
from stepprune_jax.pruning import Policy, make_method

CONFIG = policy.PolicyConfig(feature_width=8, text_width=6, num_heads=2)
IMAGE, TEXT = jnp.ones((2, 5, 8)), jnp.ones((2, 3, 6))


def refused(said, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (TypeError, ValueError) as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def main():
    params = policy.init_policy(jax.random.key(0), CONFIG)
    slots = jnp.ones((2, 6, 8))
    refused("prune: image is of type list", policy.prune, params, CONFIG, IMAGE.tolist(), TEXT)
    refused("prune: image is of type NoneType", policy.prune, params, CONFIG, None, TEXT)
    refused("prune: text is of type str", policy.prune, params, CONFIG, IMAGE, "red")
    refused("params['encoder'] is missing", policy.prune, None, CONFIG, IMAGE, TEXT)
    for options, said in (
        ({"max_steps": "3"}, "max_steps (T_max) is '3', expected an integer from 1"),
        ({"max_steps": 2.0}, "max_steps (T_max) is 2.0"),
        ({"group": "2"}, "group is '2', expected an integer from 1"),
        ({"stop_bias": "1"}, "stop_bias is '1', expected a number or float[2]"),
        ({"stop_bias": [0.0, math.nan]}, "stop_bias is of shape (2,) with 1 non-finite values"),
        ({"stop_bias": 1e300}, "stop_bias is 1e+300, expected finite values of float32"),
        ({"stop_bias": 10**400}, "stop_bias is of shape () and dtype object"),
        ({"stop_bias": None}, "stop_bias is None, expected a number or float[2]"),
        ({"budget": "2"}, "budget is of shape () and dtype <U1, expected an integer or int[2]"),
    ):
        refused(said, policy.prune, params, CONFIG, IMAGE, TEXT, **options)
        refused(said, policy.select, params, CONFIG, slots, **options)
    refused("prune: config is None, expected a PolicyConf", policy.prune, params, None, IMAGE, TEXT)
    refused("select: config is {}, expected a PolicyConf", policy.select, params, {}, slots)
    refused("image is of shape (0, 5, 8)", policy.prune, params, CONFIG, IMAGE[:0], TEXT[:0])
    refused("memory is of shape (0, 6, 8)", policy.select, params, CONFIG, slots[:0])
    for ladder in ((), (0,), "x", 5, (2.0,)):
        said = f"ladder is {ladder!r}, expected integers from 1"
        refused(said, policy.prune, params, CONFIG, IMAGE, TEXT, ladder=ladder)
    refused("order is None", policy.prune, params, CONFIG, IMAGE, TEXT, order=None)
    whole = params | {"stop": jnp.ones(8, int)}
    said = "params['stop'] is of shape (8,) and dtype int32, expected float[8]"
    refused(said, policy.prune, whole, CONFIG, IMAGE, TEXT)
    for field, value, expected in (
        ("feature_width", 16.5, "an integer from 1"),
        ("feature_width", "16", "an integer from 1"),
        ("encoder_layers", True, "an integer from 1"),
        ("max_steps", 2.5, "None or an integer from 1"),
        ("decay", "x", "a number in (0, 1]"),
        ("dtype", "banana", "one of "),
        ("stop", ["hazard"], "one of "),
    ):
        said = f"PolicyConfig.{field} is {value!r}, expected {expected}"
        refused(said, dataclasses.replace, CONFIG, **{field: value})
    select = Policy(params, CONFIG, None).select_fn(capacity=2, budget=2)
    for call in (select, jax.jit(select)):
        refused("policy is of type ", call, IMAGE, TEXT)
        refused("is called as select(policy, image, text)", call, params, IMAGE, TEXT)
    refused("policy is 'shapes', expected a Policy", make_method, policy="shapes")
    refused("expected a path or a Pillow image, got ndarray", open_image, np.ones((2, 2, 3)))
    print("named")


if __name__ == "__main__":
    main()
