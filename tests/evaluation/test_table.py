"""Tables worked by hand, in which names from outside come out as text."""

import csv
import io
import json
import re
from html import unescape

import pytest
from benchmark_files import write_lines
from commands import status
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.cli import table as command
from stepprune_jax.evaluation.cells import csv_table, markdown_cell
from stepprune_jax.evaluation.scores import read_scores, score_file
from stepprune_jax.evaluation.table import as_markdown, as_objects, merge_scores


def score(benchmark, method, rate, headline, **fields):
    return {
        "benchmark": benchmark,
        "method": method,
        "mode": "exact",
        "budget": round(576 * (1 - rate / 100)),
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
        "gflops": None,
        "seed": 7,
    } | fields


WHOLE = [score("mme", "all tokens", 0.0, 1862.04), score("pope", "all tokens", 0.0, 85.94)]
MINE = [score("mme", "StepPrune", 88.9, 1700.4), score("pope", "StepPrune", 88.9, 81.26)]
AVERAGE = 50 * (1700.4 / 1862.04 + 81.26 / 85.94)


def cells(table, title):
    """The cells of one of the page's tables, without its header."""
    part = as_markdown(table).partition(f"## {title}\n\n")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines()[2:]]


def test_a_learned_stop_that_sits_at_a_bound_is_noted():
    stop = {"mode": "adaptive", "budget": None, "mean_k": 288.0, "sd_k": 0.0}
    whole, own = WHOLE[0], score("mme", "StepPrune, own stop", 50.0, 1700.4, **stop)
    said = "MME: the learned stop sits at T_max: 95% of the counts"
    for at_cap, noted in ((0.95, True), (0.5, False)):
        table = merge_scores({"run": [whole, own | {"at_floor": 0.0, "at_cap": at_cap}]})
        assert (said in as_markdown(table)) == noted
    assert "sits at" not in as_markdown(merge_scores({"run": [whole, own]}))


def test_a_row_without_some_score_has_no_average():
    table = merge_scores({"run": [*WHOLE, MINE[0]]})
    assert table.average(table.rows[1]) is None
    assert cells(table, "Scores")[1][3:] == ["1700", "-", "-"]
    table = merge_scores({"run": MINE})
    assert table.whole is None and "no row of all tokens" in as_markdown(table)


def test_pruning_that_costs_more_time_than_it_saves_is_said():
    def said(*times):
        rows = [score("mme", f"m{t}", 88.9, 1.0, ms=t, gflops=1.0) for t in times]
        whole = score("mme", "all tokens", 0.0, 2.0, ms=5.0, gflops=9.0)
        return "takes longer than it saves" in as_markdown(merge_scores({"run": [whole, *rows]}))

    assert said(6.0) and said(6.0, 7.0, 4.0)
    assert not said(6.0, 4.0) and not said(None) and not said()
    assert "takes longer" not in as_markdown(merge_scores({"run": [*WHOLE, *MINE]}))


def test_one_benchmark_has_a_table_of_all_figures():
    # 128 right answers of 160 with all tokens, 92 at 64: the retention, 71.875, is a tie.
    whole = score("folder", "all tokens", 0.0, 100 * (128 / 160), mean_k=576.0)
    known = score("folder", "StepPrune", 88.9, 100 * (92 / 160), gflops=0.9)
    own = known | {"method": "StepPrune, own stop", "mode": "adaptive", "budget": None}
    none = whole | {"headline": 0.0}
    table = merge_scores({"run": [known, own, whole]})
    head = "| StepPrune, own stop | adaptive | 88.9 | 57.5 | 71.88 | 64.0 | 12.34 | 0.9 | 9 | 7 |"
    assert as_markdown(table).splitlines()[3] == head
    assert as_objects(merge_scores({"run": [none, known]}))[1]["retention"] is None
    many = [score("pope", "grid", 77.8, 80.0, num_tokens=2880, budget=b) for b in (640, 641)]
    assert [row.budget for row in merge_scores({"run": many}).rows] == [641, 640]


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
    with pytest.raises(ValueError, match=f"all tokens of a and all tokens of b have {message}"):
        merge_scores({"a": WHOLE, "b": [WHOLE[1] | {field: value}]})


