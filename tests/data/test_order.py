"""The order of training rows: complete epochs, dependence on the seed, grouping by length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.data.order import Order


def rows_of_steps(order, steps):
    return np.concatenate([order.indices(step) for step in range(steps)])


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), size=st.integers(1, 9), group=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_every_epoch_has_each_row_once(rows, size, group, seed):
    bucket = np.random.default_rng(seed).integers(0, 3, rows, np.int32)
    order = Order(bucket, size, seed, group)
    epochs = rows_of_steps(order, -(-3 * rows // size))[: 3 * rows].reshape(3, rows)
    assert (np.sort(epochs) == np.arange(rows)).all()
    # A new object gives an equal batch without computing earlier batches.
    assert Order(bucket, size, seed, group).indices(2).tolist() == order.indices(2).tolist()


@pytest.mark.parametrize("group", [1, 4])
def test_epochs_and_seeds_differ(group):
    bucket = np.zeros(64, np.int32)
    first, second = rows_of_steps(Order(bucket, 8, 0, group), 16).reshape(2, 64)
    assert first.tolist() != second.tolist()
    assert first.tolist() != rows_of_steps(Order(bucket, 8, 1, group), 8).tolist()


def test_nearly_all_grouped_batches_have_one_bucket():
    num_buckets, size, group = 4, 8, 16
    bucket = np.random.default_rng(0).integers(0, num_buckets, 1000, np.int32)

    def count_mixed(order, steps):
        return sum(len(set(bucket[order.indices(step)])) > 1 for step in steps)

    # 1,000 rows are 125 batches: 7 groups of 16 and one of 13, with 3 borders between buckets each.
    assert count_mixed(Order(bucket, size, 0, group), range(125)) <= 8 * (num_buckets - 1)
    assert count_mixed(Order(bucket, size, 0, 1), range(125)) > 120
    # Batches are shuffled, so their lengths are not sorted.
    order = Order(bucket, size, 0, group)
    max_buckets = [bucket[order.indices(step)].max() for step in range(16)]
    assert max_buckets != sorted(max_buckets)
