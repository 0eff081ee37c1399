"""The whole evaluation of a run on the shapes world: from policies to tables and a page."""

import dataclasses
import json
import re

import numpy as np
import pytest
from benchmark_files import write_lines
from ml_collections import ConfigDict
from small_world import (
    ROOT,
    one_shot,
    save_all,
    small_run,
    stepprune,
    tiny_model,
    write_answers,
    write_split,
)

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.configurations import load_config
from stepprune_jax.evaluate import evaluate
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.evaluation.report import read_report
from stepprune_jax.evaluation.settings import read_evaluation

# Random weights answer with characters that no font has.
pytestmark = pytest.mark.filterwarnings("ignore:Glyph")
WRONG = (1, 4, 5)
METHODS = "random,grid,cls,visionzip,AutoSelect-like,StepPrune literal,StepPrune,other"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model folder and a data folder."""
    root = tmp_path_factory.mktemp("world")
    tiny_model(root / "model")
    write_split(root / "data", "test", 3, 0)
    write_split(root / "data", "validation", 2, 1)
    return root / "model", root / "data"


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """An evaluation in which all tokens give the right answers, but for some."""
    workdir = tmp_path_factory.mktemp("run")
    rows = save_all(workdir)
    ablations = {"absent": "nowhere.safetensors", "other": rows["StepPrune literal"]}
    config = small_run(*world, rows=rows, ablations=ablations, methods=METHODS)
    (workdir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.MonkeyPatch.context() as patch:  # not drawn: the next one is
        patch.setattr("stepprune_jax.visualize.redraw", lambda report, command: report)
        evaluate(config, workdir)
    said = read_report(workdir / "report").records[0].answer
    right = ["no such" if n in WRONG else text for n, text in enumerate(said)]
    questions = [json.loads(line) for line in (world[1] / "test.jsonl").read_text().splitlines()]
    write_answers(world[1], questions, right)
    evaluate(config, workdir, command="python eval.py --here")
    return config, workdir, read_table(workdir)


def read_table(workdir):
    return json.loads((workdir / "report" / "table.json").read_text())


def test_the_table_has_every_row(run):
    _, workdir, table = run
    heads = [(row["method"], row["mode"], row["pruning_rate"]) for row in table]
    assert heads[0] == ("all tokens", "exact", 0.0)
    assert heads[1][:2] == ("StepPrune, own stop", "adaptive")
    untrained = ["random", "grid", "[CLS] top-K", "VisionZip"]
    exact = [(method, "exact") for method in [*untrained, "AutoSelect-like"]]
    stopping = ("StepPrune literal", "StepPrune")
    both = [(method, mode) for method in stopping for mode in ("exact", "adaptive")]
    block = [*exact, *both, ("other", "exact")]
    assert heads[2:] == [(*head, rate) for rate in (55.6, 77.8) for head in block]
    assert table[0]["accuracy"] == round(100 * 6 / 9, 2) and table[0]["retention"] == 100.0
    assert {row["questions"] for row in table} == {9} and {row["seed"] for row in table} == {3}
    kept = round(9 * table[1]["mean_k"]) / 9  # the table rounds the mean over nine questions
    assert table[1]["pruning_rate"] == round(100 * (1 - kept / 9), 1)
    assert all(row["ms"] > 0 for row in table)
    flops = {(row["method"], row["mode"], row["pruning_rate"]): row["gflops"] for row in table}
    assert flops["random", "exact", 77.8] == flops["grid", "exact", 77.8]
    assert flops["random", "exact", 77.8] < flops["AutoSelect-like", "exact", 77.8]
    assert 0 < flops["random", "exact", 77.8] < flops["random", "exact", 55.6]
    lines = (workdir / "report" / "table.csv").read_text().splitlines()
    assert len(lines) == len(table) + 1


def test_the_report_can_be_read_again(run, world):
    _, workdir, table = run
    report = read_report(workdir / "report")
    assert report.table == table and len(report.records) == len(table)
    assert set(report.grids) == {(3, 3)} and report.metrics_file == workdir / "metrics.jsonl"
    assert len(report.questions) == len(report.scenes) == len(report.answers) == 9
    for row, records in zip(table, report.records, strict=True):
        assert (row["method"], row["mode"]) == (records.method, records.mode)
        assert row["accuracy"] == round(100 * records.correct.mean(), 2)
        assert row["mean_k"] == round(float(records.count.mean()), 2)
    assert np.flatnonzero(~report.records[0].correct).tolist() == list(WRONG)
    statistics = json.loads((workdir / "report" / "statistics.json").read_text())
    assert len(statistics["adaptive"]) == 5 and len(statistics["adaptive_minus_exact"]) == 4
    assert {row["method"] for row in statistics["default_minus"]} == {
        "random",
        "grid",
        "[CLS] top-K",
        "VisionZip",
        "AutoSelect-like",
        "StepPrune literal",
        "other",
    }
    families = json.loads((workdir / "report" / "table_by_family.json").read_text())
    assert set(families[0]["families"]) == {"long", "short"}
    facts = json.loads((workdir / "report" / "report.json").read_text())
    assert len(facts["stop_biases"]) == 5 and facts["stop_biases"]["StepPrune, 55.6"]


def test_the_page_is_drawn(run):
    _, workdir, _ = run
    page = re.sub("<[^<>]*>", "", (workdir / "report" / "index.html").read_text())
    assert "python eval.py --here" in page and "AutoSelect-like" in page
    assert "-m stepprune_jax.generate --model" in page and "--overlay kept.png" in page
    assert (workdir / "report" / "accuracy.png").stat().st_size > 1000


def test_a_second_run_gives_the_same_report(run):
    config, workdir, table = run
    (workdir / "report" / "records" / "99-old.npz").write_bytes(b"left over")
    with pytest.MonkeyPatch.context() as patch:  # nothing is left to answer
        patch.setattr(generate_stage, "load_model", None)
        evaluate(config, workdir)
    assert read_table(workdir) == table
    assert len(read_report(workdir / "report").records) == len(table)


def test_what_is_not_known_any_more_is_left_open(run):
    config, workdir, table = run
    policy = workdir / "policy.safetensors"
    trained, answers = policy.read_bytes(), workdir / "answers" / "shapes" / "all-tokens.jsonl"
    said = answers.read_text()
    lines = [json.loads(line) for line in said.splitlines()]
    try:
        save_policy(stepprune(7), policy)  # as after another training
        for line in lines:
            del line["ms"]
        write_lines(answers, lines)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stepprune_jax.visualize.redraw", lambda report, command: report)
            evaluate(config, workdir, stages=["score"])
    finally:
        policy.write_bytes(trained)
        answers.write_text(said)
    found = read_table(workdir)
    assert found[0] == table[0] | {"ms": None}
    for row, before in zip(found[1:], table[1:], strict=True):
        of_the_run = row["method"].removesuffix(", own stop") == "StepPrune"
        assert row == before | ({"gflops": None} if of_the_run else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepprune_jax.visualize.redraw", lambda report, command: report)
        evaluate(config, workdir, stages=["score"])
    assert read_table(workdir) == table


def test_mistakes_are_found_before_the_model_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    config = small_run(*world)
    with pytest.raises(FileNotFoundError, match=r"policy.safetensors does not exist; run train.py"):
        evaluate(config, tmp_path)
    save_policy(stepprune(), tmp_path / "policy.safetensors")
    bad = small_run(*world, rows={"mine": "absent.safetensors"})
    with pytest.raises(FileNotFoundError, match="for the row 'mine': looked for absent"):
        evaluate(bad, tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "poem.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are not a report's"):
        evaluate(config, tmp_path)
    (tmp_path / "report" / "poem.txt").unlink()
    data = dataclasses.replace(config.data, folder=str(tmp_path / "absent"))
    config = dataclasses.replace(config, data=data)
    with pytest.raises(FileNotFoundError, match=r"config.data.folder: no folder .*absent"):
        evaluate(config, tmp_path)


def test_policies_that_do_not_fit_are_named(world, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    save_policy(stepprune(), tmp_path / "policy.safetensors")
    for fields, message in [
        ({"budgets": (10,)}, "budgets holds 10, the model has 9 visual tokens"),
        ({"budgets": (5,)}, "row 'StepPrune': config.eval.budgets holds 5, .* at most 4 steps"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(small_run(*world, **fields), tmp_path)
    save_policy(stepprune(text_width=8), tmp_path / "policy.safetensors")
    with pytest.raises(ValueError, match=r"row 'StepPrune': .*text_width is 8"):
        evaluate(small_run(*world), tmp_path)
    save_policy(one_shot(), tmp_path / "policy.safetensors")
    with pytest.raises(
        ValueError, match="adaptive names 'StepPrune', whose policy has no learned stop"
    ):
        evaluate(small_run(*world), tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colour": 1}, "config.eval.colour is not a field"),
        ({"budgets": ()}, r"config.eval.budgets is \(\), expected distinct"),
        ({"budgets": (3, 3)}, "expected distinct integers"),
        ({"batch_size": 0}, "config.eval.batch_size is 0, expected an integer from 1"),
        ({"max_new_tokens": 2.5}, "config.eval.max_new_tokens is 2.5"),
        ({"benchmarks": "pope,popes"}, "config.eval.benchmarks is 'pope,popes', expected some of"),
        ({"benchmarks": ""}, "config.eval.benchmarks is '', expected some of gqa, "),
        ({"questions": {"popes": "x"}}, r"config.eval.questions is .*, expected files by name of"),
        ({"methods": "grid,step"}, "config.eval.methods is 'grid,step', expected some of all"),
        ({"methods": "autoselect"}, "'autoselect', expected some of .*, StepPrune$"),
        ({"samples": -1}, "config.eval.samples is -1, expected an integer from 0"),
        ({"validation_questions": -1}, "config.eval.validation_questions is -1"),
        ({"positions": "mixed"}, "positions is 'mixed'"),
        ({"rows": "x"}, "config.eval.rows is 'x', expected a mapping"),
        ({"rows": {"StepPrune": "x"}}, "name StepPrune twice"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        small_run("model", "data", **fields)


def test_settings_have_defaults():
    config = load_config(str(ROOT / "configs" / "shapes.py"))
    with config.unlocked():
        del config.eval
    assert read_evaluation(config).eval.budgets == (48, 32, 16)
    config.eval = ConfigDict({"budgets": (3, 2)})
    found = read_evaluation(config).eval
    assert found.budgets == (3, 2) and found.benchmark_names == ["shapes"]


def test_methods_are_named_by_pruners_or_labels():
    rows = {"AutoSelect-like": "x", "StepPrune literal": "y"}
    methods = "grid,fastv,visionzip,stepprune,AutoSelect"
    settings = small_run("model", "data", methods=methods, rows=rows, benchmarks="pope").eval
    wanted = ["grid", "FastV", "VisionZip", "AutoSelect-like", "StepPrune"]
    assert [label for label in settings.labels if settings.wants(label)] == wanted
    # Of the shapes world all tokens are answered too, for retention is measured against them.
    assert dataclasses.replace(settings, benchmarks="pope,shapes").wants("all tokens")
    assert not settings.wants("all tokens")


def with_data(run, **fields):
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **fields))
