"""Tables of scores compared with tables written by hand, and escaping of untrusted text."""

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
from small_world import ROOT

from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.cli import table as command
from stepprune_jax.evaluation.cells import csv_table, markdown_cell
from stepprune_jax.evaluation.citations import cite
from stepprune_jax.evaluation.formats import as_markdown, as_objects, write_table
from stepprune_jax.evaluation.scores import read_scores, score_file
from stepprune_jax.evaluation.seeds import average_seeds
from stepprune_jax.evaluation.table import merge_scores
from stepprune_jax.registry import PRUNERS


def score(benchmark, method, rate, headline, **fields):
    """Returns a score of a method with an exact budget; `rate` is the pruning rate in percent."""
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


ALL_TOKENS = [score("mme", "all tokens", 0.0, 1862.04), score("pope", "all tokens", 0.0, 85.94)]
STEPPRUNE = [score("mme", "StepPrune", 88.9, 1700.4), score("pope", "StepPrune", 88.9, 81.26)]
AVERAGE = 50 * (1700.4 / 1862.04 + 81.26 / 85.94)


def cells(table, title):
    """Returns the cells of the section with this title, without the header."""
    part = as_markdown(table).partition(f"## {title}\n\n")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines()[2:]]


def test_a_note_mentions_a_learned_stop_whose_counts_are_at_a_bound():
    fields = {"mode": "adaptive", "budget": None, "mean_k": 288.0, "sd_k": 0.0}
    reference = ALL_TOKENS[0]
    learned_stop = score("mme", "StepPrune, own stop", 50.0, 1700.4, **fields)
    note = "MME: the learned stop sits at T_max: 95% of the counts"
    for at_cap, is_noted in ((0.95, True), (0.5, False)):
        row = learned_stop | {"at_floor": 0.0, "at_cap": at_cap}
        assert (note in as_markdown(merge_scores({"run": [reference, row]}))) == is_noted
    assert "sits at" not in as_markdown(merge_scores({"run": [reference, learned_stop]}))


def test_a_row_without_some_score_has_no_average():
    table = merge_scores({"run": [*ALL_TOKENS, STEPPRUNE[0]]})
    assert table.average(table.rows[1]) is None
    assert cells(table, "Scores")[1][3:] == ["1700", "-", "-", "7"]
    table = merge_scores({"run": STEPPRUNE})
    assert table.all_tokens is None and "no row of all tokens" in as_markdown(table)


def test_the_image_gain_is_the_share_of_the_gain_over_the_blind_model():
    blind = [score("mme", "no image", 100.0, 862.04), score("pope", "no image", 100.0, 50.0)]
    table = merge_scores({"run": [*ALL_TOKENS, *blind, *STEPPRUNE]})
    expected = 50 * ((1700.4 - 862.04) / 1000 + (81.26 - 50) / (85.94 - 50))
    gains = {row["method"]: row["image_gain"] for row in as_objects(table)}
    assert gains == {"all tokens": 100, "no image": 0, "StepPrune": pytest.approx(expected)}
    assert [row[-2] for row in cells(table, "Scores")] == ["100.0", f"{expected:.1f}", "0.0"]
    # Where the image gains nothing, the share is not defined.
    useless_image = [blind[0], score("pope", "no image", 100.0, 85.94)]
    table = merge_scores({"run": [*ALL_TOKENS, *useless_image, *STEPPRUNE]})
    assert {row["image_gain"] for row in as_objects(table)} == {None}


def test_notes_name_benchmarks_on_which_any_pruning_is_as_good():
    blind = [score("mme", "no image", 100.0, 862.04), score("pope", "no image", 100.0, 85.94)]
    page = as_markdown(merge_scores({"run": [*ALL_TOKENS, *blind, *STEPPRUNE]}))
    assert "POPE: the image gains nothing" in page and "MME: the image" not in page
    # An unfinished row is no reason, because it covers other questions.
    unfinished = blind[1] | {"answered": 5, "scored": 5}
    page = as_markdown(merge_scores({"run": [*ALL_TOKENS, blind[0], unfinished, *STEPPRUNE]}))
    assert "gains nothing" not in page
    unsolved = score("pope", "all tokens", 0.0, 0.0)
    page = as_markdown(merge_scores({"run": [unsolved, blind[1], STEPPRUNE[1]]}))
    assert "POPE: with all tokens no answer is right" in page and "gains nothing" not in page


