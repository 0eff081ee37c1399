import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from stepprune_jax.benchmarks.answer_files import pruning_rate
from stepprune_jax.data.llava import Question, Scene
from stepprune_jax.evaluation import report as report_folder
from stepprune_jax.evaluation.accuracy import (
    accuracy_by_family,
    accuracy_table,
    markdown_table,
    write_accuracy,
)
from stepprune_jax.evaluation.names import row_place
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.records import (
    Records,
    file_name,
    load_records,
    save_records,
    trimmed,
)
from stepprune_jax.evaluation.statistics import (
    by_count,
    make_statistics,
    paired_difference,
    spearman,
    stop_figures,
)

QUESTIONS = [Question(str(n), Path(f"{n // 2}.png"), "?", "ab"[n % 2]) for n in range(4)]


def records(method, mode, budget, count, correct, num_tokens=9):
    count = np.array(count, np.int32)
    order = trimmed(np.tile(np.arange(9, dtype=np.int32), (len(count), 1)), count)
    answer = ["yes" if right else "né" for right in correct]
    return Records(method, mode, budget, num_tokens, count, order, answer, np.array(correct, bool))


FULL = records("all tokens", "exact", 9, [9] * 4, [1, 1, 1, 0])
EXACT = records("StepPrune", "exact", 3, [3] * 4, [1, 0, 1, 0])
ADAPTIVE = records("StepPrune", "adaptive", 3, [1, 2, 4, 5], [1, 1, 1, 0])
RANDOM = records("random", "exact", 3, [3] * 4, [0, 0, 0, 0])
ROWS = [FULL, RANDOM, EXACT, ADAPTIVE]


def test_rows_stand_in_one_order():
    labels = ["random", "mine", "StepPrune", "ablated"]
    rows = [
        ("all tokens", "exact", 9),
        ("StepPrune, own stop", "adaptive", None),
        ("random", "exact", 4),
        ("mine", "exact", 4),
        ("StepPrune", "exact", 4),
        ("StepPrune", "adaptive", 4),
        ("ablated", "exact", 4),
        ("an unknown one", "exact", 4),
        ("random", "exact", 2),
    ]
    assert sorted(rows[::-1], key=lambda row: row_place(*row, labels)) == rows


def test_rates_of_the_paper():
    assert [pruning_rate(k, 144) for k in (48, 32, 16, 144)] == [66.7, 77.8, 88.9, 0.0]


def test_the_table_worked_by_hand():
    table = accuracy_table(ROWS, seed=7)
    assert table[0] == {
        "method": "all tokens",
        "mode": "exact",
        "pruning_rate": 0.0,
        "accuracy": 75.0,
        "retention": 100.0,
        "mean_k": 9.0,
        "questions": 4,
        "seed": 7,
    }
    assert [row["accuracy"] for row in table] == [75.0, 0.0, 50.0, 75.0]
    assert [row["retention"] for row in table] == [100.0, 0.0, 66.67, 100.0]
    families = accuracy_by_family(ROWS, QUESTIONS)[2]["families"]
    assert families["a"] == {"accuracy": 100.0, "retention": 100.0, "mean_k": 3.0, "questions": 2}
    assert families["b"] == {"accuracy": 0.0, "retention": 0.0, "mean_k": 3.0, "questions": 2}
    with pytest.raises(ValueError, match="lack 'all tokens'"):
        accuracy_table(ROWS[1:], 0)


def test_time_and_operations_stand_behind_the_count_and_may_be_unknown(tmp_path):
    costs = [{"ms": 2.5, "gflops": 0.9}] + 3 * [{"ms": None, "gflops": None}]
    table = accuracy_table(ROWS, 0, costs)
    assert list(table[0])[5:] == ["mean_k", "ms", "gflops", "questions", "seed"]
    assert (table[0]["ms"], table[0]["gflops"], table[1]["ms"]) == (2.5, 0.9, None)
    write_accuracy(tmp_path, table, accuracy_by_family(ROWS, QUESTIONS))
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[1].startswith("| --- | --- | ---: |") and set(lines[1][14:]) == set("-: |")
    assert lines[2] == "| all tokens | exact | 0.0 | 75.0 | 100.0 | 9.0 | 2.5 | 0.9 | 4 | 0 |"
    assert lines[3] == "| random | exact | 66.7 | 0.0 | 0.0 | 3.0 | - | - | 4 | 0 |"
    assert (tmp_path / "table.csv").read_text().splitlines()[2].endswith(",3.0,,,4,0")


def test_nothing_right_with_all_tokens_has_no_retention():
    table = accuracy_table([records("all tokens", "exact", 9, [9] * 4, [0] * 4), EXACT], 0)
    assert table[1]["retention"] is None


