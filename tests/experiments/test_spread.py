import math

import numpy as np
import pytest

from experiments.studies.spread import differences, pack, summarise


def row(method, mode, rate, accuracy, seed, mean_k=3.0, correct=(1, 0, 1)):
    made = {"method": method, "mode": mode, "pruning_rate": rate, "accuracy": accuracy}
    made |= {"retention": accuracy + 1, "mean_k": mean_k, "questions": len(correct), "seed": seed}
    return made | {"correct": pack(np.array(correct, bool))}


def stepprune(seed, exact, fewer, adaptive, own, rate):
    return [
        row("StepPrune", "exact", 66.7, exact, seed),
        row("StepPrune", "exact", 77.8, fewer, seed),
        row("StepPrune", "adaptive", 66.7, adaptive, seed),
        row("StepPrune, own stop", "adaptive", rate, own, seed),
    ]


UNTRAINED = [row("all tokens", "exact", 0.0, 80.0, 0, 9.0)]
TABLES = [
    stepprune(0, 70.0, 60.0, 71.0, 76.0, 50.0),
    stepprune(1, 74.0, 66.0, 77.0, 78.0, 40.0),
    [row("AutoSelect-like", "exact", 66.7, 71.0, 0)],
    [row("AutoSelect-like", "exact", 66.7, 69.0, 1)],
]


def test_means_and_deviations_worked_by_hand():
    found = summarise(UNTRAINED, TABLES)
    assert [(r["method"], r["mode"], r["pruning_rate"], r["seeds"]) for r in found] == [
        ("all tokens", "exact", 0.0, 1),
        ("StepPrune", "exact", 66.7, 2),
        ("StepPrune", "exact", 77.8, 2),
        ("StepPrune", "adaptive", 66.7, 2),
        ("StepPrune, own stop", "adaptive", 45.0, 2),
        ("AutoSelect-like", "exact", 66.7, 2),
    ]
    assert found[0]["accuracy"] == 80.0 and found[0]["accuracy_std"] is None
    assert found[1]["accuracy"] == 72.0
    assert found[1]["accuracy_std"] == round(math.sqrt(8), 2)  # of 70 and 74
    assert found[1]["retention"] == 73.0 and found[1]["mean_k_std"] == 0.0


def test_what_is_said_of_stops_is_averaged_where_there_is_one():
    own = [[TABLES[run][3] | {"at_bounds": share}] for run, share in enumerate((2.0, 5.0))]
    assert [row["at_bounds"] for row in summarise(UNTRAINED, own)] == [None, 3.5]


def test_differences_worked_by_hand():
    found = {(d["first"], d["second"]): d for d in differences(TABLES)}
    adaptive = found["StepPrune, adaptive", "StepPrune, exact"]
    # 1 and 3 points on two seeds: mean 2, deviation sqrt(2), error 1.
    assert adaptive["difference"] == 2.0 and adaptive["runs_error"] == 1.0
    assert adaptive["p"] == round(1 - 2 / math.pi * math.atan(2), 2)  # Student's t, 1 degree
    against = found["StepPrune, exact", "AutoSelect-like, exact"]
    # Means 72 and 70; variances 8 and 2 over two seeds each.
    assert against["difference"] == 2.0
    assert against["runs_error"] == pytest.approx(math.sqrt(8 / 2 + 2 / 2), abs=0.01)
    # Means 74 and 70.
    assert found["StepPrune, adaptive", "AutoSelect-like, exact"]["difference"] == 4.0
    assert len(found) == 3
    single = differences([TABLES[0], TABLES[2]])
    assert {d["runs_error"] for d in single} == {d["p"] for d in single} == {None}


def test_the_error_of_the_questions_is_that_of_paired_answers():
    ours, theirs = (1, 1, 0, 1, 1, 0, 0, 1, 1), (1, 0, 0, 1, 1, 1, 0, 1, 0)
    (found,) = differences(
        [
            [row("StepPrune", "exact", 66.7, 70.0, 0, correct=ours)],
            [row("AutoSelect-like", "exact", 66.7, 71.0, 0, correct=theirs)],
        ]
    )
    gaps = np.subtract(ours, theirs)
    assert found["questions_error"] == round(100 * np.std(gaps, ddof=1) / 3, 2)
