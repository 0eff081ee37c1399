"""Sizes that shapes are padded to, so that few programs are compiled."""

from collections.abc import Iterable


def ladder(largest: int, smallest: int = 64) -> tuple[int, ...]:
    """Sizes up to `largest`, four to each doubling: 64, 80, 96, 112, 128, 160, ...

    Padding to the next one adds at most a quarter, and 640 tokens (576 of an image and a question)
    fit without any.

    Args:
        largest: the last size.
        smallest: the first size; a multiple of 4.

    Returns:
        The sizes in order.
    """
    sizes, base = [], smallest
    while base < largest:
        sizes += [base, base * 5 // 4, base * 3 // 2, base * 7 // 4]
        base *= 2
    return (*(size for size in sizes if size < largest), largest)


def row_bucket(count: int, exact: Iterable[int] = ()) -> int:
    """A number of rows that holds `count`: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..., or one of `exact`.

    Args:
        count: rows there are.
        exact: further sizes that fit without padding.

    Returns:
        The smallest such size.
    """
    sizes, base = {0, 1}, 1
    while base < count:
        base *= 2
        sizes |= {base, base * 3 // 2}
    return min(size for size in (*sizes, *exact) if size >= count)
