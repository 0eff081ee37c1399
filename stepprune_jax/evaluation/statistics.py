"""Statistics beyond means: whether K follows the image, and significance of differences."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Bool, Int

from stepprune_jax.data.llava import Question, Scene
from stepprune_jax.evaluation.accuracy import full_row, percent, retention
from stepprune_jax.evaluation.names import ALL
from stepprune_jax.evaluation.records import Records

# Number of groups into which questions are split by K.
_BUCKETS = 4


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Computes Spearman's rank correlation of two samples; None if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def image_numbers(questions: Sequence[Question]) -> Int[np.ndarray, "q"]:
    """Returns the number of each question's image."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(q.image, len(numbers)) for q in questions])


def scene_counts(scenes: Sequence[Scene]) -> Int[np.ndarray, "2 q"]:
    """Returns numbers of objects, and of patches that the answer depends on."""
    return np.array([(scene.complexity, len(scene.relevant)) for scene in scenes]).T


def paired_difference(
    first: Bool[np.ndarray, "q"], second: Bool[np.ndarray, "q"], image: Int[np.ndarray, "q"]
) -> dict[str, float | None]:
    """Computes the difference of two accuracies on the same questions, with standard errors.

    Args:
        first: right or wrong, per question.
        second: the same questions, another method.
        image: number of each question's image. Questions about one image are not independent:
            `standard_error_by_image` counts images, `standard_error` questions.
    """
    each = 100.0 * (first.astype(float) - second.astype(float))
    mean, total = each.mean(), len(each)
    sums = np.bincount(image, weights=each - mean)
    groups = len(np.unique(image))
    plain = each.std(ddof=1) / math.sqrt(total) if total > 1 else None
    clustered = None
    if groups > 1:
        clustered = math.sqrt(float(sums @ sums) * groups / (groups - 1)) / total
    return {
        "difference": round(float(mean), 3),
        "standard_error": None if plain is None else round(float(plain), 3),
        "standard_error_by_image": None if clustered is None else round(clustered, 3),
    }


def by_count(row: Records, whole: Bool[np.ndarray, "q"]) -> list[dict[str, Any]]:
    """Describes questions in quarters by K; equal counts stay together."""
    edges = np.quantile(row.count, np.linspace(0, 1, _BUCKETS + 1)[1:-1], method="lower")
    bucket = np.searchsorted(np.unique(edges), row.count, side="left")
    parts = []
    for number in np.unique(bucket).tolist():
        at = bucket == number
        parts.append(
            {
                "least_k": int(row.count[at].min()),
                "most_k": int(row.count[at].max()),
                "mean_k": round(float(row.count[at].mean()), 2),
                "questions": int(at.sum()),
                "accuracy": percent(row.correct[at]),
                "accuracy_all_tokens": percent(whole[at]),
                "retention": retention(row.correct[at], whole[at]),
            }
        )
    return parts


def make_statistics(
    rows: Sequence[Records],
    questions: Sequence[Question],
    scenes: Sequence[Scene] | None,
    default: str,
) -> dict[str, Any]:
    """Computes the statistics of a report.

    Args:
        rows: the records of each row.
        questions: the questions.
        scenes: descriptions of their images, or None.
        default: the method with which all others are compared.

    Returns:
        "adaptive": for each row with a learned stop, the distribution of K and its correlations.
        "adaptive_minus_exact": the same method at the same mean number of tokens. "default_minus":
        the default method at exact budgets against every other one.
    """
    whole = full_row(rows).correct
    image = image_numbers(questions)
    exact = {(row.method, row.budget): row for row in rows if row.mode == "exact"}
    adaptive = [row for row in rows if row.mode == "adaptive"]
    against_exact, against_others = [], []
    for row in adaptive:
        other = exact.get((row.method, row.budget))
        if other is not None:
            head = {"method": row.method, "pruning_rate": row.pruning_rate}
            against_exact.append(head | paired_difference(row.correct, other.correct, image))
    for (method, budget), row in exact.items():
        own = exact.get((default, budget))
        if own is not None and method not in (default, ALL):
            head = {"method": method, "pruning_rate": row.pruning_rate}
            against_others.append(head | paired_difference(own.correct, row.correct, image))
    return {
        "questions": len(questions),
        "images": len(np.unique(image)),
        "adaptive": [_describe(row, whole, scenes) for row in adaptive],
        "adaptive_minus_exact": against_exact,
        "default": default,
        "default_minus": against_others,
    }


def stop_figures(
    row: Records, scenes: Sequence[Scene] | None, least: int, most: int
) -> dict[str, float | None]:
    """Distinguishes a stop that decides from one that stays at a bound.

    Args:
        row: the records.
        scenes: descriptions of the questions' images, or None.
        least: smallest possible count.
        most: largest possible count.

    Returns:
        "spearman_relevant", the rank correlation of K and the number of relevant tokens, and
        "at_bounds", the share of questions with K at `least` or `most`, in percent. None where the
        budget is exact or scenes are unknown.
    """
    if row.mode == "exact":
        return {"spearman_relevant": None, "at_bounds": None}
    return {
        "spearman_relevant": None
        if scenes is None
        else spearman(row.count, scene_counts(scenes)[1]),
        "at_bounds": percent((row.count <= least) | (row.count >= most)),
    }


def _describe(
    row: Records, whole: Bool[np.ndarray, "q"], scenes: Sequence[Scene] | None
) -> dict[str, Any]:
    """Describes the distribution of an adaptive row's counts, and its correlations."""
    described: dict[str, Any] = {
        "method": row.method,
        "pruning_rate": row.pruning_rate,
        "mean_k": round(float(row.count.mean()), 2),
        "std_k": round(float(row.count.std()), 2),
        "by_count": by_count(row, whole),
    }
    if scenes is not None:
        objects, relevant = scene_counts(scenes)
        described["spearman_relevant"] = spearman(row.count, relevant)
        described["spearman_complexity"] = spearman(row.count, objects)
    return described
