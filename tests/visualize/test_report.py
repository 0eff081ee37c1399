"""The report of an evaluation, from scores and answer files."""

import json

import numpy as np
import pytest
from benchmark_files import write_lines
from PIL import Image

from stepprune_jax.benchmarks import BENCHMARKS, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.evaluation.table import merge_scores
from stepprune_jax.visualize.report import (
    AnsweredBenchmark,
    count_buckets,
    default_file,
    draw_counts,
    draw_retention,
    write_page,
)

NAME = "<u>grid</u>"


def score(method, budget, headline, mode="exact", **fields):
    head = {"benchmark": "folder", "method": method, "mode": mode, "budget": budget}
    figures = {"mean_k": float(budget or 3), "sd_k": 1.0, "ms": None, "gflops": None}
    counts = {"num_tokens": 9, "questions": "q", "seed": 0, "asked": 4, "answered": 4}
    result = {"headline": headline, "warnings": [], "problem": None}
    return head | figures | counts | result | fields


SCORES = [
    score("all tokens", 9, 80.0),
    score("StepPrune", 4, 60.0, warnings=["<b>"]),
    score("StepPrune", 4, 70.0, "adaptive"),
    score("StepPrune, own stop", None, 50.0, "adaptive"),
    score(NAME, 4, 20.0),
]


def row(folder, mode="adaptive", budget=4):
    provenance = Provenance("folder", "q", 4, "StepPrune", mode, budget, 9, 0.5, "model")
    file = AnswerFile.of(folder, provenance)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    return file


@pytest.fixture
def answered(tmp_path):
    """Returns four answered questions about one image."""
    Image.new("RGB", (24, 24), "red").save(tmp_path / "a.png")
    image, text = tmp_path / "a.png", "Is <i>it</i> $x$?"
    questions = [BenchmarkQuestion(f"q{number}", text, text, image) for number in range(4)]
    file = row(tmp_path)
    fields = {"prompt": text, "text": "yes", "grid": [3, 3], "visual_tokens": 9}
    lines = [
        {"question_id": f"q{number}", "kept": number, "order": list(range(number))} | fields
        for number in range(4)
    ]
    write_lines(file.path, lines)
    correct_answers = [{"question_id": f"q{number}", "answer": "yes"} for number in range(4)]
    write_lines(tmp_path / "test_answers.jsonl", correct_answers)
    folder = BENCHMARKS["folder"]
    return AnsweredBenchmark(folder, tmp_path, [file], questions)


def page(tmp_path, answered, **options):
    table = merge_scores({"run": SCORES})
    path = write_page(tmp_path / "index.html", table, answered, **({"num_examples": 3} | options))
    return path.read_text()


def test_the_page_is_one_file_with_escaped_names(tmp_path, answered):
    text = page(tmp_path, [answered], command="eval.py '<x>' \udcff")
    assert text.count('<img src="data:image/png;base64,') == 3
    assert "&lt;u&gt;grid&lt;/u&gt;" in text and "eval.py &#x27;&lt;x&gt;&#x27; \\udcff" in text
    assert "<u>" not in text and "<x>" not in text and "folder: &lt;b&gt;" in text
    assert text.count("<tr class=ours>") == 3 and "K of StepPrune, adaptive, 4 of 9" in text


def test_the_page_begins_with_retention_and_examples(tmp_path, answered):
    text = page(tmp_path, [answered])
    body = text[text.index("<body>") :]
    summary = (
        "With 3.0 of 9 visual tokens on average, StepPrune with its learned stop has 62.5 % of"
    )
    figures = ("Kept tokens of StepPrune", "Retention: score in %", "<table>", "K of StepPrune")
    parts = (summary, *figures)
    places = [body.index(part) for part in parts]
    assert places == sorted(places)
    rows_without_stop = [row for row in SCORES if "own stop" not in row["method"]]
    table_without_stop = merge_scores({"run": rows_without_stop})
    text = write_page(tmp_path / "plain.html", table_without_stop, [], num_examples=0).read_text()
    assert "With 4.0 of 9 visual tokens on average, StepPrune has 75.0 % of the score" in text
    incomplete_table = merge_scores({"run": SCORES[-1:]})
    text = write_page(tmp_path / "unknown.html", incomplete_table, [], num_examples=0).read_text()
    assert "No retention: the row of all tokens is missing" in text


def test_title_and_first_sentence_come_from_the_rows(tmp_path):
    def written(scores):
        table = merge_scores({"run": scores})
        return write_page(tmp_path / "i.html", table, [], num_examples=0).read_text()

    assert "<h1>StepPrune and &lt;u&gt;grid&lt;/u&gt; on a data folder</h1>" in written(SCORES)
    others = [
        score(f"m{number}", budget, 10.0 * number) for number in range(1, 6) for budget in (2, 4)
    ]
    text = written([SCORES[0], *others])
    assert "<h1>5 pruning methods on a data folder</h1>" in text and "StepPrune" not in text
    # Without a policy, the sentence is about the best row with the smallest budget.
    assert "With 2.0 of 9 visual tokens on average, m5 has 62.5 % of the score" in text
    assert "With 3.0 of 9 visual tokens on average, StepPrune with its learned stop has 37.5 %" in (
        written([SCORES[0], score("StepPrune, own stop", None, 30.0, "adaptive", mean_k=3.0)])
    )
    assert "No retention: with all tokens, the model answers no question correctly." in written(
        [SCORES[0] | {"headline": 0.0}, *others]
    )
    assert "has no score yet" in written([SCORES[0] | {"headline": None}, *others])


