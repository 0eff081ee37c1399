"""StepPrune's options and weights on their way to the policy."""

import jax
import jax.numpy as jnp
import numpy as np
from small_world import stepprune
from views import view

from stepprune_jax.policy.params import param_paths
from stepprune_jax.registry import build_pruner

STEPS = 7


def test_the_group_reaches_order_and_choice():
    learned, random = stepprune(max_steps=STEPS), np.random.default_rng(0)
    tokens, text = (random.normal(size=(2, n, d)).astype(np.float32) for n, d in ((9, 32), (3, 48)))
    seen = view(tokens, count=5, text=text, text_valid=np.ones((2, 3), bool))

    def order(options):
        pruner = build_pruner("stepprune", 5, policy=learned, options=options)

        @jax.jit
        def run(pruner, seen):
            return pruner.rank(seen, STEPS).order, pruner.keep(seen, 5).index

        order, kept = run(pruner.program(), seen)
        np.testing.assert_array_equal(np.sort(order[:, :5], axis=1), kept)
        return np.asarray(order)

    one, three = order({}), order({"group": "3"})
    assert (one[:, 0] == three[:, 0]).all() and (one != three).any()


def test_weights_of_a_narrow_policy_are_cast_once_for_many_calls():
    kernel = "decoder/pointer/query/kernel"
    for dtype, expected in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        learned = stepprune(dtype=dtype)
        weights = learned.prepare().params
        leaves = zip(param_paths(weights), jax.tree.leaves(weights), strict=True)
        assert {path: leaf.dtype for path, leaf in leaves}[kernel] == expected
        assert learned.params["decoder"]["pointer"]["query"]["kernel"].dtype == jnp.float32