def test_one_benchmark_has_a_column_of_the_image_gain_if_the_blind_row_exists():
    blind = score("pope", "no image", 100.0, 50.0)
    rows = as_objects(merge_scores({"run": [ALL_TOKENS[1], blind, STEPPRUNE[1]]}))
    assert [row["image_gain"] for row in rows] == [100, round(100 * 31.26 / 35.94, 2), 0]
    assert "image_gain" not in as_objects(merge_scores({"run": [ALL_TOKENS[1]]}))[0]


def test_a_note_says_if_pruning_costs_more_time_than_it_saves():
    def is_noted(*times):
        rows = [score("mme", f"m{t}", 88.9, 1.0, ms=t, gflops=1.0) for t in times]
        reference = score("mme", "all tokens", 0.0, 2.0, ms=5.0, gflops=9.0)
        page = as_markdown(merge_scores({"run": [reference, *rows]}))
        return "takes longer than it saves" in page

    assert is_noted(6.0) and is_noted(6.0, 7.0, 4.0)
    assert not is_noted(6.0, 4.0) and not is_noted(None) and not is_noted()
    assert "takes longer" not in as_markdown(merge_scores({"run": [*ALL_TOKENS, *STEPPRUNE]}))


def test_one_benchmark_has_a_table_of_all_figures():
    # 128 correct answers of 160 with all tokens, 92 at 64: the retention, 71.875, is a tie.
    reference = score("folder", "all tokens", 0.0, 100 * (128 / 160), mean_k=576.0)
    exact = score("folder", "StepPrune", 88.9, 100 * (92 / 160), gflops=0.9)
    learned_stop = exact | {"method": "StepPrune, own stop", "mode": "adaptive", "budget": None}
    table = merge_scores({"run": [exact, learned_stop, reference]})
    line = (
        "| StepPrune, own stop | adaptive | - | 88.9 | 57.5 | 71.88 | 64.0 | 12.34 | 0.9 | 9 | 7 |"
    )
    assert as_markdown(table).splitlines()[3] == line
    zero_reference = reference | {"headline": 0.0}
    assert as_objects(merge_scores({"run": [zero_reference, exact]}))[1]["retention"] is None
    scores = [score("pope", "grid", 77.8, 80.0, num_tokens=2880, budget=b) for b in (640, 641)]
    assert [row.budget for row in merge_scores({"run": scores}).rows] == [641, 640]


def test_merged_runs_keep_rows_with_different_results_separate():
    other_scores = [score("pope", "StepPrune", 88.9, 80.0), score("pope", "grid", 88.9, 70.0)]
    table = merge_scores({"a": ALL_TOKENS + STEPPRUNE, "b": other_scores})
    assert [row.method for row in table.rows] == [
        "all tokens",
        "grid",
        "StepPrune (a)",
        "StepPrune (b)",
    ]
    table = merge_scores({"a": ALL_TOKENS + STEPPRUNE, "b": STEPPRUNE})
    assert [row.method for row in table.rows] == ["all tokens", "StepPrune"]


@pytest.mark.parametrize("first", ["finished", "unfinished"])
def test_a_finished_row_replaces_an_unfinished_one(first):
    fields = {"headline": None, "answered": 3, "problem": "3 of 9", "mean_k": None, "ms": None}
    unfinished = [row | fields for row in ALL_TOKENS + STEPPRUNE]
    runs = {"finished": ALL_TOKENS + STEPPRUNE, "unfinished": unfinished}
    table = merge_scores(dict(sorted(runs.items(), key=lambda item: item[0] != first)))
    assert [row.method for row in table.rows] == ["all tokens", "StepPrune"]
    assert table.average(table.rows[1]) == pytest.approx(AVERAGE)
    table = merge_scores({"unfinished": unfinished})
    assert cells(table, "Milliseconds per question")[0][3:] == ["-", "-"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("questions", "other", r"different questions of pope \(q-pope and other\)"),
        ("num_tokens", 144, r"different visual tokens \(576 and 144\)"),
        ("headline", 85.0, r"different score of all tokens on pope \(85.94 and 85.0\)"),
    ],
)
def test_runs_with_different_conditions_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"all tokens of a and all tokens of b have {message}"):
        merge_scores({"a": ALL_TOKENS, "b": [ALL_TOKENS[1] | {field: value}]})


