"""Rules for padding shapes, which bound the number of compiled programs; computed on the host.

A bucket is a size that shapes are padded to. A ladder is an ascending tuple of buckets.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int


@functools.cache
def bucket_ladder(max_tokens: int) -> tuple[int, ...]:
    """Returns the sizes 16, 24, 32, 48, 64, 96, 128, ..., up to and including `max_tokens`.

    Each size is at most 1.5 times its predecessor. One program is compiled per size, and padding
    adds at most half of the entries.
    """
    sizes, power = [], 16
    while power < max_tokens:
        sizes += [power, power * 3 // 2]
        power *= 2
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def choose_bucket(count: ArrayLike, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds every row; runs on the host.

    Args:
        count: number of tokens of each row, or of the only row.
        buckets: sizes to choose from, in any order.

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


@functools.cache
def ladder(largest: int, smallest: int = 64) -> tuple[int, ...]:
    """Returns the sizes 64, 80, 96, 112, 128, 160, ..., up to and including `largest`.

    There are four sizes per doubling, so padding to the next size adds at most a quarter. 640
    tokens (576 image tokens and a question) need no padding.

    Args:
        largest: last size.
        smallest: first size, if it is below `largest`.
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
    """Rounds a number of rows up to 0, 1, 2, 3, 4, 6, 8, 12, 16, ..., or a size in `exact`."""
    sizes, base = {0, 1}, 1
    while base < count:
        base *= 2
        sizes |= {base, base * 3 // 2}
    return min(size for size in (*sizes, *exact) if size >= count)


def length_bucket(length: int, limit: int, smallest: int = 64) -> int:
    """Rounds a number of tokens up to the next size of `ladder(limit, smallest)`, or to `limit`."""
    return next((size for size in ladder(limit, smallest) if size >= length), limit)


def power_of_two(count: int) -> int:
    """Rounds a number up to 1, 2, 4, 8, ..."""
    return 1 << max(0, count - 1).bit_length()


def round_up(sizes: ArrayLike, multiple: int) -> Int[np.ndarray, "*n"]:
    """Rounds sizes up to multiples of a number."""
    return np.asarray(-(-np.asarray(sizes) // multiple) * multiple)


def fraction_ladder(largest: int, divisors: Sequence[int] = (8, 4, 2, 1)) -> tuple[int, ...]:
    """Returns an eighth, a quarter, a half and all of `largest`, rounded up to integers.

    Args:
        largest: largest size.
        divisors: divisors of `largest`; by default, of the fractions above.

    Returns:
        The sizes in ascending order, without repetitions.
    """
    return tuple(sorted({-(-largest // divisor) for divisor in divisors}))


def pad_rows(count: int, batch: int) -> Int[np.ndarray, "r"]:
    """Returns the row indices 0, 1, ..., count - 1, padded with index 0 to a bucket.

    Args:
        count: number of rows before padding.
        batch: number of questions of the batch. Its multiples are buckets as well, so that no
            padding is needed if each question has the same number of rows (images).
    """
    batch_multiples = range(batch, count + batch, batch)
    rows = np.arange(row_bucket(count, batch_multiples), dtype=np.int32)
    rows[count:] = 0
    return rows


def pad_ids(ids: Int[np.ndarray, "b l"], width: int) -> Int[np.ndarray, "b width"]:
    """Pads each row of ids with zeros at its end, or truncates it, to `width` ids."""
    if ids.shape[1] >= width:
        return ids[:, :width]
    padded = np.zeros((len(ids), width), ids.dtype)
    padded[:, : ids.shape[1]] = ids
    return padded


# Widths of the prompts of a data set, and of the user's words, so that all sets share programs.
# Padding the shortest prompts to 32 ids costs less time than one more program for each budget.
WIDTHS = tuple(width for width in bucket_ladder(1 << 16) if width >= 32)


def prompt_width(longest: int, widths: Sequence[int] = WIDTHS) -> int:
    """Returns the smallest width that holds the longest prompt, or its length if none does."""
    return next((width for width in widths if width >= longest), longest)
