import jax
import jax.numpy as jnp
import numpy as np
import pytest
from views import llava, view

from stepprune_jax.models import vlm
from stepprune_jax.pruning import Cls


def order(attention, n):
    """The order of n features [r, n] by attention [r, heads, m]."""
    shown = view(jnp.zeros((len(attention), n, 2)), jnp.array(attention), count=2)
    return Cls().rank((), shown, n).order.tolist()


def test_an_order_worked_by_hand():
    attention = [[[0.4, 0.3, 0.2, 0.1], [0.45, 0.0, 0.25, 0.3]]]
    # Means 0.15, 0.225, 0.2 over the heads: the class token itself does not count.
    assert order(attention, 3) == [[1, 2, 0]]
    # Where the class token is one of the features it is kept first.
    assert order(attention, 4) == [[0, 2, 3, 1]]
    # Ties go to the earlier patch.
    ties = [[[0.1, 0.2, 0.3, 0.2, 0.3]], [[0.2] * 5]]
    assert order(ties, 4) == [[1, 3, 0, 2], [0, 1, 2, 3]]


@pytest.fixture(scope="module")
def params():
    shapes = vlm.abstract_params(llava(2), jnp.float32)
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.2 * random.standard_normal(x.shape, np.float32)), shapes
    )


@pytest.mark.parametrize("layer", [-2, 1, 3])
def test_the_tap_is_the_block_before_the_projected_state(params, layer):
    config = llava(2, feature_layer=layer)
    (tap,) = Cls().taps(config)
    assert tap.layer == layer % 4 - 1
    pixels = jax.random.normal(jax.random.key(1), (2, 3, 24, 24))

    @jax.jit
    def attention(factor):
        """With the queries of every block times a factor."""
        query = params["vision"]["layers"]["attention"]["query"]
        kernel = query["kernel"] * factor[:, None, None]
        layers = params["vision"]["layers"]
        layers = layers | {"attention": layers["attention"] | {"query": query | {"kernel": kernel}}}
        changed = params | {"vision": params["vision"] | {"layers": layers}}
        return next(iter(config.family.encode_image(changed, config, pixels, [tap])[1].values()))

    before = attention(jnp.ones(3))
    assert before.shape == (2, 4, 10)
    for block in range(3):  # this block's queries and earlier ones matter, later ones do not
        after = attention(jnp.ones(3).at[block].set(3.0))
        assert bool(jnp.abs(after - before).max() > 1e-6) == (block <= tap.layer), block
