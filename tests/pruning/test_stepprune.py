"""StepPrune's options and weights on their way to the policy."""

import jax
import jax.numpy as jnp
import numpy as np
from small_world import stepprune

from stepprune_jax.policy.params import param_paths
from stepprune_jax.pruning import View, make_method

N, STEPS = 9, 7


def view(count):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    text_valid = jnp.ones((2, 3), bool)
    return View(
        tokens=draw(2, N, 32),
        valid=None,
        grid=jnp.full((2, 2), 3),
        text=draw(2, 3, 48),
        text_valid=text_valid,
        number=jnp.arange(2),
        count=jnp.full(2, count),
    )


def test_the_group_reaches_order_and_choice():
    learned = stepprune(max_steps=STEPS)

    def order(options):
        method = make_method("stepprune", 5, policy=learned, options=options)

        @jax.jit
        def run(params, seen):
            ranking = method.pruner.rank(params, seen, STEPS)
            return ranking.order, method.pruner.select(params, seen, 5).index

        order, kept = run(method.params, view(5))
        np.testing.assert_array_equal(np.sort(order[:, :5], axis=1), kept)
        return np.asarray(order)

    one, three = order({}), order({"group": "3"})
    np.testing.assert_array_equal(one, order({"group": 1}))
    assert (one[:, 0] == three[:, 0]).all() and (one != three).any()


def test_weights_of_a_narrow_policy_are_cast_when_the_method_is_made():
    kernel = "decoder/pointer/query/kernel"
    for dtype, expected in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        learned = stepprune(dtype=dtype)
        weights = make_method(policy=learned).params.weights
        leaves = zip(param_paths(weights), jax.tree.leaves(weights), strict=True)
        assert {path: leaf.dtype for path, leaf in leaves}[kernel] == expected
        assert learned.params["decoder"]["pointer"]["query"]["kernel"].dtype == jnp.float32
