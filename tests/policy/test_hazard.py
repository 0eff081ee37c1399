"""The hazard: a separate decoder layer learns the stop without disturbing the order."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.policy import POINTER
from stepprune_jax.policy.params import param_paths

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def case(rng):
    config = cases.small_config(width=8, stop="hazard", decoder_layers=2)
    x = dict(params=cases.random_weights(rng, config), memory=rng.normal(size=(2, 6, 8)))
    return config, x


def with_slot(weights_and_memory):
    """Returns the memory with the stop slot that `memory` would append."""
    slots = jnp.asarray(weights_and_memory["memory"])
    return slots.at[:, -1].set(
        jnp.broadcast_to(weights_and_memory["params"]["stop"], slots[:, -1].shape)
    )


def reached(grads):
    """Returns the paths of weights with a gradient."""
    leaves = zip(param_paths(grads), jax.tree.leaves(grads), strict=True)
    return {path for path, leaf in leaves if np.any(np.abs(leaf) > 1e-12)}


def test_the_margin_has_gradients_only_to_the_stop(case, rng):
    config, x = case
    weights = rng.normal(size=(2, 4))

    def margins(x):
        trajectory = cases.select_parallel(
            x["params"], config, with_slot(x), max_steps=4, min_tokens=0
        )
        return jnp.sum(weights * trajectory.margin)

    grads = jax.jit(jax.grad(margins))(x)
    np.testing.assert_array_equal(grads["memory"], 0)
    paths = reached(grads["params"])
    assert paths == {p for p in param_paths(x["params"]) if "hazard" in p} | {"stop"}

    def of_hazard(hazard):
        params = x["params"] | {"decoder": x["params"]["decoder"] | {"hazard": hazard}}
        return margins(x | {"params": params})

    cases.assert_finite_differences(of_hazard, x["params"]["decoder"]["hazard"], rng)


def test_the_order_has_no_gradient_to_the_stop(case, rng):
    config, x = case
    weights = rng.normal(size=(2, 4, 5))

    def order(x):
        # With an exact budget, no stop probability enters the log-probabilities.
        trajectory = cases.select_parallel(x["params"], config, with_slot(x), max_steps=4, budget=4)
        return jnp.sum(jnp.where(trajectory.prob > 0, weights * trajectory.log_prob, 0))

    paths = reached(jax.jit(jax.grad(order))(x)["params"])
    assert not any("hazard" in path for path in paths)
    assert {"decoder/start", "decoder/pointer/query/kernel"} <= paths


def test_the_clock_reveals_the_number_of_chosen_tokens(case):
    """Attention over equal queries does not depend on the length of the history."""
    config, x = case
    real = jnp.ones((2, 6), bool)
    queries = jnp.broadcast_to(x["memory"][:, :1], (2, 4, 8))

    @jax.jit
    def stops(clock):
        hazard = x["params"]["decoder"]["hazard"] | {"clock": clock}
        params = x["params"] | {"decoder": x["params"]["decoder"] | {"hazard": hazard}}
        _, context, cache = POINTER.init(params, config, with_slot(x), real, 4)
        return POINTER.sequence(params, config, context, queries, cache)[..., -1]

    np.testing.assert_allclose(np.ptp(stops(jnp.zeros(8)), axis=1), 0, atol=1e-12)
    assert np.all(np.abs(np.diff(stops(jnp.linspace(-1, 1, 8)), axis=1)) > 1e-3)