@pytest.mark.parametrize(
    ("benchmark", "lines", "figures"),
    [
        ("pope", [{"ms": 1.0, "kept": 0}, {"ms": 4.0, "kept": 4}], (2.5, 2.0)),
        ("pope", [{"ms": 1.0, "kept": 4}, {"kept": 4}], (1.0, 4.0)),
        ("pope", [{"kept": 4}], (None, 4.0)),
        # A line without operations has no image.
        (
            "scienceqa",
            [{"kept": 0}, {"kept": 4, "gflops": 1}, {"kept": 0, "gflops": 1}],
            (None, 2.0),
        ),
    ],
)
def test_means_cover_the_answers_that_have_a_figure(tmp_path, benchmark, lines, figures):
    provenance = Provenance(benchmark, "q", 9, "StepPrune", "exact", 4, 9, None, "model")
    file = AnswerFile(tmp_path / "a.jsonl", provenance)
    answer = {"prompt": "?", "text": "yes"}
    write_lines(file.path, [answer | {"question_id": n} | line for n, line in enumerate(lines)])
    result = score_file(file, tmp_path, 0)
    assert (result["ms"], result["mean_k"]) == figures
    assert result["problem"] == f"{len(lines)} of 9 questions answered so far"
    # With a malformed line, the file counts as unanswered, and the problem names the line.
    write_lines(file.path, [answer | {"question_id": 0}, answer | {"question_id": 1, "text": None}])
    result = score_file(file, tmp_path, 0)
    assert 'a.jsonl: line 2: "text"' in result["problem"] and result["answered"] == 0


def test_operations_are_rounded_in_tables_only(tmp_path):
    provenance = Provenance("pope", "q", 9, "StepPrune", "exact", 4, 9, None, "model")
    file = AnswerFile(tmp_path / "a.jsonl", provenance)
    answer = {"prompt": "?", "text": "yes", "kept": 4}
    gflops = (0.123456, 0.123464)
    lines = [answer | {"question_id": n, "gflops": count} for n, count in enumerate(gflops)]
    write_lines(file.path, lines)
    result = score_file(file, tmp_path, 0)
    assert result["gflops"] == pytest.approx(0.12346, abs=1e-9)
    one_benchmark = merge_scores({"run": [result]})
    assert as_objects(one_benchmark)[0]["gflops"] == 0.1235
    two_benchmarks = merge_scores({"run": [result, STEPPRUNE[0] | {"budget": 4, "num_tokens": 9}]})
    assert as_objects(two_benchmarks)[0]["pope_gflops"] == 0.1235
    assert "0.1235" in cells(two_benchmarks, "GFLOPs to the first token")[0]


def test_scores_on_hard_questions_have_a_section_if_they_exist():
    fields = {"hard": 66.67, "hard_questions": 1234}
    table = merge_scores({"run": [*ALL_TOKENS, STEPPRUNE[0] | fields, STEPPRUNE[1]]})
    title = "Scores on hard questions, in percent of their number"
    assert cells(table, title)[1][3:] == ["66.7 of 1,234", "-"]
    assert title not in as_markdown(merge_scores({"run": ALL_TOKENS + STEPPRUNE}))
    assert "hard" not in as_objects(merge_scores({"run": STEPPRUNE[:1]}))[0]


def write_runs(folder, runs):
    """Writes the scores of runs, and returns the folders of the runs."""
    for name, scores in runs.items():
        (folder / name / "report").mkdir(parents=True)
        (folder / name / "report" / "scores.json").write_text(json.dumps(scores))
    return [str(folder / name) for name in runs]


