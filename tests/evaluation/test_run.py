"""Evaluations from policies to tables and a page: of a data folder, and of public benchmarks."""

import csv
import dataclasses
import json
import re

import pytest
from benchmark_files import write_lines
from benchmark_folders import write_benchmarks
from small_world import (
    changed,
    one_shot,
    save_all,
    small_run,
    stepprune,
    tiny_model,
    write_answers,
    write_split,
)

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.evaluate import evaluate as run
from stepprune_jax.evaluation import generate_stage

# Random weights answer with characters that no font has.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Glyph"),
    pytest.mark.usefixtures("few_programs"),
]
PUBLIC = "pope,mme,vqav2"
METHODS = "all tokens,random,grid,downsample,visionzip,sparsevlm"
METHODS += ",AutoSelect-like,StepPrune literal,StepPrune"
WRONG = (1, 4, 5)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration for three public benchmarks and a folder, with its policies."""
    base = tmp_path_factory.mktemp("base")
    root = write_benchmarks(base / "eval")
    model, workdir = tiny_model(base / "model"), base / "run"
    questions = write_split(base / "data", "test", 3, 0)
    write_split(base / "data", "validation", 2, 1)
    rows = save_all(workdir)
    config = small_run(
        model.folder,
        base / "data",
        benchmarks=PUBLIC,
        data=str(root),
        methods="all tokens,StepPrune",
        max_new_tokens=2,
        validation_questions=6,
        samples=3,
        budgets=(2,),
    )
    return config, workdir, rows, questions


@pytest.fixture(scope="module")
def public(world):
    config, workdir, *_ = world
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(words)))
        run(config, workdir, command="python eval.py --here")
    return config, workdir, "\n".join(said)


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """An evaluation of a folder in which all tokens give the right answers, but for some."""
    config, _, rows, questions = world
    workdir = tmp_path_factory.mktemp("run")
    save_policy(stepprune(), workdir / "policy.safetensors")
    config = changed(config, benchmarks="folder", methods=METHODS, rows=rows)
    run(config, workdir, stages=["generate"])
    lines = (workdir / "answers" / "folder" / "all-tokens.jsonl").read_text().splitlines()
    said = [json.loads(line)["text"] for line in lines]
    right = ["no such" if n in WRONG else text for n, text in enumerate(said)]
    write_answers(config.root("folder"), questions, right)
    run(config, workdir, command="python eval.py --here")
    return config, workdir


def read(workdir, name):
    return json.loads((workdir / "report" / name).read_text())


def test_a_folder_has_a_table_of_all_figures(folder):
    _, workdir = folder
    table = read(workdir, "table.json")
    heads = [(row["method"], row["mode"]) for row in table]
    assert heads[:3] == [
        ("all tokens", "exact"),
        ("StepPrune, own stop", "adaptive"),
        ("random", "exact"),
    ]
    stopping = ("StepPrune literal", "StepPrune")
    both = [(method, mode) for method in stopping for mode in ("exact", "adaptive")]
    assert heads[-5:] == [("AutoSelect-like", "exact"), *both]
    assert {row["pruning_rate"] for row in table[2:]} == {77.8}
    kept = round(9 * table[1]["mean_k"]) / 9  # the table rounds the mean over nine questions
    assert table[1]["pruning_rate"] == round(100 * (1 - kept / 9), 1)
    assert {row["questions"] for row in table} == {9} and {row["seed"] for row in table} == {3}
    whole = {"accuracy": 66.67, "retention": 100.0, "mean_k": 9.0, "pruning_rate": 0.0}
    assert table[0].items() >= whole.items()
    scores = {(s["method"], s["mode"]): s for s in read(workdir, "scores.json")}
    for row, head in zip(table, heads, strict=True):
        right = round(9 * scores[head]["headline"] / 100)
        assert row["accuracy"] == round(100 * right / 9, 2)
        assert row["retention"] == round(100 * right / 6, 2) and row["ms"] > 0
    flops = {row["method"]: row["gflops"] for row in table if row["mode"] == "exact"}
    assert 0 < flops["random"] == flops["grid"] < flops["AutoSelect-like"] < flops["all tokens"]
    said = (workdir / "answers/folder/all-tokens.jsonl").read_text().splitlines()
    each = [json.loads(line)["gflops"] for line in said]
    assert len({*each}) > 1  # longer questions take more
    assert flops["all tokens"] == pytest.approx(sum(each) / len(each), rel=1e-3)
    lines = (workdir / "report" / "table.md").read_text().splitlines()
    assert lines[0] == (
        "| method | mode | pruning rate | accuracy | retention | hard | hard questions | mean k "
        "| ms | gflops | questions | seed |"
    )
    assert lines[2].startswith("| all tokens | exact | 0.0 | 66.67 | 100.0 | - | - | 9.0 | ")
    with (workdir / "report" / "table.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == [row["method"] for row in table]


def test_the_page_holds_its_figures(folder, public):
    for workdir, benchmarks, field in ((folder[1], 1, "retention"), (public[1], 3, "average")):
        page = (workdir / "report" / "index.html").read_text()
        drawn = read(workdir, "table.json")[0][field] is not None
        assert page.count('src="data:image/png;base64,') == 2 * benchmarks + drawn
        assert "python eval.py --here" in page and "<td class=text>StepPrune</td>" in page
        assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_second_run_gives_the_same_report(folder):
    config, workdir = folder
    table = read(workdir, "table.json")
    path = workdir / "answers" / "folder" / "stepprune-adaptive-77.8.jsonl"
    text = path.read_text()
    # In another order than the questions: answers are put in it again.
    path.write_text("".join(text.splitlines(keepends=True)[::-1]))
    with pytest.MonkeyPatch.context() as patch:  # nothing is left to answer
        patch.setattr(generate_stage, "load_model", None)
        run(config, workdir, stages=["score"])
        assert read(workdir, "table.json") == table
        run(config, workdir)
    assert read(workdir, "table.json") == table and path.read_text() == text


def test_what_is_not_known_any_more_is_left_open(folder):
    config, workdir = folder
    table = read(workdir, "table.json")
    policy, answers = workdir / "policy.safetensors", workdir / "answers/folder/all-tokens.jsonl"
    trained, said = policy.read_bytes(), answers.read_text()
    lines = [json.loads(line) for line in said.splitlines()]
    try:
        save_policy(stepprune(7), policy)  # as after another training
        write_lines(answers, [{k: v for k, v in line.items() if k != "ms"} for line in lines])
        run(config, workdir, stages=["score"])
        found = read(workdir, "table.json")
    finally:
        policy.write_bytes(trained)
        answers.write_text(said)
    assert found[0] == table[0] | {"ms": None}
    assert found[1:] == table[1:]


def test_several_benchmarks_have_the_paper_s_columns(public):
    _, workdir, said = public
    page = (workdir / "report" / "table.md").read_text()
    lines = page.splitlines()
    assert lines[2] == "| tokens | method | mode | MME | POPE | VQAv2 | Avg. |"
    first = [line.split(" | ")[:3] for line in lines[4:8]]
    assert first == [
        ["| 9 (0.0 % pruned)", "all tokens", "exact"],
        ["| own stop", "StepPrune, own stop", "adaptive"],
        ["| 2 (77.8 % pruned)", "StepPrune", "exact"],
        ["| 2 (77.8 % pruned)", "StepPrune", "adaptive"],
    ]
    assert "## Visual tokens kept, mean ± standard deviation" in page and page in said + "\n"
    # Test-dev is scored by its server only, so the column is empty and out of the average.
    assert "is scored by the server only" in page
    assert "- retention excludes VQAv2, where all tokens has no score\n" in page
    found = {(s["benchmark"], s["method"], s["mode"]): s for s in read(workdir, "scores.json")}
    assert len(found) == 12
    whole = [found[name, "all tokens", "exact"]["headline"] for name in ("mme", "pope")]
    for row in read(workdir, "table.json")[1:]:
        mine = [row["mme"], row["pope"]]
        expected = None
        if all(whole):
            expected = 50 * sum(a / b for a, b in zip(mine, whole, strict=True))
        assert row["average"] == (None if expected is None else pytest.approx(expected))
    exact = found["pope", "StepPrune", "exact"]
    assert exact["mean_k"] == 2 and exact["sd_k"] == 0 and exact["ms"] > 0 and exact["gflops"] > 0


def test_submissions_are_written(public):
    _, workdir, said = public
    place = workdir / "submissions"
    rows = json.loads((place / "vqav2" / "all-tokens.json").read_text())
    assert [row["question_id"] for row in rows] == [900, 901, 902, 903, 904]
    assert rows[0]["answer"] == ""
    assert len(list((place / "mme" / "stepprune-exact-77.8").glob("*.txt"))) == 14
    assert not (place / "pope").exists() and "vqav2, all-tokens: llava_vqav2" in said


def test_scoring_alone_needs_no_model(public, monkeypatch, capsys):
    config, workdir, _ = public
    model = dataclasses.replace(config.model, folder=str(workdir / "nowhere"))
    config = dataclasses.replace(config, model=model)
    before = read(workdir, "scores.json")
    (workdir / "report" / "scores.json").unlink()
    monkeypatch.setattr(generate_stage, "load_model", None)
    run(config, workdir, stages=["score"])
    assert read(workdir, "scores.json") == before


def test_unfinished_answers_have_no_score(public, capsys):
    config, workdir, _ = public
    file = workdir / "answers" / "pope" / "stepprune-exact-77.8.jsonl"
    other = workdir / "answers" / "mme" / "stepprune-exact-77.8.jsonl"
    whole, whole_mme = file.read_text(), other.read_text()
    try:
        # As a run that was killed leaves them: the last line torn, and nothing written yet.
        file.write_text("".join(whole.splitlines(keepends=True)[:4]) + whole[:30])
        other.write_text("")
        run(config, workdir, stages=["convert", "score"])
        said = capsys.readouterr().out
        assert f"not converted: {other}: 0 of 28 questions answered\n" in said
        problems = {s["benchmark"]: s for s in read(workdir, "scores.json") if s["problem"]}
        assert problems["mme"]["problem"] == "0 of 28 questions answered so far"
        assert problems["pope"]["problem"] == "4 of 6 questions answered so far"
        assert problems["mme"]["ms"] is None and problems["pope"]["headline"] is None
        run(config, workdir, stages=["generate"])
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        assert texts == [json.loads(line)["text"] for line in whole.splitlines()]
        assert len(other.read_text().splitlines()) == len(whole_mme.splitlines())
    finally:
        file.write_text(whole)
        other.write_text(whole_mme)


def test_the_validation_split_of_vqav2_is_scored_here(public):
    config, workdir, _ = public
    questions = {"vqav2": "vqav2/v2_OpenEnded_mscoco_val2014_questions.json"}
    config = changed(config, benchmarks="vqav2", methods="all tokens", questions=questions)
    run(config, workdir.parent / "val")
    (found,) = read(workdir.parent / "val", "scores.json")
    assert found["problem"] is None and 0 <= found["headline"] <= 100 and found["asked"] == 2


def test_mistakes_are_found_before_the_model_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    config, own = world[0], tmp_path / "policy.safetensors"
    with pytest.raises(FileNotFoundError, match=r"policy.safetensors does not exist; run train"):
        run(config, tmp_path)
    save_policy(stepprune(), own)
    data = dataclasses.replace(config, data=dataclasses.replace(config.data, folder="absent"))
    for bad, error, message in (
        (
            changed(config, rows={"a": "b"}, methods="a"),
            FileNotFoundError,
            "row 'a': no policy file at b",
        ),
        (changed(config, data="nowhere"), FileNotFoundError, "no file at nowhere/pope/llava_pope"),
        (changed(data, benchmarks="folder"), FileNotFoundError, "config.data.folder: no f.*absent"),
        (
            changed(config, budgets=(10,)),
            ValueError,
            "expected at most the 9 visual",
        ),
        (
            changed(config, budgets=(5,)),
            ValueError,
            "expected at most the 4 steps of row",
        ),
    ):
        with pytest.raises(error, match=message):
            run(bad, tmp_path)
    with pytest.raises(ValueError, match=r"--stages is 'guess', expected generate, convert, score"):
        run(config, tmp_path, stages=["guess"])
    with pytest.raises(FileNotFoundError, match=r"no answers to pope, mme, vqav2 in .*: run the"):
        run(config, tmp_path, stages=["score"])
    save_policy(stepprune(text_width=8), own)
    with pytest.raises(ValueError, match=r"row 'StepPrune': .*text_width is 8"):
        run(config, tmp_path)
    save_policy(one_shot(), own)
    with pytest.raises(ValueError, match=r"adaptive is .*, expected rows with a learned stop"):
        run(changed(config, methods="autoselect", adaptive=("AutoSelect-like",)), tmp_path)