def test_tables_in_three_formats(tmp_path):
    table = accuracy_table(ROWS, 0)
    write_accuracy(tmp_path, table, accuracy_by_family(ROWS, QUESTIONS))
    assert json.loads((tmp_path / "table.json").read_text()) == table
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0] == "method,mode,pruning_rate,accuracy,retention,mean_k,questions,seed"
    assert lines[3] == "StepPrune,exact,66.7,50.0,66.67,3.0,4,0"
    lines = (tmp_path / "table_by_family.md").read_text().splitlines()
    assert lines[0] == "| method | mode | pruning rate | a | b |"
    assert lines[1] == "| --- | --- | ---: | ---: | ---: |"
    assert markdown_table([{"x": "a|b", "y": None}]).splitlines()[2] == r"| a\|b | - |"


def test_correlation_worked_by_hand():
    # Ranks 4, 1, 2.5, 2.5 and 4, 3, 1, 2: sums of products 1.5, of squares 4.5 and 5.
    tied = spearman(np.array([30, 10, 20, 20]), np.array([9, 8, 1, 2]))
    assert tied == pytest.approx(1.5 / math.sqrt(4.5 * 5), abs=1e-4)
    assert spearman(np.array([1, 2, 3, 4]), np.array([1, 4, 9, 16])) == 1.0
    assert spearman(np.array([1, 2, 3]), np.array([9, 5, 1])) == -1.0
    # Without ties: 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 1, 1, 2, 2, 0.
    found = spearman(np.array([1, 2, 3, 4, 5]), np.array([2, 1, 5, 3, 4]))
    assert found == pytest.approx(1 - 6 * (1 + 1 + 4 + 1 + 1) / 120, abs=1e-4)
    assert spearman(np.array([1, 2, 3]), np.array([4, 4, 4])) is None


def test_a_stop_that_decides_is_told_from_one_at_its_bounds():
    scenes = [Scene(1, tuple(range(n))) for n in (1, 2, 3, 4)]
    row = records("StepPrune", "adaptive", 3, [1, 2, 4, 5], [1, 1, 1, 1])
    assert stop_figures(row, scenes, 1, 9) == {"spearman_relevant": 1.0, "at_bounds": 25.0}
    assert stop_figures(row, scenes, 2, 5)["at_bounds"] == 75.0
    assert stop_figures(row, None, 0, 9) == {"spearman_relevant": None, "at_bounds": 0.0}
    exact = records("StepPrune", "exact", 3, [3] * 4, [1, 1, 1, 1])
    assert set(stop_figures(exact, scenes, 1, 9).values()) == {None}


def test_paired_differences_worked_by_hand():
    first, second = np.array([1, 1, 0, 1], bool), np.array([0, 1, 0, 1], bool)
    # Differences 100, 0, 0, 0: mean 25, standard deviation 50 over 4 questions.
    found = paired_difference(first, second, np.arange(4))
    assert found["difference"] == 25.0 and found["standard_error"] == 25.0
    assert found["standard_error_by_image"] == pytest.approx(25.0)
    # Two images with residual sums 50 and -50: sqrt(5000 * 2) / 4.
    pairs = paired_difference(first, second, np.array([0, 0, 1, 1]))
    assert pairs["standard_error_by_image"] == pytest.approx(math.sqrt(5000 * 2) / 4, abs=1e-3)
    alone = paired_difference(first[:1], second[:1], np.zeros(1, int))
    assert alone == {"difference": 100.0, "standard_error": None, "standard_error_by_image": None}


def test_quarters_by_count_hold_every_question_once():
    count = np.repeat(np.arange(1, 9), 2)
    row = records("StepPrune", "adaptive", 4, count, [1, 0] * 8)
    found = by_count(row, np.ones(16, bool))
    assert [b["questions"] for b in found] == [4, 4, 4, 4]
    assert [(b["least_k"], b["most_k"]) for b in found] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert {b["retention"] for b in found} == {50.0}
    # Equal counts are never split.
    (single,) = by_count(row._replace(count=np.full(16, 3, np.int32)), np.zeros(16, bool))
    assert single["questions"] == 16 and single["retention"] is None
    skewed = by_count(row._replace(count=np.array([1] * 13 + [9] * 3, np.int32)), np.ones(16, bool))
    assert [b["questions"] for b in skewed] == [13, 3]


def test_statistics_of_a_report():
    scenes = [Scene(n, tuple(range(n))) for n in range(4)]
    found = make_statistics(ROWS, QUESTIONS, scenes, "StepPrune")
    assert found["questions"] == 4 and found["images"] == 2
    (adaptive,) = found["adaptive"]
    assert adaptive["spearman_relevant"] == adaptive["spearman_complexity"] == 1.0
    assert adaptive["mean_k"] == 3.0 and adaptive["std_k"] == pytest.approx(1.58)
    (difference,) = found["adaptive_minus_exact"]
    assert difference["difference"] == 25.0 and difference["method"] == "StepPrune"
    (other,) = found["default_minus"]
    assert other["method"] == "random" and other["difference"] == 50.0
    without = make_statistics(ROWS, QUESTIONS, None, "StepPrune")["adaptive"][0]
    assert "spearman_relevant" not in without
    json.dumps(found)


