"""Means of grades in percent."""

from collections import defaultdict
from collections.abc import Iterable


def mean_percent(values: Iterable[float | bool]) -> float:
    """Returns 100 times the mean of the values."""
    values = list(values)
    return 100 * sum(values) / len(values)


def percent_by_group(grades: Iterable[tuple[str | int, float | bool]]) -> dict[str, float]:
    """Returns 100 times the mean grade of each group, sorted by group.

    Args:
        grades: pairs (group, grade).
    """
    grades_by_group = defaultdict(list)
    for group, grade in grades:
        grades_by_group[group].append(grade)
    return {str(group): mean_percent(values) for group, values in sorted(grades_by_group.items())}
