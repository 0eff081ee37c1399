"""The stages after generation: answers written by hand become submissions, tables and a page."""

import base64
import csv
import dataclasses
import json
import re

import numpy as np
import pytest
from benchmark_folders import write_benchmarks
from small_world import changed, small_run, stepprune, write_split

from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    AnswerLine,
    Provenance,
    answer_object,
    append,
    claim,
    questions_digest,
)
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli.evaluate import evaluate
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.evaluation.settings import read_seed


@pytest.fixture
def config(tmp_path):
    """Returns a run on three public benchmarks and a folder, without a model."""
    root = write_benchmarks(tmp_path / "eval")
    write_split(tmp_path / "data", "test", 2, 0)
    return small_run(
        tmp_path / "nowhere",
        tmp_path / "data",
        benchmarks="pope,mme,vqav2",
        data=str(root),
        samples=3,
    )


def write_answers(config, workdir, benchmark, method, budget, texts, mode="exact"):
    """Writes these texts as answers to the first questions of a benchmark."""
    questions = config.questions(benchmark)
    question_fields = (benchmark, questions_digest(questions), len(questions))
    provenance = Provenance(*question_fields, method, mode, budget, 9, None, "tiny")
    file = AnswerFile.of(workdir / "answers", provenance)
    claim(file)
    kept = budget or 3
    fields = {"order": list(range(kept)), "grid": [3, 3], "visual_tokens": 9}
    for number, (question, text) in enumerate(zip(questions, texts, strict=False)):
        line = AnswerLine(text, kept, number + 1, fields | {"gflops": number + 0.5})
        append(file.path, [answer_object(file, number, question, line)])
    return file.path


def report(workdir, name):
    return json.loads((workdir / "report" / name).read_text())


def check_page(workdir, num_pictures):
    page = (workdir / "report" / "index.html").read_text()
    picture = (workdir / "report" / "retention.png").read_bytes()
    assert base64.b64encode(picture).decode() in page
    assert page.count('src="data:image/png;base64,') == num_pictures
    assert "python eval.py --here" in page and "<td class=text>StepPrune</td>" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_folder_has_a_table_of_all_figures(config, tmp_path):
    config = changed(config, benchmarks="folder", remarks=("one run each",))
    words = {"y": "dog", "n": "red"}
    for method, budget, letters in (
        ("all tokens", 9, "yyyynn"),
        ("downsample", 4, "ynnnnn"),
        ("downsample", 2, "nnnnnn"),
        ("StepPrune", 4, "nyynyy"),
        ("StepPrune", 2, "ynnnnn"),
        ("StepPrune", 1, "yyyyyy"),
    ):
        texts = [words[letter] for letter in letters]
        write_answers(config, tmp_path, "folder", method, budget, texts)
    evaluate(config, tmp_path, stages=["score"], command="python eval.py --here")
    names = ("method", "pruning_rate", "accuracy", "retention", "hard", "hard_questions")
    # Hard questions are correct with all tokens, and wrong if downsampled to the same budget.
    assert [tuple(row[name] for name in names) for row in report(tmp_path, "table.json")] == [
        ("all tokens", 0.0, 66.67, 100.0, None, None),
        ("downsample", 55.6, 16.67, 25.0, 0.0, 3),
        ("StepPrune", 55.6, 66.67, 100.0, 66.67, 3),
        ("downsample", 77.8, 0.0, 0.0, 0.0, 4),
        ("StepPrune", 77.8, 16.67, 25.0, 25.0, 4),
        ("StepPrune", 88.9, 100.0, 150.0, None, None),
    ]
    lines = (tmp_path / "report" / "table.md").read_text().splitlines()
    assert lines[0] == (
        "| method | mode | tokens | pruning rate | accuracy | standard error | retention "
        "| 95 % interval | lost / gained | mcnemar p | hard | hard questions | mean k | ms "
        "| gflops | questions | seed |"
    )
    # Four of six answers are correct: sqrt(66.67 * 33.33 / 5) = 21.08.
    head = "| all tokens | exact | 9 | 0.0 | 66.67 | 21.08 | 100.0 | 100.0 to 100.0 "
    assert lines[2] == f"{head}| - | - | - | - | 9.0 | 3.5 | 3.0 | 6 | - |"
    # The row of all tokens answers the first four questions: p of n in a category.
    categories = [question["category"] for question in write_split(tmp_path / "same", "test", 2, 0)]
    row = report(tmp_path, "table.json")[0]
    for category in ("long", "short"):
        is_correct = [index < 4 for index, name in enumerate(categories) if name == category]
        assert row[f"folder/{category}"] == pytest.approx(100 * np.mean(is_correct), abs=0.01)
        error = 100 * np.std(is_correct, ddof=1) / len(is_correct) ** 0.5
        assert row[f"folder/{category}_standard_error"] == pytest.approx(error, abs=0.01)
    assert lines[lines.index("## Notes") + 2] == "- one run each"
    with (tmp_path / "report" / "table.csv").open() as file:
        assert [row["gflops"] for row in csv.DictReader(file)] == ["3.0"] * 6
    check_page(tmp_path, num_pictures=3)


