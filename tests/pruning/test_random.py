import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from views import view

from stepprune_jax.pruning import Random
from stepprune_jax.pruning.random import random_scores

N = 9


def order(seed, number, sizes=None):
    valid = {} if sizes is None else {"valid": np.arange(N) < np.array(sizes)[:, None]}
    shown = view(np.zeros((len(number), N, 4)), count=3, number=np.int32(number), **valid)
    return np.asarray(Random(seed=seed).rank((), shown, N).order)


def test_row_i_of_a_set_is_row_i_of_a_draw_of_the_whole_set():
    whole = np.argsort(jax.random.uniform(jax.random.key(7), (50, N)), axis=1)
    np.testing.assert_array_equal(order(7, np.arange(50)), whole)
    # Whatever else is in the batch, and in whatever order.
    np.testing.assert_array_equal(order(7, [31, 2, 31]), whole[[31, 2, 31]])


def test_smaller_images_draw_as_sets_of_their_own_size():
    whole = np.argsort(jax.random.uniform(jax.random.key(0), (50, 6)), axis=1)
    mixed = order(0, [4, 40, 11], [6, N, 6])
    np.testing.assert_array_equal(mixed[[0, 2], :6], whole[[4, 11]])
    np.testing.assert_array_equal(mixed[[0, 2], 6:], [[6, 7, 8]] * 2)
    np.testing.assert_array_equal(mixed[1], order(0, [40])[0])


@pytest.mark.parametrize("number", [2**31 - 1, 65_537])
def test_counters_of_large_sets_do_not_wrap(number):
    """Row i of images of n tokens draws at the counters from i n on, in two words of 32 bits.

    The lower word wraps between rows, and with 65,537 also within one.
    """
    size, key = 65_535, jax.random.key(3, impl="threefry2x32")
    counters = [number * size + place for place in range(size)]
    words = [np.array([x >> 32 for x in counters], np.uint32)]
    words.append(np.array([x & 0xFFFFFFFF for x in counters], np.uint32))
    first, second = (jnp.full(size, word) for word in jax.random.key_data(key))
    left, right = threefry2x32_p.bind(first, second, *words)
    found = random_scores(key, jnp.asarray([number]), jnp.asarray([size]), size)
    np.testing.assert_array_equal(found[0], ((left ^ right) >> 9) / 2**23)