@pytest.mark.parametrize(
    ("benchmark", "lines", "figures"),
    [
        ("pope", [{"ms": 1.0, "kept": 0}, {"ms": 4.0, "kept": 4}], (2.5, 2.0)),
        ("pope", [{"ms": 1.0, "kept": 4}, {"kept": 4}], (1.0, 4.0)),
        ("pope", [{"kept": 4}], (None, 4.0)),
        # The others have no image.
        (
            "scienceqa",
            [{"kept": 0}, {"kept": 4, "gflops": 1}, {"kept": 0, "gflops": 1}],
            (None, 2.0),
        ),
    ],
)
def test_time_and_k_are_those_of_the_answers_that_have_them(tmp_path, benchmark, lines, figures):
    provenance = Provenance(benchmark, "q", 9, "StepPrune", "exact", 4, 9, None, "model")
    file = AnswerFile(tmp_path / "a.jsonl", provenance)
    answer = {"prompt": "?", "text": "yes"}
    write_lines(file.path, [answer | {"question_id": n} | line for n, line in enumerate(lines)])
    found = score_file(file, tmp_path, 0)
    assert (found["ms"], found["mean_k"]) == figures
    assert found["problem"] == f"{len(lines)} of 9 questions answered so far"
    # A line that another program has written is named, and the file counts as unanswered.
    write_lines(file.path, [answer | {"question_id": 0}, answer | {"question_id": 1, "text": None}])
    found = score_file(file, tmp_path, 0)
    assert 'a.jsonl: line 2: "text"' in found["problem"] and found["answered"] == 0


def test_hard_questions_have_columns_where_they_are_known():
    hard = {"hard": 66.67, "hard_questions": 1234}
    table = merge_scores({"run": [*WHOLE, MINE[0] | hard, MINE[1]]})
    title = "Scores on hard questions, in percent of their number"
    assert cells(table, title)[1][3:] == ["66.7 of 1,234", "-"]
    assert title not in as_markdown(merge_scores({"run": WHOLE + MINE}))
    assert "hard" not in as_objects(merge_scores({"run": MINE[:1]}))[0]


def test_the_command_merges_folders(tmp_path, capsys):
    for name, scores in (("a", WHOLE), ("b", MINE)):
        (tmp_path / name / "report").mkdir(parents=True)
        (tmp_path / name / "report" / "scores.json").write_text(json.dumps(scores))
    command.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)])
    page = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == page
    row = "| 64 (88.9 % pruned) | StepPrune | exact |"
    assert f"{row} 1700 | 81.3 | {AVERAGE:.1f} |\n" in page
    assert f"{row} 64.0 ± 1.2 | 64.0 ± 1.2 |\n" in page and f"{row} 12.3 | 12.3 |\n" in page
    values = json.loads((tmp_path / "table.json").read_text())[1]
    assert values["mme"] == 1700.4 and values["average"] == pytest.approx(AVERAGE, abs=1e-9)
    header = "method,mode,tokens,average,mme,mme_mean_k,mme_sd_k,mme_ms,mme_gflops,pope,"
    assert (tmp_path / "table.csv").read_text().startswith(header)
    code, error = status("table", command.main, tmp_path / "c"), capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "run eval.py" in error
    (tmp_path / "a" / "report" / "scores.json").write_text('[{"benchmark": "pope"}]')
    with pytest.raises(ValueError, match="is not a list of scores"):
        read_scores(tmp_path / "a")


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_text_is_one_cell_that_shows_it(text):
    cell = markdown_cell(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]]", cell) and not set("<>\n\r") & set(cell)
    assert unescape(re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", cell)) == " ".join(text.split())
    (row,) = csv.DictReader(io.StringIO(csv_table([{"x": text, "y": 1}])))
    assert row["x"] in (text, f"'{text}")
    assert not row["x"].lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("start", ["=", "@", "\t="])
def test_texts_are_no_formulas_and_numbers_stay_numbers(start):
    lines = csv_table([{"method": f"{start}cmd()", "change": -1.5}]).splitlines()
    assert lines == ["method,change", f"'{start}cmd(),-1.5"]
