import json
import shutil

import numpy as np
import pytest
from benchmark_folders import SIZES, write_benchmarks
from hypothesis import given
from hypothesis import strategies as st
from small_world import one_shot, small_config, stepprune, tiny_model
from stepprune_jax.evaluation.answers import cut_prompts
from stepprune_jax.evaluation.methods import Making, policy_digest
from stepprune_jax.evaluation.stop_biases import find_biases, known_biases

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.evaluation import generate_stage, split
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.evaluation.settings import read_settings
from stepprune_jax.evaluation.split import encode_split
from stepprune_jax.inference import generate
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT
from stepprune_jax.parallel.placement import mesh_of, row_count

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
        asked = BENCHMARKS[name].read_questions(root)
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
        asked = BENCHMARKS[name].read_questions(root)
        pictures = [generate_stage_picture(q.image) for q in asked]
        said = generate(
            model, [q.text for q in asked], pictures, max_tokens=3, warm_up=False, **options
        )
        rows = lines(run, name, method)
        assert [row["text"] for row in rows] == [answer.text for answer in said]
        assert [row["kept"] for row in rows] == [answer.kept for answer in said]
        assert [row["kept"] == 0 for row in rows] == [q.image is None for q in asked]


def generate_stage_picture(image):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image


def test_adaptive_rows_meet_their_budgets_on_average_over_benchmarks(run):
    (biases,) = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
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


def test_another_policy_is_refused_before_the_model_is_loaded(run, config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    other = save_policy(stepprune(5), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds answers that were made differently.* policy: "):
        generate_answers(config, run, policy=other)


def test_stop_biases_of_another_policy_do_not_replace_those_that_answers_were_made_with(
    run, model, root, config, tmp_path
):
    shutil.copy(run / "answers" / "stop_biases.json", tmp_path)
    policies = {"StepPrune": stepprune(5)}
    asked = {"pope": BENCHMARKS["pope"].read_questions(root)}
    making = Making(
        "tiny", 9, 3, read_settings(config), {"StepPrune": policy_digest(stepprune(5))}, "w", "f"
    )
    assert known_biases(tmp_path, making) == {}
    new = find_biases(
        tmp_path, model, policies, asked, making, batch_size=4, attention="matmul", sizes=(192,)
    )
    assert known_biases(tmp_path, making) == new and set(new["StepPrune"]) == {4, 2}
    old = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    assert json.loads((tmp_path / "stop_biases.json").read_text())["StepPrune"][:-1] == old
    nothing = {"pope": [question._replace(image=None) for question in asked["pope"]]}
    other = making._replace(weights="v")
    with pytest.raises(ValueError, match="no question of pope has a picture"):
        find_biases(
            tmp_path, model, policies, nothing, other, batch_size=4, attention="matmul", sizes=()
        )
    (tmp_path / "stop_biases.json").write_text('{"StepPrune": {"biases": {}}}')
    with pytest.raises(ValueError, match=r"json: 'StepPrune' is not a list of stop biases"):
        known_biases(tmp_path, making)


def test_only_rows_with_something_missing_are_computed(run, config, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "answers" / "pope" / "autoselect-like-exact-55.6.jsonl").unlink()
    rolled, roll_out = [], generate_stage.trained_order

    def counted(model, policy, seen, **options):
        rolled.append((policy.method, len(seen.length)))
        return roll_out(model, policy, seen, **options)

    monkeypatch.setattr(generate_stage, "trained_order", counted)
    generate_answers(config, tmp_path / "run")
    assert rolled == [("autoselect", SIZES["pope"])]
    assert files(tmp_path / "run") == files(run)


def test_rows_that_would_share_a_file_are_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    config = config.copy_and_resolve_references()
    config.eval.rows = {"Random": config.eval.rows["AutoSelect-like"]}
    config.eval.methods = "random"
    with pytest.raises(ValueError, match=r"of 'random' at 4 and of 'Random' at 4: leave out one"):
        generate_answers(config, tmp_path)


def test_a_missing_policy_is_told(config, tmp_path, capsys, monkeypatch):
    settings = read_settings(config)
    with pytest.raises(FileNotFoundError, match=r"policy.safetensors does not exist; run train"):
        generate_stage._policies(settings, tmp_path, None)
    assert not generate_stage._policies(settings._replace(methods="", rows={}), tmp_path, None)
    assert capsys.readouterr().out.startswith("no row 'StepPrune': there is no ")
    # Rows that are not wanted need no file.
    assert not generate_stage._policies(
        settings._replace(methods="grid", rows={"x": "nowhere"}), tmp_path, None
    )


def test_devices_share_the_questions_one_each(run, config, tmp_path):
    config = config.copy_and_resolve_references()
    config.eval.benchmarks, config.eval.methods, config.eval.rows = "pope", "all tokens", {}
    config.eval.batch_size, config.mesh = 1, "data"
    widths, answer = [], generate_stage.answer

    def watched(model, split, selection, how, report):
        widths.append((how.batch_size, row_count(mesh_of(model.params))))
        return answer(model, split, selection, how, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_stage, "answer", watched)
        generate_answers(config, tmp_path)
    assert widths == [(8, 8)]
    found = [line["text"] for line in lines(tmp_path, "pope", "all-tokens")]
    assert found == [line["text"] for line in lines(run, "pope", "all-tokens")]


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 5))
def test_every_question_is_dealt_to_one_process(questions, batch_size, count):
    todo = list(range(3, 3 + questions))
    shares = [generate_stage.share(todo, batch_size, index, count) for index in range(count)]
    assert len({len(chunks) for chunks in shares}) == 1  # they wait for each other after each
    assert [number for chunks in shares for chunk in chunks for number in chunk] == todo
    sizes = [sum(map(len, chunks)) for chunks in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(chunk) <= max(256, batch_size) for chunks in shares for chunk in chunks)


def test_time_is_that_of_questions_with_a_picture(model, root, monkeypatch):
    asked = BENCHMARKS["scienceqa"].read_questions(root)
    monkeypatch.setattr(split, "timed", lambda run, *_: (run(), 6.0))
    assert encode_split(model, asked, batch_size=4).seconds == 6.0 / 2


def test_rows_without_training_need_no_policy(config, tmp_path):
    config = config.copy_and_resolve_references()
    config.eval.benchmarks, config.eval.methods, config.eval.rows = "gqa", "all tokens,grid", {}
    generate_answers(config, tmp_path)
    assert set(files(tmp_path)) == {
        f"answers/gqa/{name}.jsonl" for name in ("all-tokens", "grid-exact-55.6", "grid-exact-77.8")
    }
    assert len(lines(tmp_path, "gqa", "all-tokens")) == SIZES["gqa"]


def test_prompts_beyond_the_context_lose_their_end(model, root):
    asked = BENCHMARKS["scienceqa"].read_questions(root)
    encoded = encode_split(model, asked, batch_size=4)
    length = encoded.length.copy()
    length[:] = CONTEXT_LIMIT
    with pytest.warns(UserWarning, match="question 7 and 1 more take more than 2048 embeddings"):
        cut = cut_prompts(encoded._replace(length=length), 9, [7, 8, 9, 10])
    assert cut.length.tolist() == [CONTEXT_LIMIT - 8, CONTEXT_LIMIT] * 2
