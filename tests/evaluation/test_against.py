"""Rows of a table are compared with one method, with figures worked out by hand."""

import json

import pytest

from stepprune_jax.cli.table import main

NUM_QUESTIONS = 20


def score(method, mode, budget, right):
    """Returns a score on a data folder; the questions with indices in `right` are correct."""
    units = " ".join(str(int(index in right)) for index in range(NUM_QUESTIONS))
    return {
        **{"benchmark": "folder", "method": method, "mode": mode, "budget": budget},
        **{"num_tokens": 144, "questions": "q", "asked": 20, "answered": 20, "scored": 20},
        **{"headline": 5.0 * len(right), "warnings": [], "problem": None, "mean_k": budget},
        **{"sd_k": 0.0, "ms": None, "gflops": None, "seed": None},
        "outcomes": {"statistic": "mean", "units": units},
    }


@pytest.fixture
def run(tmp_path):
    """Returns the folder of a run with two methods."""
    scores = [
        score("all tokens", "exact", 144, range(20)),
        score("DivPrune", "exact", 16, range(10)),
        # Loses question 0, and gains questions 10 to 15.
        score("StepPrune", "exact", 16, range(1, 16)),
        score("StepPrune", "adaptive", 16, range(10)),
        score("StepPrune", "exact", 8, range(10)),  # DivPrune has no row with 8 tokens
    ]
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "scores.json").write_text(json.dumps(scores))
    return tmp_path


def test_rows_are_compared_with_the_same_budget_of_a_method(run, capsys):
    main([str(run), "--against", "divprune", "--out", str(run / "out" / "new")])
    exact, adaptive = json.loads((run / "out" / "new" / "against.json").read_text())
    assert (exact["method"], exact["mode"], exact["tokens"]) == ("StepPrune", "exact", 16)
    # 15 - 10 questions of 20. The test has 7 trials: p = 2 (1 + 7) / 2^7.
    assert exact["difference"] == 25 and (exact["lost"], exact["gained"]) == (1, 6)
    assert exact["mcnemar_p"] == 0.125
    # Differences per question are -1, 0 and 1 with a standard deviation of sqrt(7 / 20 - 1 / 16).
    # A normal interval is 25 +- 1.96 x 100 x 0.536 / sqrt(20) = 25 +- 23.5.
    assert exact["difference_low"] == pytest.approx(1.5, abs=5)
    assert exact["difference_high"] == pytest.approx(48.5, abs=5)
    figures = ("difference", "difference_low", "difference_high", "lost", "gained", "mcnemar_p")
    assert [adaptive[name] for name in figures] == [0, 0, 0, 0, 0, 1]
    page = capsys.readouterr().out
    assert "## Compared with divprune at the same budget" in page


def test_a_method_without_rows_is_refused(run):
    with pytest.raises(ValueError, match="'fastv', expected a method of the table: all tokens, D"):
        main([str(run), "--against", "fastv"])


def test_rows_without_results_of_questions_are_refused(run):
    file = run / "report" / "scores.json"
    scores = [row for row in json.loads(file.read_text()) if row["method"] != "StepPrune"]
    file.write_text(json.dumps(scores))
    with pytest.raises(ValueError, match="at a budget that another row has"):
        main([str(run), "--against", "DivPrune"])