def test_rows_that_differ_only_in_their_seed_are_averaged(tmp_path, capsys):
    reference = score("pope", "all tokens", 0.0, 80.0, seed=None)
    grid = score("pope", "grid", 88.9, 30.0, seed=None)
    runs = {
        f"run{seed}": [
            reference,
            grid,
            score("pope", "StepPrune", 88.9, headline, seed=seed, gflops=gflops),
        ]
        for seed, headline, gflops in (
            (0, 70.0, 0.25036),
            (1, 72.0, 0.25036),
            (5, 74.0, 0.25027),
        )
    }
    folders = write_runs(tmp_path, runs)
    command.main([*folders, "--mean", "--out", str(tmp_path)])
    # The deviation of 70, 72 and 74 with divisor 2 is 2; in percent of 80 it is 2.5.
    row = "| StepPrune | exact | 64 | 88.9 | 72.0 ± 2.0 (3) | 90.0 ± 2.5 (3) |"
    page = capsys.readouterr().out
    assert row in page and "| 0, 1, 5 |" in page and page.count("| grid |") == 1
    (values,) = [
        row
        for row in json.loads((tmp_path / "table.json").read_text())
        if row["method"] == "StepPrune"
    ]
    assert (values["score"], values["score_sd"], values["retention_sd"]) == (72.0, 2.0, 2.5)
    assert values["seed"] == "0, 1, 5"
    # The mean of the three runs, rounded once. Rounded runs would have a mean of 0.2504.
    assert values["gflops"] == 0.2503
    command.main(folders)
    assert "StepPrune (" in capsys.readouterr().out  # without --mean, each run is a row


def test_averages_over_several_benchmarks_have_a_deviation_of_the_average():
    rows = {
        seed: [score("mme", "x", 88.9, mme, seed=seed), score("pope", "x", 88.9, pope, seed=seed)]
        for seed, mme, pope in ((0, 931.02, 85.94), (1, 1862.04, 85.94))
    }
    runs = average_seeds({"a": ALL_TOKENS + rows[0], "b": rows[1]})
    table = merge_scores(runs)
    # Averages of 75 and 100 %: 87.5 with a deviation of 25 / sqrt(2).
    assert table.average(table.rows[1]) == pytest.approx(87.5)
    assert table.average_deviation(table.rows[1]) == pytest.approx(25 / 2**0.5)
    title = "Scores: ± standard deviation over seeds (number of seeds)"
    assert cells(table, title)[1][4:6] == ["85.9 ± 0.0 (2)", "87.5 ± 17.7 (2)"]


def test_rows_that_differ_in_more_than_their_seed_are_not_averaged():
    first, second = (score("pope", "x", 88.9, headline, seed=0) for headline in (1.0, 2.0))
    with pytest.raises(ValueError, match="have seed 0 and different scores on pope"):
        average_seeds({"a": [first], "b": [second]})
    second = second | {"seed": 1, "conditions": "layer=3"}
    runs = average_seeds({"a": [first | {"conditions": "layer=2"}], "b": [second]})
    assert [row.method for row in merge_scores(runs).rows] == ["x (a)", "x (b)"]


def test_every_method_with_a_paper_has_a_bibtex_entry(tmp_path, capsys):
    for name, method in PRUNERS.items():
        page = (ROOT / "docs" / "pruners.md").read_text(encoding="utf-8")
        link = re.search(rf"\[`{name}`\]\(https://arxiv.org/abs/([\d.]+)\)", page)
        if link:
            entry = cite([method.label])
            assert f"eprint        = {{{link[1]}}}" in entry and entry.count("{") == entry.count(
                "}"
            )
    folders = write_runs(tmp_path, {"run": [*ALL_TOKENS, score("pope", "FastV", 88.9, 1.0)]})
    command.main([*folders, "--cite"])
    output = capsys.readouterr().out
    assert output.startswith("% all tokens: no paper\n") and output.count("@") == 1
    assert "@inproceedings{chen2024fastv," in output
    assert cite(["StepPrune, own stop", "StepPrune literal"]).count("@article{he2026stepprune") == 1
    command.main(["--cite"])
    assert capsys.readouterr().out.count("\n@") >= 15
    assert status("table", command.main) == 2


def test_the_latex_table_escapes_names(tmp_path):
    rows = [ALL_TOKENS[1], score("pope", "a_b & 50% #1 {x} \\y", 88.9, 80.0)]
    write_table(tmp_path, merge_scores({"run": rows}))
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[0] == r"% Needs \usepackage{booktabs}."
    assert lines[2] == r"\begin{tabular}{llrrrrrrrrr}" and lines[3] == r"\toprule"
    name = r"a\_b \& 50\% \#1 \{x\} \textbackslash{}y"
    assert any(line.startswith(f"{name} & exact & 64 & 88.9 & 80.0 & 93.09") for line in lines)
    assert r"\end{tabular}" in lines and all(line.endswith(r"\\") for line in lines[6:8])


