import numpy as np
import pytest
from views import view

from stepprune_jax.pruning import Random

N = 9


def order(seed, rows, valid=None, n=N):
    padded = {} if valid is None else {"valid": valid}
    inputs = view(np.zeros((len(rows), n, 4)), count=3, seed=np.uint32(rows), **padded)
    return np.asarray(Random(seed=seed).rank(inputs, n).order)


def test_what_a_row_shows_is_drawn_alike_wherever_it_stands():
    actual = order(7, range(50))
    np.testing.assert_array_equal(np.sort(actual, axis=1), [np.arange(N)] * 50)
    np.testing.assert_array_equal(order(7, [31, 2, 31]), actual[[31, 2, 31]])
    assert len({*map(tuple, actual)}) == 50
    assert (order(8, range(50)) != actual).any(axis=1).all()


def test_smaller_images_draw_as_they_do_without_padding():
    mixed = order(0, [4, 2**32 - 1, 11], np.arange(N) < np.array([6, N, 6])[:, None])
    np.testing.assert_array_equal(mixed[[0, 2], :6], order(0, [4, 11], n=6))
    np.testing.assert_array_equal(mixed[[0, 2], 6:], [[6, 7, 8]] * 2)
    np.testing.assert_array_equal(mixed[1], order(0, [2**32 - 1])[0])


@pytest.mark.parametrize("count", [1, 3])
def test_every_token_is_kept_as_often(count):
    kept = order(3, range(9_000))[:, :count]
    expected = 1_000 * count
    chi = ((np.bincount(kept.ravel(), minlength=N) - expected) ** 2 / expected).sum()
    assert chi < 31.8  # 8 degrees of freedom: once in ten thousand
