"""StepPrune passes its options and weights to the policy."""

import jax
import jax.numpy as jnp
import numpy as np
from small_world import stepprune
from views import view

from stepprune_jax.policy.params import param_paths
from stepprune_jax.registry import build_pruner

STEPS = 7


def test_the_group_changes_order_and_choice():
    policy, random = stepprune(max_steps=STEPS), np.random.default_rng(0)
    tokens, text = (random.normal(size=(2, n, d)).astype(np.float32) for n, d in ((9, 32), (3, 48)))
    inputs = view(tokens, count=5, text=text, text_valid=np.ones((2, 3), bool))

    def order(options):
        pruner = build_pruner("stepprune", 5, policy=policy, options=options)

        @jax.jit
        def run(pruner, inputs):
            return pruner.rank(inputs, STEPS).order, pruner.keep(inputs, 5).index

        order, kept = run(pruner.program(), inputs)
        np.testing.assert_array_equal(np.sort(order[:, :5], axis=1), kept)
        return np.asarray(order)

    order_of_1, order_of_3 = order({}), order({"group": "3"})
    assert (order_of_1[:, 0] == order_of_3[:, 0]).all() and (order_of_1 != order_of_3).any()


def test_prepare_casts_weights_to_the_compute_dtype():
    kernel = "decoder/pointer/query/kernel"
    for dtype, expected in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        policy = stepprune(dtype=dtype)
        weights = policy.prepare().params
        leaves = zip(param_paths(weights), jax.tree.leaves(weights), strict=True)
        assert {path: leaf.dtype for path, leaf in leaves}[kernel] == expected
        assert policy.params["decoder"]["pointer"]["query"]["kernel"].dtype == jnp.float32
