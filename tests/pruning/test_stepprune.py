"""StepPrune's options and weights on their way to the policy."""

import jax
import jax.numpy as jnp
import numpy as np
from small_world import stepprune
from views import view

from stepprune_jax.policy.params import param_paths
from stepprune_jax.pruning import make_method

STEPS = 7


def test_the_group_reaches_order_and_choice():
    learned, random = stepprune(max_steps=STEPS), np.random.default_rng(0)
    tokens, text = (random.normal(size=(2, n, d)).astype(np.float32) for n, d in ((9, 32), (3, 48)))
    seen = view(tokens, count=5, text=text, text_valid=np.ones((2, 3), bool))

    def order(options):
        method = make_method("stepprune", 5, policy=learned, options=options)

        @jax.jit
        def run(params, seen):
            ranking = method.pruner.rank(params, seen, STEPS)
            return ranking.order, method.pruner.select(params, seen, 5).index

        order, kept = run(method.params, seen)
        np.testing.assert_array_equal(np.sort(order[:, :5], axis=1), kept)
        return np.asarray(order)

    one, three = order({}), order({"group": "3"})
    assert (one[:, 0] == three[:, 0]).all() and (one != three).any()


def test_weights_of_a_narrow_policy_are_cast_when_the_method_is_made():
    kernel = "decoder/pointer/query/kernel"
    for dtype, expected in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        learned = stepprune(dtype=dtype)
        weights = make_method(policy=learned).params.weights
        leaves = zip(param_paths(weights), jax.tree.leaves(weights), strict=True)
        assert {path: leaf.dtype for path, leaf in leaves}[kernel] == expected
        assert learned.params["decoder"]["pointer"]["query"]["kernel"].dtype == jnp.float32
