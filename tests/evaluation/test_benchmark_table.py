"""The tables of the public benchmarks, worked by hand."""

import json

import pytest
from benchmark_files import write_lines

from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.evaluation import table as module
from stepprune_jax.evaluation.scores import read_scores, score_file
from stepprune_jax.evaluation.table import as_markdown, as_objects, merge_scores


def score(benchmark, method, rate, headline, **fields):
    return {
        "benchmark": benchmark,
        "method": method,
        "mode": "exact",
        "budget": round(576 * (1 - rate / 100)),
        "pruning_rate": rate,
        "num_tokens": 576,
        "questions": "q-" + benchmark,
        "asked": 9,
        "answered": 9,
        "headline": headline,
        "warnings": [],
        "problem": None,
        "mean_k": 64.0,
        "sd_k": 1.25,
        "ms": 12.34,
    } | fields


WHOLE = [score("mme", "all tokens", 0.0, 1862.04), score("pope", "all tokens", 0.0, 85.94)]
MINE = [score("mme", "StepPrune", 88.9, 1700.4), score("pope", "StepPrune", 88.9, 81.26)]
AVERAGE = 50 * (1700.4 / 1862.04 + 81.26 / 85.94)


def cells(table, title):
    """The cells of one of the page's tables, without its header."""
    part = as_markdown(table).partition(f"## {title}\n\n")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines()[2:]]


def test_averages_are_of_unrounded_scores_against_the_measured_upper_bound():
    table = merge_scores({"run": MINE + WHOLE})
    assert [row.budget for row in table.rows] == [576, 64]
    assert table.average(table.rows[0]) == 100.0
    assert as_objects(table)[1]["average"] == pytest.approx(AVERAGE, abs=1e-9)
    first, second = cells(table, "Scores")
    assert first == ["576 (0.0 % pruned)", "all tokens", "exact", "1862", "85.9", "100.0"]
    assert second[3:] == ["1700", "81.3", f"{AVERAGE:.1f}"]
    assert cells(table, "Visual tokens kept, mean ± standard deviation")[1][3] == "64.0 ± 1.2"
    assert cells(table, "Milliseconds per question")[1][3:] == ["12.3", "12.3"]


def test_a_row_without_some_score_has_no_average():
    table = merge_scores({"run": [*WHOLE, MINE[0]]})
    assert table.average(table.rows[1]) is None
    assert cells(table, "Scores")[1][3:] == ["1700", "-", "-"]
    table = merge_scores({"run": MINE})
    assert table.whole is None and "no row of all tokens" in as_markdown(table)


def test_runs_are_merged_and_rows_that_differ_are_told_apart():
    other = [score("pope", "StepPrune", 88.9, 80.0), score("pope", "grid", 88.9, 70.0)]
    table = merge_scores({"a": WHOLE + MINE, "b": other})
    assert [row.method for row in table.rows] == [
        "all tokens",
        "grid",
        "StepPrune (a)",
        "StepPrune (b)",
    ]
    same = merge_scores({"a": WHOLE + MINE, "b": MINE})
    assert [row.method for row in same.rows] == ["all tokens", "StepPrune"]


@pytest.mark.parametrize("first", ["whole", "part"])
def test_a_row_that_a_run_has_not_finished_is_taken_from_another(first):
    unfinished = {"headline": None, "answered": 3, "problem": "3 of 9", "mean_k": None, "ms": None}
    part = [row | unfinished for row in WHOLE + MINE]
    runs = {"whole": WHOLE + MINE, "part": part}
    table = merge_scores(dict(sorted(runs.items(), key=lambda item: item[0] != first)))
    assert [row.method for row in table.rows] == ["all tokens", "StepPrune"]
    assert table.average(table.rows[1]) == pytest.approx(AVERAGE)
    assert cells(merge_scores({"part": part}), "Milliseconds per question")[0][3:] == ["-", "-"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("questions", "other", r"different questions of pope \(q-pope and other\)"),
        ("num_tokens", 144, r"different visual tokens \(576 and 144\)"),
        ("headline", 85.0, r"different score of all tokens on pope \(85.94 and 85.0\)"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"a and b have {message}"):
        merge_scores({"a": WHOLE, "b": [WHOLE[1] | {field: value}]})


def test_time_is_that_of_the_answers_which_say_it(tmp_path):
    provenance = Provenance("pope", "q", 3, "grid", "exact", 64, 576, None, "model")
    file = AnswerFile(tmp_path / "grid.jsonl", provenance)
    line = {"prompt": "?", "text": "yes", "kept": 64}
    for times, expected in (((1.0, 4.0), 2.5), ((1.0, None), 1.0), ((None, None), None)):
        lines = [
            line | {"question_id": n} | ({} if ms is None else {"ms": ms})
            for n, ms in enumerate(times)
        ]
        write_lines(file.path, lines)
        assert score_file(file, tmp_path)["ms"] == expected


def test_the_command_merges_folders(tmp_path, capsys):
    for name, scores in (("a", WHOLE), ("b", MINE)):
        (tmp_path / name / "report").mkdir(parents=True)
        (tmp_path / name / "report" / "scores.json").write_text(json.dumps(scores))
    module.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)])
    page = (tmp_path / "benchmarks.md").read_text()
    assert capsys.readouterr().out == page and f"| {AVERAGE:.1f} |" in page
    assert json.loads((tmp_path / "benchmarks.json").read_text())[1]["mme"] == 1700.4
    header = "method,mode,tokens,average,mme,mme_mean_k,mme_sd_k,mme_ms,pope,"
    assert (tmp_path / "benchmarks.csv").read_text().startswith(header)
    with pytest.raises(SystemExit) as left:
        module.main([str(tmp_path / "c")])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1 and "run eval.py" in error
    # As written before budgets were counts.
    old = [{k: v for k, v in row.items() if k != "budget"} | {"own_stop": False} for row in MINE]
    own = old[0] | {"method": "StepPrune, own stop", "mode": "adaptive", "own_stop": True}
    (tmp_path / "a" / "report" / "scores.json").write_text(json.dumps([*old, own]))
    assert [row["budget"] for row in read_scores(tmp_path / "a")] == [64, 64, None]
    (tmp_path / "a" / "report" / "scores.json").write_text('[{"benchmark": "pope"}]')
    with pytest.raises(ValueError, match="is not a list of scores"):
        read_scores(tmp_path / "a")


def test_a_budget_is_a_count_however_many_tokens_there_are():
    many = {"num_tokens": 2880, "budget": 640, "pruning_rate": 77.8}
    table = merge_scores({"run": [score("pope", "grid", 77.8, 80.0) | many]})
    assert table.rows[0].budget == 640 and as_objects(table)[0]["tokens"] == 640
    neighbour = score("pope", "grid", 77.8, 81.0) | many | {"budget": 641}
    both = merge_scores({"run": [score("pope", "grid", 77.8, 80.0) | many, neighbour]})
    assert [row.budget for row in both.rows] == [641, 640]
