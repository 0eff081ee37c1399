import csv
import dataclasses
import json

import pytest
from benchmark_folders import write_benchmarks
from small_world import changed, save_all, small_run, tiny_model, write_split

from stepprune_jax.evaluate import evaluate as run

# Random weights answer with characters that no font has.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Glyph"),
    pytest.mark.usefixtures("few_programs"),
]
METHODS = "all tokens,StepPrune"
PUBLIC = "pope,mme,vqav2"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration for three public benchmarks and a folder with policies."""
    base = tmp_path_factory.mktemp("base")
    root = write_benchmarks(base / "eval")
    model, workdir = tiny_model(base / "model"), base / "run"
    write_split(base / "data", "test", 3, 0)
    write_split(base / "data", "validation", 2, 1)
    save_all(workdir)
    config = small_run(
        model.folder,
        base / "data",
        benchmarks=PUBLIC,
        data=str(root),
        methods=METHODS,
        max_new_tokens=2,
        validation_questions=6,
        samples=3,
        budgets=(2,),
    )
    return config, workdir


@pytest.fixture(scope="module")
def done(world):
    config, workdir = world
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(words)))
        run(config, workdir, command="python eval.py --here")
    return config, workdir, "\n".join(said)


def scores(workdir):
    return json.loads((workdir / "report" / "scores.json").read_text())


def test_the_report_has_the_paper_s_columns(done):
    _, workdir, said = done
    page = (workdir / "report" / "benchmarks.md").read_text()
    lines = page.splitlines()
    assert lines[2] == "| tokens | method | mode | MME | POPE | VQAv2 | Avg. |"
    first = [line.split(" | ")[:3] for line in lines[4:8]]
    assert first == [
        ["| 9 (0.0 % pruned)", "all tokens", "exact"],
        ["| own stop", "StepPrune, own stop", "adaptive"],
        ["| 2 (77.8 % pruned)", "StepPrune", "exact"],
        ["| 2 (77.8 % pruned)", "StepPrune", "adaptive"],
    ]
    assert "## Visual tokens kept, mean ± standard deviation" in page
    assert "python eval.py --here" in page and "## Scores" in said
    # Test-dev is scored by its server only, so the column is empty and out of the average.
    assert "is scored by the server only" in page
    assert "- Avg. excludes VQAv2, where all tokens has no score\n" in page
    found = {(s["benchmark"], s["method"], s["mode"]): s for s in scores(workdir)}
    assert len(found) == 12
    whole = [found[name, "all tokens", "exact"]["headline"] for name in ("mme", "pope")]
    rows = json.loads((workdir / "report" / "benchmarks.json").read_text())
    for row in rows[1:]:
        mine = [row["mme"], row["pope"]]
        expected = None
        if all(whole):
            expected = 50 * sum(a / b for a, b in zip(mine, whole, strict=True))
        assert row["average"] == (None if expected is None else pytest.approx(expected))
    with (workdir / "report" / "benchmarks.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["method"] for row in table] == [row["method"] for row in rows]
    exact = found["pope", "StepPrune", "exact"]
    assert exact["mean_k"] == 2 and exact["sd_k"] == 0 and exact["ms"] > 0


def test_submissions_are_written(done):
    _, workdir, said = done
    place = workdir / "submissions"
    rows = json.loads((place / "vqav2" / "all-tokens.json").read_text())
    assert [row["question_id"] for row in rows] == [900, 901, 902, 903, 904]
    assert rows[0]["answer"] == ""
    assert len(list((place / "mme" / "stepprune-exact-77.8").glob("*.txt"))) == 14
    assert not (place / "pope").exists() and "vqav2, all-tokens: llava_vqav2" in said


def test_figures_are_drawn(done):
    _, workdir, _ = done
    for name in ("k_pope", "overlays_pope", "k_mme", "k_vqav2", "overlays_vqav2"):
        assert (workdir / "report" / f"{name}.png").stat().st_size > 1000
        assert f"![{name}]({name}.png)" in (workdir / "report" / "benchmarks.md").read_text()


def test_scoring_alone_needs_no_model(done, monkeypatch):
    config, workdir, _ = done
    model = dataclasses.replace(config.model, folder=str(workdir / "nowhere"))
    config = dataclasses.replace(config, model=model)
    before = scores(workdir)
    for name in ("scores.json", "overlays_pope.png"):
        (workdir / "report" / name).unlink()
    monkeypatch.setattr("stepprune_jax.evaluation.generate_stage.load_model", None)
    run(config, workdir, stages=["score"])
    assert scores(workdir) == before
    assert (workdir / "report" / "overlays_pope.png").is_file()


def test_unfinished_answers_have_no_score(done, tmp_path, capsys):
    config, workdir, _ = done
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
        (found,) = [s for s in scores(workdir) if s["problem"] and s["benchmark"] == "mme"]
        assert found["problem"] == "0 of 28 questions answered so far" and found["ms"] is None
        (found,) = [s for s in scores(workdir) if s["problem"] and s["benchmark"] == "pope"]
        assert found["headline"] is None and found["problem"] == "4 of 6 questions answered so far"
        run(config, workdir, stages=["generate"])
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        assert texts == [json.loads(line)["text"] for line in whole.splitlines()]
        assert len(other.read_text().splitlines()) == len(whole_mme.splitlines())
    finally:
        file.write_text(whole)
        other.write_text(whole_mme)


def test_the_validation_split_of_vqav2_is_scored_here(done, capsys):
    config, workdir, _ = done
    questions = {"vqav2": "vqav2/v2_OpenEnded_mscoco_val2014_questions.json"}
    config = changed(config, benchmarks="vqav2", methods="all tokens", questions=questions)
    run(config, workdir.parent / "val")
    assert (workdir.parent / "val" / "answers" / "vqav2" / "all-tokens.jsonl").is_file()
    assert "all-tokens" in capsys.readouterr().out
    (found,) = scores(workdir.parent / "val")
    assert found["problem"] is None and 0 <= found["headline"] <= 100 and found["asked"] == 2


@pytest.mark.slow
def test_the_shapes_world_goes_through_the_same_stages(world, tmp_path, capsys, monkeypatch):
    config, _ = world
    config = changed(config, benchmarks="shapes")
    save_all(tmp_path)
    run(config, tmp_path)
    table = json.loads((tmp_path / "report" / "table.json").read_text())
    found = scores(tmp_path)
    assert len(found) == len(table) == 4
    key = lambda row: (row["method"], row["mode"], row["pruning_rate"])  # noqa: E731
    rows = {key(row): row for row in table}
    for score in found:
        assert round(score["headline"], 2) == rows[key(score)]["accuracy"]
        assert round(score["mean_k"], 2) == rows[key(score)]["mean_k"]
    # The second time nothing is answered, so that no model is needed; the report is the same.
    before = {path.name: path.read_bytes() for path in (tmp_path / "report").glob("*.json")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepprune_jax.evaluation.generate_stage.load_model", None)
        patch.setattr("stepprune_jax.visualize.redraw", lambda report, command: report)
        run(config, tmp_path)
        assert {p.name: p.read_bytes() for p in (tmp_path / "report").glob("*.json")} == before
        # Answers in another order than the questions are put in it before they are reported.
        path = tmp_path / "answers" / "shapes" / "stepprune-adaptive-77.8.jsonl"
        text = path.read_text()
        path.write_text("".join(text.splitlines(keepends=True)[::-1]))
        with pytest.raises(ValueError, match="run the stage generate again, which sorts its lines"):
            run(config, tmp_path, stages=["score"])
        run(config, tmp_path)
        assert path.read_text() == text
        assert {p.name: p.read_bytes() for p in (tmp_path / "report").glob("*.json")} == before
    # Rows of other budgets, as an interrupted run leaves them, do not hold the report up.
    monkeypatch.setattr("stepprune_jax.visualize.redraw", lambda report, command: report)
    file = tmp_path / "answers" / "shapes" / "stepprune-exact-77.8.jsonl"
    other = file.with_name("stepprune-exact-55.6.jsonl")
    card = json.loads(file.with_suffix(".json").read_text())
    other.with_suffix(".json").write_text(json.dumps(card | {"budget": 4}))
    other.write_text(file.read_text().splitlines(keepends=True)[0])
    capsys.readouterr()
    run(config, tmp_path, stages=["score"])
    said = capsys.readouterr().out
    assert "no report" not in said
    *_, last, command = said.splitlines()
    assert last == "Ask the policy yourself:"
    assert f"--policy {tmp_path / 'policy.safetensors'}" in command and "--overlay" in command
    # One of this run's rows does.
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    run(config, tmp_path, stages=["score"])
    assert f"no report on shapes: the answers of {file} are incomplete" in capsys.readouterr().out
    assert json.loads((tmp_path / "report" / "table.json").read_text()) == table


def test_a_report_without_the_default_row_has_tables_and_no_figures(world, tmp_path, capsys):
    config, _ = world
    config = changed(config, benchmarks="shapes", methods="grid")
    run(config, tmp_path)
    assert "no figures without the row 'StepPrune'" in capsys.readouterr().out
    table = json.loads((tmp_path / "report" / "table.json").read_text())
    assert [row["method"] for row in table] == ["all tokens", "grid"]
    assert not (tmp_path / "report" / "index.html").exists()


def test_mistakes_are_reported_before_anything_is_loaded(world, tmp_path):
    config, _ = world
    save_all(tmp_path)
    with pytest.raises(ValueError, match=r"--stages is 'guess', expected generate, convert, score"):
        run(config, tmp_path, stages=["guess"])
    with pytest.raises(FileNotFoundError, match=r"no answers to pope, mme, vqav2 in .*: run the"):
        run(config, tmp_path, stages=["score"])
    config = changed(config, data=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no file at .*nowhere/pope/llava_pope_test"):
        run(config, tmp_path)
