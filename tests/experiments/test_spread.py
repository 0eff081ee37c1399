"""Means and deviations over seeds, on small numbers worked by hand."""

import math

from experiments.studies.spread import summarize


def row(method, mode, rate, accuracy, seed, mean_k=3.0):
    fields = {"method": method, "mode": mode, "pruning_rate": rate, "accuracy": accuracy}
    fields |= {"retention": accuracy + 1, "mean_k": mean_k, "questions": 3, "seed": seed}
    return fields


def stepprune(seed, exact_accuracy, fewer_accuracy, adaptive_accuracy, learned_stop, rate):
    return [
        row("StepPrune", "exact", 66.7, exact_accuracy, seed),
        row("StepPrune", "exact", 77.8, fewer_accuracy, seed),
        row("StepPrune", "adaptive", 66.7, adaptive_accuracy, seed),
        row("StepPrune, own stop", "adaptive", rate, learned_stop, seed),
    ]


UNTRAINED = [row("all tokens", "exact", 0.0, 80.0, 0, 9.0)]
TABLES = [
    stepprune(0, 70.0, 60.0, 71.0, 76.0, 50.0),
    stepprune(1, 74.0, 66.0, 77.0, 78.0, 40.0),
    [row("AutoSelect-like", "exact", 66.7, 71.0, 0)],
    [row("AutoSelect-like", "exact", 66.7, 69.0, 1)],
]


def test_means_and_deviations_match_a_worked_example():
    summary = summarize(UNTRAINED, TABLES)
    assert [(row["method"], row["mode"], row["pruning_rate"], row["seeds"]) for row in summary] == [
        ("all tokens", "exact", 0.0, 1),
        ("StepPrune", "exact", 66.7, 2),
        ("StepPrune", "exact", 77.8, 2),
        ("StepPrune", "adaptive", 66.7, 2),
        ("StepPrune, own stop", "adaptive", 45.0, 2),
        ("AutoSelect-like", "exact", 66.7, 2),
    ]
    assert summary[0]["accuracy"] == 80.0 and summary[0]["accuracy_std"] is None
    assert summary[1]["accuracy"] == 72.0
    assert summary[1]["accuracy_std"] == round(math.sqrt(8), 2)  # Of 70 and 74.
    assert summary[1]["retention"] == 73.0 and summary[1]["mean_k_std"] == 0.0


def test_statistics_of_stops_are_averaged_over_rows_with_a_stop():
    stop_tables = [[TABLES[run][3] | {"at_bounds": share}] for run, share in enumerate((2.0, 5.0))]
    assert [row["at_bounds"] for row in summarize(UNTRAINED, stop_tables)] == [None, 3.5]
