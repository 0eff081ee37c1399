import jax.numpy as jnp
import pytest
from views import llava, view

from stepprune_jax.models.attention import Tap
from stepprune_jax.pruning import Cls


def order(attention, n):
    """The order of n features [r, n] by attention [r, heads, m]."""
    inputs = view(jnp.zeros((len(attention), n, 2)), jnp.array(attention), count=2)
    return Cls().rank(inputs, n).order.tolist()


def test_an_order_worked_by_hand():
    attention = [[[0.4, 0.3, 0.2, 0.1], [0.45, 0.0, 0.25, 0.3]]]
    # Means 0.15, 0.225, 0.2 over the heads: the class token itself does not count.
    assert order(attention, 3) == [[1, 2, 0]]
    # Ties go to the earlier patch.
    ties = [[[0.1, 0.2, 0.3, 0.2, 0.3]], [[0.2] * 5]]
    assert order(ties, 4) == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_tiles_take_turns():
    """Two tiles, of which the first has fewer patches; the end of a row is last, padding behind."""
    attention = [[[0.0, 0.1, 0.9, 0.2, 0.0, 0.5, 0.7, 0.8]]]
    tile = jnp.array([[0, 0, 1, -1, 1, 1, -1]])
    valid = jnp.array([[True] * 6 + [False]])
    inputs = view(jnp.zeros((1, 7, 2)), jnp.array(attention), tile, count=2, valid=valid)
    assert Cls().rank(inputs, 7).order.tolist() == [[1, 5, 0, 4, 2, 3, 6]]


@pytest.mark.parametrize(("feature_layer", "block"), [(-2, 1), (1, 0), (3, 2)])
def test_the_tap_is_the_block_before_the_projected_state(feature_layer, block):
    (tap,) = Cls().taps(llava(2, feature_layer=feature_layer))
    assert tap == Tap("attention", block)