def test_several_benchmarks_have_submissions_and_the_columns_of_papers(config, tmp_path, capsys):
    correct = {"pope": ["yes", "no"] * 3, "mme": ["yes", "no"] * 14, "vqav2": ["two"] * 3}
    for name, texts in correct.items():
        write_answers(config, tmp_path, name, "all tokens", 9, texts)
        for mode in ("exact", "adaptive"):
            write_answers(config, tmp_path, name, "StepPrune", 2, ["yes"] * len(texts), mode)
        write_answers(config, tmp_path, name, "StepPrune, own stop", None, texts, "adaptive")
    evaluate(config, tmp_path, stages=["convert", "score"], command="python eval.py --here")
    output = capsys.readouterr().out
    page = (tmp_path / "report" / "table.md").read_text()
    lines = page.splitlines()
    # Answering only "yes" gives an F1 of 2/3, and no image of MME has two correct answers.
    assert lines[0] == "## Scores ± standard error over questions"
    assert lines[2] == "| tokens | method | mode | MME | POPE | VQAv2 | Avg. | 95 % interval |"
    rows = [line.split(" | ") for line in lines[4:8]]
    heads = [row[0].strip("| ") + ", " + row[1] for row in rows]
    assert heads == [
        "9 (0.0 % pruned), all tokens",
        "own stop, StepPrune, own stop",
        "2 (77.8 % pruned), StepPrune",
        "2 (77.8 % pruned), StepPrune",
    ]
    assert [(row[3].split()[0], row[4].split()[0], *row[5:7]) for row in rows] == [
        *[("2800", "100.0", "-", "100.0")] * 2,
        *[("700", "66.7", "-", "45.8")] * 2,
    ]
    assert "## Visual tokens kept, mean ± standard deviation" in page and page in output
    # Only the server scores test-dev, so its column is empty and excluded from the average.
    assert "is scored by the server only" in page
    assert "- retention excludes VQAv2, where all tokens has no score\n" in page
    check_page(tmp_path, num_pictures=7)
    folder = tmp_path / "submissions"
    rows = json.loads((folder / "vqav2" / "all-tokens.json").read_text())
    answers = {900: "", 901: "2", 902: "2", 903: "2", 904: ""}
    assert {row["question_id"]: row["answer"] for row in rows} == answers
    assert len(list((folder / "mme" / "stepprune-exact-77.8").glob("*.txt"))) == 14
    assert not (folder / "pope").exists() and "vqav2, all-tokens: llava_vqav2" in output


def test_unfinished_answers_have_no_score(config, tmp_path, capsys):
    # A killed run leaves an incomplete last line, or an empty file.
    file = write_answers(config, tmp_path, "pope", "grid", 2, ["yes"] * 4)
    with file.open("a") as out:
        out.write('{"question_id": 1, "pro')
    empty = write_answers(config, tmp_path, "mme", "grid", 2, ["yes"])
    empty.write_text("")
    evaluate(config, tmp_path, stages=["convert", "score"])
    output = capsys.readouterr().out
    assert f"not converted: {empty}: 0 of 28 questions answered\n" in output
    scores = {score["benchmark"]: score for score in report(tmp_path, "scores.json")}
    assert scores["mme"]["problem"] == "0 of 28 questions answered so far"
    assert scores["pope"]["problem"] == "4 of 6 questions answered so far"
    assert scores["mme"]["ms"] is None and scores["pope"]["headline"] is None


