"""Bucket sizes that shapes are padded to, so that few programs are compiled."""

from collections.abc import Iterable


def ladder(largest: int, smallest: int = 64) -> tuple[int, ...]:
    """Returns sizes up to `largest`, four per doubling: 64, 80, 96, 112, 128, 160, ...

    Padding to the next one adds at most a quarter, and 640 tokens (576 of an image and a question)
    need no padding.
    """
    sizes, base = [], smallest
    while base < largest:
        sizes += [base, base * 5 // 4, base * 3 // 2, base * 7 // 4]
        base *= 2
    return (*(size for size in sizes if size < largest), largest)


def row_bucket(count: int, exact: Iterable[int] = ()) -> int:
    """Rounds a number of rows up to 0, 1, 2, 3, 4, 6, 8, 12, 16, ..., or one of `exact`."""
    sizes, base = {0, 1}, 1
    while base < count:
        base *= 2
        sizes |= {base, base * 3 // 2}
    return min(size for size in (*sizes, *exact) if size >= count)
