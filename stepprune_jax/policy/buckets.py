"""Sizes that shapes are padded to, so that few programs are compiled; computed on the host."""

from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike


def bucket_ladder(max_tokens: int) -> tuple[int, ...]:
    """Returns bucket sizes up to `max_tokens`, each at most 1.5 times its predecessor.

    16, 24, 32, 48, 64, 96, 128, 192, ...: one program is compiled per bucket, and padding adds at
    most half of the entries.
    """
    sizes, power = [], 16
    while power < max_tokens:
        sizes += [power, power * 3 // 2]
        power *= 2
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def choose_bucket(count: ArrayLike, buckets: Sequence[int]) -> int:
    """Returns the smallest of `buckets` that holds every row; runs on the host.

    Raises:
        ValueError: a row has more tokens than the largest bucket holds.
    """
    largest_count = int(np.max(count, initial=0))
    sufficient_buckets = [size for size in buckets if size >= largest_count]
    if not sufficient_buckets:
        raise ValueError(
            f"count is {largest_count}, expected at most the largest bucket of {buckets}"
        )
    return min(sufficient_buckets)


def ladder(largest: int, smallest: int = 64) -> tuple[int, ...]:
    """Returns sizes up to `largest`, four per doubling: 64, 80, 96, 112, 128, 160, ...

    Padding to the next size adds at most a quarter. 640 tokens (576 of an image and a question)
    need no padding.
    """
    sizes, base = [], smallest
    while base < largest:
        sizes += [base, base * 5 // 4, base * 3 // 2, base * 7 // 4]
        base *= 2
    return (*(size for size in sizes if size < largest), largest)


def text_bucket(length: int) -> int:
    """Rounds a number of text tokens up to 64, 128, 256, 512, ..."""
    return 64 << max(0, (length - 1).bit_length() - 6)


def words_bucket(count: int) -> int:
    """Rounds a number of question words up to 16, 32, 64, 128, ..."""
    return max(16, 1 << (count - 1).bit_length())


def kept_bucket(count: int) -> int:
    """Rounds a number of kept tokens up to a multiple of 16, one of eight sizes per doubling."""
    step = max(16, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


def row_bucket(count: int, exact: Iterable[int] = ()) -> int:
    """Rounds a number of rows up to 0, 1, 2, 3, 4, 6, 8, 12, 16, ..., or one of `exact`."""
    sizes, base = {0, 1}, 1
    while base < count:
        base *= 2
        sizes |= {base, base * 3 // 2}
    return min(size for size in (*sizes, *exact) if size >= count)