def test_results_by_category_are_a_section_of_their_own():
    parts = {"category": {"color": 81.25, "count": 50.0}, "questions": 4}
    other_parts = {"category": {"color": 12.5}}
    rows = [
        score("folder", "all tokens", 0.0, 60.0, parts=parts),
        score("folder", "grid", 88.9, 20.0, parts=other_parts),
    ]
    table = merge_scores({"run": rows})
    assert [row[3:] for row in cells(table, "folder by category")] == [
        ["81.2", "50.0"],
        ["12.5", "-"],
    ]
    assert as_objects(table)[0]["folder/color"] == 81.25
    splits = {name: {"f1": 50.0, "accuracy": 1.0} for name in ("adversarial", "random")}
    pope = score("pope", "all tokens", 0.0, 60.0, parts=splits | {"by_position": {"mean_f1": 1.0}})
    assert cells(merge_scores({"run": [pope]}), "POPE by category")[0][3:] == ["50.0", "50.0"]


def test_the_command_merges_folders(tmp_path, capsys):
    for name, scores in (("a", ALL_TOKENS), ("b", STEPPRUNE)):
        (tmp_path / name / "report").mkdir(parents=True)
        (tmp_path / name / "report" / "scores.json").write_text(json.dumps(scores))
    command.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)])
    page = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == page
    row = "| 64 (88.9 % pruned) | StepPrune | exact |"
    assert f"{row} 1700 | 81.3 | {AVERAGE:.1f} | 7 |\n" in page
    assert f"{row} 64.0 ± 1.2 | 64.0 ± 1.2 |\n" in page and f"{row} 12.3 | 12.3 |\n" in page
    values = json.loads((tmp_path / "table.json").read_text())[1]
    assert values["mme"] == 1700.4 and values["average"] == pytest.approx(AVERAGE, abs=1e-9)
    header = "method,mode,tokens,average,seed,mme,mme_mean_k,mme_sd_k,mme_ms,mme_gflops,pope,"
    assert (tmp_path / "table.csv").read_text().startswith(header)
    code, error = status("table", command.main, tmp_path / "c"), capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "run eval.py" in error
    (tmp_path / "a" / "report" / "scores.json").write_text('[{"benchmark": "pope"}]')
    with pytest.raises(ValueError, match=r"score 0 \(None\) is not a score .*: write it again"):
        read_scores(tmp_path / "a")


def test_a_run_with_the_row_without_an_image_is_read_and_written_to_a_new_folder(tmp_path, capsys):
    blind = score("pope", "no image", 100.0, 50.0)
    assert blind["budget"] == 0
    (tmp_path / "a" / "report").mkdir(parents=True)
    (tmp_path / "a" / "report" / "scores.json").write_text(json.dumps([ALL_TOKENS[1], blind]))
    command.main([str(tmp_path / "a"), "--out", str(tmp_path / "new" / "tables")])
    assert "no image" in capsys.readouterr().out
    assert (tmp_path / "new" / "tables" / "table.tex").is_file()


def test_notes_name_few_questions_and_a_missed_mean_budget():
    fields = {"mode": "adaptive", "budget": 16, "mean_k": 22.12}
    rows = [ALL_TOKENS[1] | {"answered": 8}, score("pope", "StepPrune", 88.9, 80.0) | fields]
    page = as_markdown(merge_scores({"run": rows}))
    assert "POPE has 9 questions: standard errors and intervals" in page
    assert "the mean budget is 16, and the stop keeps 22.1 tokens on average" in page
    page = as_markdown(
        merge_scores({"run": [row | {"answered": 200, "mean_k": 15.0} for row in rows]})
    )
    assert "unreliable" not in page and "mean budget is" not in page


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_text_becomes_one_cell_that_displays_it(text):
    cell = markdown_cell(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]]", cell) and not set("<>\n\r") & set(cell)
    assert unescape(re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", cell)) == " ".join(text.split())
    (row,) = csv.DictReader(io.StringIO(csv_table([{"x": text, "y": 1}])))
    assert row["x"] in (text, f"'{text}")
    assert not row["x"].lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("start", ["=", "@", "\t="])
def test_texts_cannot_be_formulas_and_numbers_stay_numbers(start):
    lines = csv_table([{"method": f"{start}cmd()", "change": -1.5}]).splitlines()
    assert lines == ["method,change", f"'{start}cmd(),-1.5"]
