"""The order of rows: each once an epoch, by seed alone, grouped by length where asked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.data.order import Order


def drawn(order, steps):
    return np.concatenate([order.indices(step) for step in range(steps)])


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), size=st.integers(1, 9), group=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_every_epoch_has_each_row_once(rows, size, group, seed):
    bucket = np.random.default_rng(seed).integers(0, 3, rows, np.int32)
    order = Order(bucket, size, seed, group)
    epochs = drawn(order, -(-3 * rows // size))[: 3 * rows].reshape(3, rows)
    assert (np.sort(epochs) == np.arange(rows)).all()
    # Asked out of turn, by an object that has made nothing before.
    assert Order(bucket, size, seed, group).indices(2).tolist() == order.indices(2).tolist()


@pytest.mark.parametrize("group", [1, 4])
def test_epochs_and_seeds_differ(group):
    bucket = np.zeros(64, np.int32)
    first, second = drawn(Order(bucket, 8, 0, group), 16).reshape(2, 64)
    assert first.tolist() != second.tolist()
    assert first.tolist() != drawn(Order(bucket, 8, 1, group), 8).tolist()


def test_grouped_batches_are_of_one_bucket_but_at_the_borders():
    buckets, size, group = 4, 8, 16
    bucket = np.random.default_rng(0).integers(0, buckets, 1000, np.int32)

    def mixed(order, epoch_steps):
        return sum(len(set(bucket[order.indices(step)])) > 1 for step in epoch_steps)

    # 1,000 rows are 125 batches: 7 groups of 16 and one of 13, with 3 borders between buckets each.
    assert mixed(Order(bucket, size, 0, group), range(125)) <= 8 * (buckets - 1)
    assert mixed(Order(bucket, size, 0, 1), range(125)) > 120
    # Short and long batches come in any order.
    first = [bucket[Order(bucket, size, 0, group).indices(step)].max() for step in range(16)]
    assert first != sorted(first)
