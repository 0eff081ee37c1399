"""Rank correlations, paired differences, and families of questions."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.stats
from jaxtyping import Bool, Int

from experiments.datasets.scenes import Scene
from experiments.report.records import Records, percent
from stepprune_jax.data.llava import Question


def families(questions: Sequence[Question]) -> dict[str, Bool[np.ndarray, "q"]]:
    """Returns which questions belong to each family, in alphabetical order."""
    category = np.array([question.category for question in questions])
    return {str(name): category == name for name in np.unique(category)}


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Computes Spearman's rank correlation of two samples; None if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def image_numbers(questions: Sequence[Question]) -> Int[np.ndarray, "q"]:
    """Returns the number of each question's image."""
    return np.unique([str(question.image) for question in questions], return_inverse=True)[1]


def paired_difference(
    first: Bool[np.ndarray, "q"], second: Bool[np.ndarray, "q"], image: Int[np.ndarray, "q"]
) -> dict[str, float | None]:
    """Computes the difference of two accuracies on the same questions, with standard errors."""
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


def stop_figures(
    row: Records, scenes: Sequence[Scene] | None, least: int, most: int
) -> dict[str, float | None]:
    """Distinguishes a stop that decides from one that stays at a bound."""
    if row.mode == "exact":
        return {"spearman_relevant": None, "at_bounds": None}
    return {
        "spearman_relevant": None
        if scenes is None
        else spearman(row.count, np.array([len(scene.relevant) for scene in scenes])),
        "at_bounds": percent((row.count <= least) | (row.count >= most)),
    }