def graded(method, budget, text, mode="exact"):
    """Returns a score with outcomes; `text` has 1 for a correct answer and 0 for a wrong one."""
    outcomes = {"statistic": "mean", "units": " ".join(text)}
    return score(method, budget, 25.0 * text.count("1"), mode, outcomes=outcomes)


def test_the_plot_shows_errors_and_the_gain_of_the_image(tmp_path, monkeypatch):
    lines = []

    def record(axes, x, y, errors, **options):
        lines.append((options["mfc"], [round(value) for value in y], errors is not None))

    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", record)
    rows = [graded("all tokens", 9, "1111"), graded("StepPrune", 4, "1101")]
    assert draw_retention(merge_scores({"run": rows}))
    assert [(percents, has_errors) for _, percents, has_errors in lines] == [
        ([100], False),
        ([75], True),
    ]
    lines.clear()
    # Two of four answers need no image: of the other two, the policy keeps one.
    table = merge_scores({"run": [*rows, graded("no image", 0, "1100") | {"mean_k": 0.0}]})
    draw_retention(table)
    assert [percents for _, percents, _ in lines] == [[100], [50]]
    text = write_page(tmp_path / "i.html", table, [], num_examples=0).read_text()
    assert "Share of the image&#x27;s gain that is kept" in text and "one standard error" in text


def test_examples_show_up_to_four_methods_on_the_same_questions(tmp_path, answered, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "stepprune_jax.visualize.report.draw_rows", lambda out, rows: drawn.extend(rows)
    )
    monkeypatch.setattr("stepprune_jax.visualize.report._figure", lambda png, caption: caption)
    (policy_file,) = answered.files
    lines = [json.loads(line) for line in policy_file.path.read_text().splitlines()]
    files, scores = [policy_file], [SCORES[0], SCORES[2]]
    for rank, method in enumerate("abcde"):
        for budget in (2, 4):
            provenance = policy_file.provenance._replace(method=method, mode="exact", budget=budget)
            file = AnswerFile.of(tmp_path, provenance)
            # Another method may have answered in another order.
            write_lines(file.path, lines[::-1])
            files.append(file)
            scores.append(score(method, budget, 10.0 * rank))
    answered = answered._replace(files=files)
    table = merge_scores({"run": scores})
    caption = write_page(tmp_path / "i.html", table, [answered], num_examples=12).read_text()
    assert "StepPrune, adaptive, 4 of 9 tokens; e, exact, 4 of 9 tokens; d, exact" in caption
    titles = [[overlay.title for overlay in overlays] for overlays in drawn]
    assert titles == [
        [f"{name}, K = {count}" for count in range(4)] for name in ("StepPrune", *"edc")
    ]


def test_figures_without_data_are_omitted(tmp_path, answered):
    def count_figures(benchmark, **options):
        return page(tmp_path, [benchmark], **options).count("<img src=")

    assert count_figures(answered._replace(questions=())) == 2
    assert count_figures(answered, num_examples=0) == 2
    assert count_figures(answered._replace(files=[])) == 1
    path = answered.files[0].path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("grid")
    write_lines(path, lines)
    assert count_figures(answered) == 2
    zero_table = merge_scores({"run": [row | {"headline": 0.0} for row in SCORES]})
    assert draw_retention(zero_table) is None


def test_counts_are_sorted_into_six_log_spaced_buckets():
    # Of 16 to 127 tokens, the paper's range: edges 16, 22.6, 32, 45.3, 64, 90.5, 128, rounded up.
    count = np.array([16, 22, 23, 31, 32, 64, 90, 127])
    grades = np.array([1, 0, 1, np.nan, np.nan, 0.25, 0.75, 1])
    edges, questions, mean_grade = count_buckets(count, grades)
    assert edges.tolist() == [16, 23, 32, 46, 64, 91, 128]
    assert questions.tolist() == [2, 2, 1, 0, 2, 1]
    np.testing.assert_array_equal(mean_grade, [50, 100, np.nan, np.nan, 50, 100])
    equal_counts = np.full(3, 5)
    assert count_buckets(equal_counts, np.ones(3))[0].tolist() == [5, 6]
    assert count_buckets(equal_counts, np.ones(3))[1].sum() == 3
    assert count_buckets(0 * equal_counts, np.ones(3))[1].sum() == 3
    for counts, grade_case in ((count, grades), (0 * equal_counts, np.full(3, np.nan))):
        assert draw_counts(counts, grade_case, 576).startswith(b"\x89PNG")


def test_the_figure_shows_the_policy_at_its_middle_budget(tmp_path):
    files = [row(tmp_path, mode, budget) for mode in ("exact", "adaptive") for budget in (2, 4, 6)]
    assert default_file(files).provenance[4:6] == ("adaptive", 4)
    assert default_file(files[:3]).provenance[4:6] == ("exact", 4)
    stop_file = row(tmp_path, "adaptive", None)
    stop_file = stop_file._replace(
        provenance=stop_file.provenance._replace(method="StepPrune, own stop")
    )
    assert default_file([stop_file]) is stop_file and default_file([]) is None
    untrained = [
        file._replace(provenance=file.provenance._replace(method="scorer")) for file in files[:3]
    ]
    assert default_file(untrained) is None  # The method has no policy.
    trained = [
        file._replace(provenance=file.provenance._replace(made={"policy": "x"}))
        for file in untrained
    ]
    assert default_file(trained).provenance[3:6] == ("scorer", "exact", 4)
    assert default_file([*trained, *files]).provenance[3:6] == ("StepPrune", "adaptive", 4)
