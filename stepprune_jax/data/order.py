"""The order of training rows, a pure function of seed and step."""

import functools

import numpy as np
from jaxtyping import Int


class Order:
    """Chooses the rows of each training batch.

    Every epoch is a new permutation of all rows. A batch may contain the end of one epoch and the
    start of the next. With `group` above 1, the rows of `group` consecutive batches are sorted by
    length bucket, so nearly every batch has rows of one bucket, and then the batches of the epoch
    are shuffled. The order does not depend on hosts or devices.
    """

    def __init__(self, bucket: Int[np.ndarray, " r"], batch_size: int, seed: int, group: int = 1):
        """Stores the arguments.

        Args:
            bucket: [r] number of the length bucket of each row.
            batch_size: rows of a batch on all hosts together.
            seed: seed of the permutations.
            group: batches whose rows are sorted together; 1 sorts nothing.
        """
        self._bucket, self._size, self._seed, self._group = bucket, batch_size, seed, group
        self._cached_epoch = functools.lru_cache(2)(self.epoch)

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Returns the rows of the batch of a step, counted from 0."""
        positions = np.arange(step * self._size, (step + 1) * self._size)
        epochs, offsets = np.divmod(positions, len(self._bucket))
        orders = {epoch: self._cached_epoch(epoch) for epoch in set(epochs.tolist())}
        pairs = zip(epochs, offsets, strict=True)
        return np.array([orders[epoch][offset] for epoch, offset in pairs])

    def epoch(self, epoch: int) -> Int[np.ndarray, " r"]:
        """Returns all rows in the order of an epoch, counted from 0."""
        random = np.random.default_rng((self._seed, epoch))
        rows = random.permutation(len(self._bucket))
        if self._group == 1:
            return rows
        # The first `start` rows complete the last batch of the previous epoch. The rows after
        # `stop` begin a batch that the next epoch completes.
        start = min(-epoch * len(rows) % self._size, len(rows))
        stop = start + (len(rows) - start) // self._size * self._size
        group_rows = self._group * self._size
        batches = [np.zeros((0, self._size), rows.dtype)]
        for first in range(start, stop, group_rows):
            part = rows[first : min(first + group_rows, stop)]
            part = part[np.argsort(self._bucket[part], kind="stable")]
            batches.append(part.reshape(-1, self._size))
        shuffled = random.permutation(np.concatenate(batches)).reshape(-1)
        return np.concatenate([rows[:start], shuffled, rows[stop:]])
