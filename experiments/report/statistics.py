"""Statistics of a learned stop."""

from collections.abc import Sequence

import numpy as np
import scipy.stats

from experiments.datasets.scenes import Scene
from experiments.report.records import Records, percent


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Computes Spearman's rank correlation of two samples; None if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def stop_figures(
    row: Records, scenes: Sequence[Scene] | None, min_tokens: int, max_tokens: int
) -> dict[str, float | None]:
    """Distinguishes a stop that decides from one that stays at a bound."""
    if row.mode == "exact":
        return {"spearman_relevant": None, "at_bounds": None}
    return {
        "spearman_relevant": None
        if scenes is None
        else spearman(row.count, np.array([len(scene.relevant) for scene in scenes])),
        "at_bounds": percent((row.count <= min_tokens) | (row.count >= max_tokens)),
    }
