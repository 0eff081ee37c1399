"""The order of training rows, a pure function of seed and step."""

import functools

import numpy as np
from jaxtyping import Int


class Order:
    """Chooses the rows of each training batch.

    Every epoch is a new permutation of all rows. A batch may contain the end of one epoch and the
    start of the next. The order does not depend on hosts or devices.

    With `group` above 1, the rows of `group` consecutive batches are sorted by length bucket, and
    then the batches of the epoch are shuffled. Nearly every batch has rows of one bucket, and thus
    little padding.
    """

    def __init__(self, bucket: Int[np.ndarray, " r"], batch_size: int, seed: int, group: int = 1):
        """Stores the arguments.

        Args:
            bucket: [r] index of the length bucket of each row.
            batch_size: number of rows of a batch, over all hosts.
            seed: seed of the permutations.
            group: number of batches whose rows are sorted together; 1 sorts nothing.
        """
        self._bucket, self._batch_size, self._seed, self._group = bucket, batch_size, seed, group
        self._cached_epoch = functools.lru_cache(2)(self.epoch)

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Returns the indices [b] of the rows in the batch of a training step, counted from 0."""
        # All epochs, one after another, form an endless list of rows. A batch is a slice of this
        # list. It may begin in one epoch and end in a later epoch.
        positions = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        epochs, offsets = np.divmod(positions, len(self._bucket))
        epoch_rows = {epoch: self._cached_epoch(epoch) for epoch in set(epochs.tolist())}
        pairs = zip(epochs, offsets, strict=True)
        return np.array([epoch_rows[epoch][offset] for epoch, offset in pairs])

    def epoch(self, epoch: int) -> Int[np.ndarray, " r"]:
        """Returns the indices [r] of all rows in the order of an epoch, counted from 0."""
        rng = np.random.default_rng((self._seed, epoch))
        rows = rng.permutation(len(self._bucket))
        if self._group == 1:
            return rows
        # Only complete batches inside the epoch are sorted. The rows before `start` complete the
        # last batch of the previous epoch. The rows from `stop` begin a batch of the next epoch.
        start = min(-epoch * len(rows) % self._batch_size, len(rows))
        num_batches = (len(rows) - start) // self._batch_size
        stop = start + num_batches * self._batch_size
        rows_per_group = self._group * self._batch_size
        batches = [np.zeros((0, self._batch_size), rows.dtype)]
        for group_start in range(start, stop, rows_per_group):
            group_rows = rows[group_start : min(group_start + rows_per_group, stop)]
            sorted_rows = group_rows[np.argsort(self._bucket[group_rows], kind="stable")]
            batches.append(sorted_rows.reshape(-1, self._batch_size))
        shuffled_rows = rng.permutation(np.concatenate(batches)).reshape(-1)
        return np.concatenate([rows[:start], shuffled_rows, rows[stop:]])
