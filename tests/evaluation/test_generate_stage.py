import json

import numpy as np
import pytest
from benchmark_folders import SIZES, write_benchmarks
from small_world import one_shot, small_config, stepprune, tiny_model

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.data.prompts import CONTEXT_LIMIT
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.evaluation.benchmarks import BENCHMARKS
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.evaluation.split import encode_split
from stepprune_jax.generate import generate

NAMES = ("pope", "mmbench", "scienceqa", "textvqa")
METHODS = "all tokens,random,StepPrune,AutoSelect-like"


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """One width for all prompts: the tiny tokenizer makes long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_stage, "WIDTHS", (192,))
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model, root, tmp_path_factory):
    rival = save_policy(one_shot(), tmp_path_factory.mktemp("rows") / "rival.safetensors")
    return small_config(
        model.folder, root, benchmarks=",".join(NAMES), data=str(root), methods=METHODS,
        rows={"AutoSelect-like": str(rival)}, max_new_tokens=3, validation_questions=8, samples=2,
    )  # fmt: skip


def new_run(folder):
    save_policy(stepprune(), folder / "policy.safetensors")
    return folder


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    workdir = new_run(tmp_path_factory.mktemp("run"))
    generate_answers(config, workdir)
    return workdir


def lines(run, benchmark, method):
    text = (run / "answers" / benchmark / f"{method}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def files(run):
    """All lines of all answer files, without their times."""
    return {
        str(path.relative_to(run)): [
            {name: value for name, value in json.loads(line).items() if name != "ms"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted((run / "answers").rglob("*.jsonl"))
    }


def test_every_row_answers_every_question_in_order(run, root):
    found = files(run)
    assert len(found) == len(NAMES) * 10
    for name in NAMES:
        asked = generate_stage.read_questions(BENCHMARKS[name], root)
        for path, rows in found.items():
            if f"/{name}/" in path:
                assert [(r["question_id"], r["prompt"]) for r in rows] == [
                    (q.question_id, q.prompt) for q in asked
                ]
    assert all(line["ms"] > 0 for line in lines(run, "pope", "random-exact-55.6"))


@pytest.mark.parametrize(
    "method, options",
    [
        ("all-tokens", {}),
        ("stepprune-exact-77.8", {"policy": stepprune(), "budget": 2}),
        ("stepprune-own-stop", {"policy": stepprune(), "stop_bias": 0.0}),
        ("autoselect-like-exact-55.6", {"policy": one_shot(), "budget": 4}),
    ],
)
def test_answers_are_those_of_generate(run, root, model, method, options):
    for name in ("scienceqa", "mmbench"):
        asked = generate_stage.read_questions(BENCHMARKS[name], root)
        pictures = [generate_stage_picture(q.image) for q in asked]
        said = generate(
            model, [q.text for q in asked], pictures, max_tokens=3, warm_up=False, **options
        )
        rows = lines(run, name, method)
        assert [row["text"] for row in rows] == [answer.text for answer in said]
        assert [row["kept"] for row in rows] == [answer.kept for answer in said]
    assert {row["kept"] for row in lines(run, "scienceqa", method)} >= {0}


def generate_stage_picture(image):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image


def test_adaptive_rows_meet_their_budgets_on_average_over_benchmarks(run):
    biases = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    assert set(biases["biases"]) == {"4", "2"} and biases["benchmarks"] == list(NAMES)
    kept = [
        row["kept"]
        for name in NAMES
        for row in lines(run, name, "stepprune-adaptive-77.8")
        if row["kept"]
    ]
    assert abs(np.mean(kept) - 2) < 0.7 and len(set(kept)) > 1
    card = json.loads((run / "answers" / "pope" / "stepprune-adaptive-77.8.json").read_text())
    assert card["stop_bias"] == biases["biases"]["2"] and card["made"]["positions"] == "original"


def test_selections_of_samples_are_kept(run):
    rows = lines(run, "textvqa", "stepprune-adaptive-55.6")
    assert [number for number, row in enumerate(rows) if "order" in row] == [0, 2]
    assert len(rows[0]["order"]) == rows[0]["kept"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_interrupted_runs_go_on_with_what_is_missing(
    run, config, tmp_path, batch_size, monkeypatch
):
    workdir, config = new_run(tmp_path), config.copy_and_resolve_references()
    config.eval.batch_size = batch_size
    monkeypatch.setattr(generate_stage, "CHUNK", 4)
    (workdir / "answers").mkdir()
    biases = (run / "answers" / "stop_biases.json").read_text()
    (workdir / "answers" / "stop_biases.json").write_text(biases)
    written, append = [], generate_stage.append

    def stopped(path, rows):
        if len(written) == 17:
            raise KeyboardInterrupt
        written.append(path)
        append(path, rows)

    monkeypatch.setattr(generate_stage, "append", stopped)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(config, workdir)
    cut = written[0]
    cut.write_bytes(cut.read_bytes()[:-9])
    monkeypatch.setattr(generate_stage, "append", append)
    generate_answers(config, workdir)
    assert files(workdir) == files(run)
    # Nothing is left to do: no program runs, though a model is loaded.
    monkeypatch.setattr(generate_stage, "_answer_chunk", None)
    generate_answers(config, workdir)


def test_another_policy_is_refused_before_anything_is_answered(run, config, tmp_path):
    other = save_policy(stepprune(5), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds answers that were made otherwise.* policy: "):
        generate_answers(config, run, policy=other)


def test_rows_without_training_need_no_policy(config, tmp_path):
    config = config.copy_and_resolve_references()
    config.eval.benchmarks, config.eval.methods, config.eval.rows = "gqa", "all tokens,grid", {}
    generate_answers(config, tmp_path)
    assert set(files(tmp_path)) == {
        f"answers/gqa/{name}.jsonl" for name in ("all-tokens", "grid-exact-55.6", "grid-exact-77.8")
    }
    assert len(lines(tmp_path, "gqa", "all-tokens")) == SIZES["gqa"]


def test_prompts_beyond_the_context_lose_their_end(model, root):
    asked = generate_stage.read_questions(BENCHMARKS["scienceqa"], root)
    encoded = encode_split(model, asked, batch_size=4)
    length = encoded.length.copy()
    length[:] = CONTEXT_LIMIT
    with pytest.warns(UserWarning, match="question 7 and 1 more take more than 2048 embeddings"):
        cut = generate_stage._cut(encoded._replace(length=length), 9, [7, 8, 9, 10])
    assert cut.length.tolist() == [CONTEXT_LIMIT - 8, CONTEXT_LIMIT] * 2