def test_records_come_back(tmp_path):
    save_records(tmp_path / "records", [FULL])
    save_records(tmp_path / "records", ROWS)
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names[0] == "00-all-tokens-exact-0.npz" and len(names) == 4
    assert file_name(12, RANDOM._replace(method="[CLS] top-K")) == "12-cls-top-k-exact-66.7.npz"
    for one, other in zip(load_records(tmp_path / "records"), ROWS, strict=True):
        assert one[:4] == other[:4] and one.answer == other.answer
        for name in ("count", "order", "correct"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert load_records(tmp_path / "records")[3].order.tolist()[1] == [0, 1, -1, -1, -1]


def test_bad_records_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no records; run eval\.py"):
        load_records(tmp_path)
    np.savez(tmp_path / "a.npz", method="x")
    with pytest.raises(ValueError, match=r"a\.npz lacks mode, count"):
        load_records(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK\3\4 broken")
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file"):
        load_records(tmp_path)
    for change, message in (
        ({"count": np.full(2, "x")}, "count holds <U1, expected integers"),
        ({"count": np.zeros(0, int)}, r"order is \[.*, expected 2 axes"),
        ({"order": np.zeros(2, int)}, r"order is \[2\], expected 2 axes"),
        ({"correct": np.ones(3, bool)}, r"correct is \[3\], expected 1 axes"),
    ):
        save_records(tmp_path, ROWS[:1])
        (file,) = tmp_path.glob("*.npz")
        with np.load(file) as arrays:
            np.savez(file, **{**arrays, **change})
        with pytest.raises(ValueError, match=message):
            load_records(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    folder = report_folder.open_folder(tmp_path / "report")
    assert report_folder.open_folder(folder) == folder  # cut short, and again
    other = tmp_path / "other"
    other.mkdir()
    assert report_folder.open_folder(other) == other  # empty
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis holds files that are not a report's .chapter"):
        report_folder.open_folder(thesis)
    (thesis / report_folder.MANIFEST).write_text('{"kind": "else"}')
    with pytest.raises(ValueError, match="holds files that are not a report's"):
        report_folder.open_folder(thesis)
    assert sorted(path.name for path in thesis.iterdir()) == ["chapter.tex", "report.json"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file, expected a folder"):
        report_folder.open_folder(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"no file .*table\.json; run eval"):
        report_folder.read_report(folder)


class Terminal(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize("tty", [True, False])
def test_progress_counts_work_and_says_what_is_left(tty, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = Terminal(tty)
    progress = Progress(40, out, every=5)
    report = progress.task("first", 10)
    now[0] = 4.0
    report(5)
    assert out.getvalue() == ""  # too early
    now[0] = 10.0
    report(12)
    assert " 25%    30 s left  first" in out.getvalue() and out.getvalue().startswith("\r") == tty
    report = progress.task("second", 30)
    now[0] = 20.0
    report(10)
    assert " 50%    20 s left  second" in out.getvalue()
    progress.close()
    assert out.getvalue().endswith("\r" if tty else "\n")


def test_records_of_runs_that_stored_rates_are_read(tmp_path):
    own = records("StepPrune, own stop", "adaptive", None, [1, 2, 2, 3], [1, 1, 1, 0])
    save_records(tmp_path, [*ROWS, own])
    for path in tmp_path.iterdir():
        with np.load(path) as data:
            old = {name: data[name] for name in data if name not in ("budget", "num_tokens")}
        row = next(r for r in [*ROWS, own] if (r.method, r.mode) == (old["method"], old["mode"]))
        np.savez(path, pruning_rate=row.pruning_rate, **old)
    found = load_records(tmp_path)
    assert [row.budget for row in found] == [9, 3, 3, 3, None]
    assert {row.num_tokens for row in found} == {9}
    assert [row.pruning_rate for row in found] == [0.0, 66.7, 66.7, 66.7, 77.8]


def test_budgets_of_the_same_rounded_rate_are_told_apart():
    # 640 and 641 of 2,880 tokens are both 77.8 % pruned.
    rows = [records("all tokens", "exact", 2880, [2880] * 4, [1] * 4, 2880)]
    for budget, right in ((640, [0, 0, 0, 0]), (641, [1, 1, 1, 1])):
        for method, correct in (("StepPrune", right), ("random", [0, 0, 0, 0])):
            rows.append(records(method, "exact", budget, [budget] * 4, correct, 2880))
    found = make_statistics(rows, QUESTIONS, None, "StepPrune")["default_minus"]
    assert [row["difference"] for row in found] == [0.0, 100.0]
