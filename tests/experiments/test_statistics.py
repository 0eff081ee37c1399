"""Tables and statistics of answers, on small numbers worked by hand."""

import math

import numpy as np
import pytest

from experiments.shapes.scene_files import SceneFacts
from experiments.studies.answers import RowAnswers, accuracy_table, spearman, stop_statistics


def row_answers(method, mode, budget, count, correct):
    count = np.array(count, np.int32)
    return RowAnswers(method, mode, budget, 9, count, count[:, None], np.array(correct, bool))


FULL = row_answers("all tokens", "exact", 9, [9] * 4, [1, 1, 1, 0])
ADAPTIVE = row_answers("StepPrune", "adaptive", 3, [1, 2, 4, 5], [1, 1, 0, 0])


def test_the_table_matches_a_worked_example():
    row = accuracy_table([FULL, ADAPTIVE], seed=7)[1]
    assert (row["pruning_rate"], row["accuracy"], row["retention"]) == (66.7, 50.0, 66.67)
    assert (row["mean_k"], row["questions"], row["seed"]) == (3.0, 4, 7)
    all_wrong = FULL._replace(correct=np.zeros(4, bool))
    assert accuracy_table([all_wrong, ADAPTIVE], 0)[1]["retention"] is None


def test_the_rank_correlation_matches_a_worked_example():
    # Ranks 4, 1, 2.5, 2.5 and 4, 3, 1, 2: sums of products 1.5, of squares 4.5 and 5.
    tied = spearman(np.array([30, 10, 20, 20]), np.array([9, 8, 1, 2]))
    assert tied == pytest.approx(1.5 / math.sqrt(4.5 * 5), abs=1e-4)
    assert spearman(np.array([1, 2, 3]), np.array([4, 4, 4])) is None


def test_statistics_tell_a_learned_stop_from_a_stop_at_its_bounds():
    scenes = [SceneFacts(1, tuple(range(n))) for n in (1, 2, 3, 4)]
    assert stop_statistics(ADAPTIVE, scenes, 1, 9) == {"spearman_relevant": 1.0, "at_bounds": 25.0}
    assert stop_statistics(ADAPTIVE, None, 2, 5) == {"spearman_relevant": None, "at_bounds": 75.0}
    assert set(stop_statistics(FULL, scenes, 1, 9).values()) == {None}
