"""The order of training rows, a pure function of seed and step."""

import functools

import numpy as np
from jaxtyping import Int


class Order:
    """Rows of each batch.

    Every epoch is another permutation; a batch may end one and begin the next. The rows of `group`
    batches at a time are sorted by bucket, so that nearly all batches have a single bucket, and
    then the batches of the epoch are shuffled. The order does not depend on hosts or devices.
    """

    def __init__(self, bucket: Int[np.ndarray, " r"], batch_size: int, seed: int, group: int = 1):
        """Prepares the order."""
        self._bucket, self._size, self._seed, self._group = bucket, batch_size, seed, group
        self._epoch = functools.lru_cache(2)(self.epoch)

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Returns the rows of batch `step`."""
        number = np.arange(step * self._size, (step + 1) * self._size)
        epoch, at = np.divmod(number, len(self._bucket))
        orders = {e: self._epoch(e) for e in set(epoch.tolist())}
        return np.array([orders[e][i] for e, i in zip(epoch, at, strict=True)])

    def epoch(self, epoch: int) -> Int[np.ndarray, " r"]:
        """Returns all rows once, in the order of an epoch counted from 0."""
        random = np.random.default_rng((self._seed, epoch))
        rows = random.permutation(len(self._bucket))
        if self._group == 1:
            return rows
        # The first ones complete the last batch of the epoch before.
        head = min(-epoch * len(rows) % self._size, len(rows))
        whole = (len(rows) - head) // self._size * self._size
        batches = []
        for start in range(head, head + whole, self._group * self._size):
            part = rows[start : min(start + self._group * self._size, head + whole)]
            part = part[np.argsort(self._bucket[part], kind="stable")]
            batches.append(part.reshape(-1, self._size))
        batches = np.concatenate(batches) if batches else np.zeros((0, self._size), rows.dtype)
        shuffled = random.permutation(batches).reshape(-1)
        return np.concatenate([rows[:head], shuffled, rows[head + whole :]])