def test_a_stopped_run_reports_the_questions_that_all_rows_answered(
    config, tmp_path, capsys, monkeypatch
):
    config = changed(config, benchmarks="folder")
    for method, budget, texts in (
        ("all tokens", 9, ["dog", "dog", "red", "dog"]),
        ("grid", 4, ["dog", "red", "dog"]),
        ("grid", 2, ["red", "dog"]),
    ):
        write_answers(config, tmp_path, "folder", method, budget, texts)

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("stepprune_jax.cli.evaluate.generate_answers", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, tmp_path)
    # All rows answer two of six questions: both are right with all tokens, one in each grid row.
    names = ("method", "tokens", "accuracy", "retention", "lost", "questions")
    assert [tuple(row[name] for name in names) for row in report(tmp_path, "table.json")] == [
        ("all tokens", 9, 100.0, 100.0, None, 2),
        ("grid", 4, 50.0, 50.0, 1, 2),
        ("grid", 2, 50.0, 50.0, 1, 2),
    ]
    output = capsys.readouterr().out
    assert "folder: 3 of 6 questions answered so far; the score covers the first 2" in output
    assert "stopped: this report covers the answers so far" in output
    # Once the row of all tokens is complete, it covers other questions than unfinished rows.
    (tmp_path / "answers" / "folder" / "all-tokens.jsonl").unlink()
    write_answers(config, tmp_path, "folder", "all tokens", 9, ["dog"] * 6)
    evaluate(config, tmp_path, stages=["score"])
    assert [row["retention"] for row in report(tmp_path, "table.json")] == [100.0, None, None]
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, tmp_path / "new")  # without answers, there is no report


def test_the_seed_of_a_row_is_the_seed_that_was_used(config, tmp_path):
    policy_file = tmp_path / "elsewhere" / "policy.safetensors"
    (tmp_path / "elsewhere").mkdir()
    save_policy(stepprune(), policy_file, {"config": {"seed": 5}})
    config = changed(config, rows={"other": str(policy_file)})
    save_policy(stepprune(), tmp_path / "policy.safetensors")

    def seed(method, **made):
        provenance = Provenance("pope", "q", 6, method, "exact", 2, 9, None, "tiny", made)
        return read_seed(config.eval, provenance, tmp_path)

    assert seed("random", seed=3) == 3 and seed("mine", options={"seed": 4}) == 4
    assert seed("grid") is None
    assert seed("other, own stop", policy="x", seed=0) == 5  # as exported policies tell it
    assert seed("StepPrune", policy="x", seed=0) is None
    (tmp_path / "run.json").write_text('{"config": {"seed": 7}}')
    assert seed("StepPrune", policy="x", seed=0) == 7  # as a run of train.py tells it


def test_the_validation_split_of_vqav2_is_scored_locally(config, tmp_path):
    questions = {"vqav2": "vqav2/v2_OpenEnded_mscoco_val2014_questions.json"}
    config = changed(config, benchmarks="vqav2", questions=questions)
    write_answers(config, tmp_path, "vqav2", "all tokens", 9, ["Red.", "green"])
    evaluate(config, tmp_path, stages=["score"])
    (score,) = report(tmp_path, "scores.json")
    # Five of ten people answered red, which is fully correct, and none answered green.
    assert score["problem"] is None and score["headline"] == 50.0


def test_errors_are_raised_before_the_model_is_loaded(config, llava_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    model = dataclasses.replace(config.model, folder=str(llava_folder))
    config = dataclasses.replace(config, model=model)
    with pytest.raises(FileNotFoundError, match=r"no answers to pope, mme, vqav2 in .*: run the"):
        evaluate(config, tmp_path, stages=["score"])
    remedy = "policy.safetensors does not exist; run train.* shapes, .*--config.eval.methods=all"
    with pytest.raises(FileNotFoundError, match=remedy):
        evaluate(config, tmp_path)
    data = dataclasses.replace(config.data, folder="absent")
    absent = changed(dataclasses.replace(config, data=data), benchmarks="folder")
    for bad, policy, error, message in (
        (changed(config, data="nowhere"), stepprune(), OSError, "no file at nowhere/pope/llava"),
        (absent, stepprune(), OSError, "no folder .*absent; name yours .* --out absent"),
        (changed(config, budgets=(10,)), stepprune(), ValueError, "expected at most the 9 visual"),
        (changed(config, budgets=(5,)), stepprune(), ValueError, "expected at most the 4 steps"),
        (config, stepprune(text_width=8), ValueError, "row 'StepPrune': .*text_width is 8"),
    ):
        save_policy(policy, tmp_path / "policy.safetensors")
        with pytest.raises(error, match=message):
            evaluate(bad, tmp_path)


def test_a_question_without_a_correct_answer_is_refused_before_the_first_answer(config, tmp_path):
    config = changed(config, benchmarks="folder")
    file = tmp_path / "data" / "test_answers.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]))
    name = json.loads(lines[-1])["question_id"]
    # The model's folder does not exist, so any other error would come from reading the model.
    with pytest.raises(ValueError, match=f"test_answers.jsonl: no answer to question '{name}'"):
        evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
