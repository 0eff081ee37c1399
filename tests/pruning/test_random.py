import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.pruning import Random, View
from stepprune_jax.pruning.random import _high_word, random_scores

N = 9


def view(number, sizes=None):
    r = len(number)
    valid = None if sizes is None else jnp.arange(N) < jnp.asarray(sizes)[:, None]
    return View(
        jnp.zeros((r, N, 4)),
        valid,
        jnp.full((r, 2), 3),
        jnp.zeros((r, 1, 2)),
        jnp.zeros((r, 1), bool),
        jnp.asarray(number, jnp.int32),
        jnp.full(r, 3),
    )


def order(seed, number, sizes=None):
    return np.asarray(Random(seed=seed).rank((), view(number, sizes), N).order)


@pytest.mark.parametrize("seed", [0, 7])
def test_row_i_of_a_set_is_row_i_of_a_draw_of_the_whole_set(seed):
    whole = np.argsort(jax.random.uniform(jax.random.key(seed), (50, N)), axis=1)
    np.testing.assert_array_equal(order(seed, np.arange(50)), whole)
    # Whatever else is in the batch, and in whatever order.
    np.testing.assert_array_equal(order(seed, [31, 2, 31]), whole[[31, 2, 31]])


def test_smaller_images_draw_as_sets_of_their_own_size():
    whole = np.argsort(jax.random.uniform(jax.random.key(0), (50, 6)), axis=1)
    mixed = order(0, [4, 40, 11], [6, N, 6])
    np.testing.assert_array_equal(mixed[[0, 2], :6], whole[[4, 11]])
    np.testing.assert_array_equal(mixed[[0, 2], 6:], [[6, 7, 8]] * 2)
    np.testing.assert_array_equal(mixed[1], order(0, [40])[0])


def test_orders_are_uniform_permutations():
    orders = order(1, np.arange(9000))
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(N), (9000, 1)))
    assert abs(np.bincount(orders[:, 0], minlength=N) - 1000).max() < 150
    assert (order(1, np.arange(50)) != order(2, np.arange(50))).any()


def test_counters_of_large_sets_do_not_wrap():
    number = jnp.asarray([2**31 - 1, 2**24 + 3, 65_537, 1], jnp.uint32)
    size = jnp.asarray([65_535, 40_000, 65_535, 9], jnp.uint32)
    exact = [int(a) * int(b) >> 32 for a, b in zip(number, size, strict=True)]
    assert exact[0] > 2**14 and _high_word(number, size).tolist() == exact
    # Two rows whose counters agree in their lower word.
    rows = jnp.asarray([0, 2**27], jnp.int32)
    first, second = random_scores(jax.random.key(0), rows, jnp.asarray([32, 32]), 32)
    assert (first != second).all()
