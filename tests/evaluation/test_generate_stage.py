import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from benchmark_folders import SIZES, write_benchmarks
from hypothesis import given
from hypothesis import strategies as st
from small_world import changed, one_shot, small_run, stepprune, write_split

from stepprune_jax.benchmarks import BENCHMARKS, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import append, check_claim, claim
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.evaluation import encode, generate_stage
from stepprune_jax.evaluation.calibrate import Sample, StopBiases, spread
from stepprune_jax.evaluation.encode import cut_prompts, encode_questions
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.evaluation.rows import Conditions, plan_rows, policy_digest
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.models.llava import LLAVA
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.pruning import make_method

NAMES = ("folder", "pope", "mmbench", "scienceqa", "textvqa")
PUBLIC = NAMES[1:]
METHODS = "all tokens,random,StepPrune,AutoSelect-like"
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Public benchmarks and, in the same folder, a data folder."""
    root = write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")
    write_split(root, "test", 3, 0)
    write_split(root, "validation", 4, 1)
    return root


@pytest.fixture(scope="module")
def config(model, root, tmp_path_factory):
    other = save_policy(one_shot(), tmp_path_factory.mktemp("rows") / "other.safetensors")
    return small_run(
        model.folder,
        root,
        benchmarks=",".join(NAMES),
        data=str(root),
        methods=METHODS,
        rows={"AutoSelect-like": str(other)},
        max_new_tokens=3,
        validation_questions=8,
        samples=2,
    )


def asked_by(name, root):
    return BENCHMARKS[name].read_questions(root)


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
        asked = asked_by(name, root)
        for path, rows in found.items():
            if f"/{name}/" in path:
                assert [(r["question_id"], r["prompt"]) for r in rows] == [
                    (q.question_id, q.prompt) for q in asked
                ]
    assert all(line["ms"] > 0 for line in lines(run, "pope", "random-exact-55.6"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, options",
    [
        ("all-tokens", {}),
        ("stepprune-exact-77.8", {"policy": stepprune(), "budget": 2}),
        ("stepprune-own-stop", {"policy": stepprune(), "stop_bias": 0.0}),
    ],
)
def test_answers_are_those_of_generate(run, root, model, method, options):
    for name in ("folder", "scienceqa", "mmbench"):
        asked = asked_by(name, root)
        images = [question.image for question in asked]
        how = RunOptions(3, warm_up=False)
        said = generate(model, [q.text for q in asked], images, make_method(**options), options=how)
        rows = lines(run, name, method)
        assert [row["text"] for row in rows] == [answer.text for answer in said]
        assert [row["kept"] for row in rows] == [answer.kept for answer in said]
        assert [row["kept"] == 0 for row in rows] == [q.image is None for q in asked]


def test_random_rows_are_those_of_the_seed_and_the_number_of_the_question(run, root, config):
    shown = len(asked_by("folder", root))
    drawn = jax.random.uniform(jax.random.key(config.seed), (shown, 9))
    for row, order in zip(
        lines(run, "folder", "random-exact-55.6"), np.argsort(drawn, axis=1).tolist(), strict=True
    ):
        assert row["order"] == order[:4]


def test_adaptive_rows_meet_their_budgets_on_average(run):
    entries = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    drawn, public = sorted(entries, key=lambda entry: "split" not in entry)
    # Of the folder on its validation split, else on as many questions of each benchmark.
    assert drawn["split"] == "validation" and drawn["questions"] == 8
    assert public["questions"] == 8 and drawn["biases"] != public["biases"]
    assert set(drawn["biases"]) == set(public["biases"]) == {"4", "2"}
    # On the questions that the biases were computed on, and on some of another split.
    for names, biases, near in (
        (PUBLIC, public["biases"], 0.7),
        (["folder"], drawn["biases"], 1.0),
    ):
        kept = [
            row["kept"]
            for name in names
            for row in lines(run, name, "stepprune-adaptive-77.8")
            if row["kept"]
        ]
        assert abs(np.mean(kept) - 2) < near and len(set(kept)) > 1
        path = run / "answers" / names[0] / "stepprune-adaptive-77.8.json"
        card = json.loads(path.read_text())
        assert card["stop_bias"] == biases["2"] and card["made"]["positions"] == "original"


def test_selections_are_kept_of_samples_and_of_all_drawn_images(run):
    rows = lines(run, "textvqa", "stepprune-adaptive-55.6")
    assert [number for number, row in enumerate(rows) if "order" in row] == [0, 2]
    assert len(rows[0]["order"]) == rows[0]["kept"]
    assert all(
        len(row["order"]) == row["kept"] for row in lines(run, "folder", "random-exact-55.6")
    )
    assert "order" not in lines(run, "folder", "all-tokens")[0]


# Stopped within the folder, and within a public benchmark.
@pytest.mark.parametrize(
    ("batch_size", "appends", "names"),
    [(1, 20, ("folder", "textvqa")), pytest.param(4, 37, NAMES, marks=pytest.mark.slow)],
)
def test_interrupted_runs_resume_with_what_is_missing(
    run, config, tmp_path, batch_size, appends, names, monkeypatch
):
    workdir, config = new_run(tmp_path), changed(config, batch_size=batch_size)
    config = changed(config, benchmarks=",".join(names))
    monkeypatch.setattr(encode, "CHUNK", 4)
    (workdir / "answers").mkdir()
    biases = (run / "answers" / "stop_biases.json").read_text()
    (workdir / "answers" / "stop_biases.json").write_text(biases)
    written, append = [], generate_stage.append

    def stopped(path, rows):
        if len(written) == appends:
            raise KeyboardInterrupt
        written.append(path)
        append(path, rows)

    monkeypatch.setattr(generate_stage, "append", stopped)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(config, workdir)
    assert written[-1].parent.name == ("folder" if appends == 20 else "pope")
    for cut in (written[0], written[-1]):
        cut.write_bytes(cut.read_bytes()[:-9])
    monkeypatch.setattr(generate_stage, "append", append)
    generate_answers(config, workdir)
    whole = {path: rows for path, rows in files(run).items() if path.split("/")[1] in names}
    assert files(workdir) == whole


def test_another_policy_is_refused_before_the_model_is_loaded(run, config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    other = save_policy(stepprune(5), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds answers of another provenance.* policy: "):
        generate_answers(config, run, policy=other)


def test_stop_biases_of_another_policy_do_not_replace_those_that_answers_were_made_with(
    run, model, root, config, tmp_path
):
    shutil.copy(run / "answers" / "stop_biases.json", tmp_path)
    policies = {"StepPrune": stepprune(5)}
    digests, settings = {"StepPrune": policy_digest(stepprune(5))}, config.eval
    sample = Sample({}, spread({"pope": asked_by("pope", root)}, 8), decimals=3)
    file = tmp_path / "stop_biases.json"
    biases = StopBiases(file, "w", digests, settings.budgets)
    assert biases.known(sample) == {}
    new = biases.compute(model, policies, sample, Execution(), 4)
    assert biases.known(sample) == new and set(new["StepPrune"]) == {4, 2}
    old = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    assert json.loads(file.read_text())["StepPrune"][:-1] == old
    # Another sample is another matter, other budgets are added to what is known.
    other = Sample({"split": "validation", "sample": "other"}, sample.questions)
    assert biases.known(other) == {}
    more = StopBiases(file, "w", digests, (4, 3))
    assert more.known(sample) == {}
    assert (
        more.compute(model, policies, sample, Execution(), 4)["StepPrune"][4] == new["StepPrune"][4]
    )
    assert biases.known(sample) == new


def test_samples_for_stop_biases_are_spread_over_benchmarks(root):
    asked = {name: asked_by(name, root) for name in ("pope", "scienceqa")}
    some = spread(asked, 4)
    assert some == [asked["pope"][n] for n in (0, 3)] + [asked["scienceqa"][n] for n in (0, 2)]
    # All of them, but for those without an image.
    assert len(spread(asked, 0)) == SIZES["pope"] + SIZES["scienceqa"] - 2
    nothing = {"pope": [question._replace(image=None) for question in asked["pope"]]}
    with pytest.raises(ValueError, match="no question of pope has an image"):
        spread(nothing, 8)


def test_stop_biases_are_calibrated_on_all_questions_or_some(config):
    def sample(**fields):
        return generate_stage.read_sample(changed(config, **fields), "folder")

    some, whole = sample(validation_questions=4), sample(validation_questions=0)
    assert (len(some.questions), len(whole.questions)) == (4, 12) and some.about != whole.about


def test_rows_share_one_ranking_a_chunk_and_the_tower_sees_an_image_once(
    run, config, tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    shutil.rmtree(workdir / "answers" / "folder")
    monkeypatch.setattr(encode, "CHUNK", 8)
    ranked, encoded, seen = [], [], []
    rank, tower = generate_stage.rank_all, generate_stage.encode_questions

    def ranking(model, method, prompts, vision, **options):
        ranked.append((method.pruner.name, len(prompts.length)))
        return rank(model, method, prompts, vision, **options)

    def encoding(model, questions, **options):
        found = tower(model, questions, **options)
        encoded.append(len(found.images.features))
        seen.extend(found.prompts.number.tolist())
        return found

    monkeypatch.setattr(generate_stage, "rank_all", ranking)
    monkeypatch.setattr(generate_stage, "encode_questions", encoding)
    generate_answers(config, workdir)
    # Nine questions on three images, in chunks of eight and one.
    names = ["random", "autoselect", "stepprune"]
    assert ranked == [(name, 8) for name in names] + [(name, 1) for name in names]
    assert encoded == [3, 1] and seen == list(range(9))
    assert files(workdir) == files(run)


def test_only_rows_with_something_missing_are_computed(run, config, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "answers" / "pope" / "autoselect-like-exact-55.6.jsonl").unlink()
    ranked, rank = [], generate_stage.rank_all

    def counted(model, method, prompts, vision, **options):
        ranked.append((method.pruner.name, len(prompts.length), options["steps"]))
        return rank(model, method, prompts, vision, **options)

    monkeypatch.setattr(generate_stage, "rank_all", counted)
    generate_answers(config, tmp_path / "run")
    assert ranked == [("autoselect", SIZES["pope"], 4)]
    assert files(tmp_path / "run") == files(run)


def test_rows_that_would_share_a_file_are_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    config = changed(config, rows={"Random": config.eval.rows["AutoSelect-like"]}, methods="random")
    with pytest.raises(ValueError, match=r"of 'random' at 4 and of 'Random' at 4: remove one"):
        generate_answers(config, tmp_path)


def test_a_run_with_an_option_that_is_a_list_can_be_resumed(config, model, root, tmp_path):
    options = "pyramiddrop average=False layer_list=[1] image_token_ratio_list=[.5]"
    run = changed(config, methods="pyramiddrop", options=options, rows={})
    conditions = Conditions(run, inspect_folder(model.folder), {}, tmp_path)
    questions = asked_by("folder", root)
    file = conditions.files(conditions.rows({}), BENCHMARKS["folder"], questions)[0]
    claim(file)
    append(file.path, [{"question_id": 0}])
    check_claim(file)


def test_devices_share_the_questions_one_each(run, config, tmp_path):
    config = changed(config, benchmarks="pope", methods="all tokens", rows={}, batch_size=1)
    config = dataclasses.replace(config, mesh="data")
    widths, answer = [], generate_stage.answer_all

    def watched(model, method, prompts, images, options, batching, **more):
        widths.append((batching.batch_size, row_count(mesh_of(model.params))))
        return answer(model, method, prompts, images, options, batching, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_stage, "answer_all", watched)
        generate_answers(config, tmp_path)
    assert widths == [(8, 8)]
    found = [line["text"] for line in lines(tmp_path, "pope", "all-tokens")]
    assert found == [line["text"] for line in lines(run, "pope", "all-tokens")]


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 5))
def test_every_question_is_dealt_to_one_process(questions, size, count):
    todo = list(range(3, 3 + questions))
    shares = [generate_stage.share(todo, size, index, count) for index in range(count)]
    assert len({len(chunks) for chunks in shares}) == 1  # they wait for each other after each
    assert [number for chunks in shares for chunk in chunks for number in chunk] == todo
    sizes = [sum(map(len, chunks)) for chunks in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(chunk) <= size for chunks in shares for chunk in chunks)


def test_chunks_are_whole_batches_that_fit_into_memory(model, monkeypatch):
    assert [encode.chunk_size(model, size) for size in (1, 32, 100, 1000, 5000)] == [
        1024,
        1024,
        1000,
        1000,
        5000,
    ]
    # A question's features are 9 x 32 numbers of four bytes.
    monkeypatch.setattr(encode, "_CHUNK_BYTES", 9 * 32 * 4 * 70)
    assert [encode.chunk_size(model, size) for size in (1, 32, 100)] == [70, 64, 100]


def test_time_is_that_of_questions_with_an_image(model, root, monkeypatch):
    monkeypatch.setattr(encode, "timed", lambda run: (run(), 6.0))
    # Two images are read in six seconds; the tower takes as long for a batch of four.
    encoded = encode_questions(model, asked_by("scienceqa", root), batch_size=4)
    assert encoded.seconds == (6.0 + 6.0 * 2 / 4) / 2


def test_questions_without_any_image_are_answered(run, model, config, root, tmp_path, monkeypatch):
    asked = [question for question in asked_by("scienceqa", root) if question.image is None]
    monkeypatch.setattr(EvaluationRun, "questions", lambda *_: asked)
    config = changed(config, benchmarks="scienceqa", methods="random,AutoSelect-like")
    generate_answers(config, tmp_path)
    for method in ("random-exact-55.6", "autoselect-like-exact-77.8"):
        said = [row["text"] for row in lines(tmp_path, "scienceqa", method)]
        assert said == [row["text"] for row in lines(run, "scienceqa", method)[1::2]]


def test_methods_that_the_model_cannot_carry_are_left_out_unless_named(config, model):
    settings, seed = config.eval, 3

    def rows(**changes):
        changed = dataclasses.replace(settings, benchmarks="pope", **changes)
        return plan_rows(changed, model.config, {}, {}, seed)

    def labels(methods, options=""):
        return {row.label for row in rows(methods=methods, options=options)}

    # FastV drops tokens behind the second layer, of which the tiny model has no more; where both
    # layers count, the first one alone takes more than PyramidDrop's mean.
    before = {"all tokens", "random", "grid", "downsample", "[CLS] top-K", "VisionZip"}
    between = {"SparseVLM", "SparseVLM v2"}
    assert labels("") == before | between | {
        "PruMerge",
        "PruMerge+",
        "HoloV",
        "DivPrune",
        "CDPruner",
    }
    assert labels("grid") == {"grid"}
    with pytest.raises(ValueError, match="fastv: layer is 2, expected 1 to 1"):
        labels("grid,fastv")
    # Unless options say otherwise.
    given = "fastv layer=1; pyramiddrop average=False layer_list=[1]; random seed=5"
    assert labels("", given) == labels("") | {"FastV", "PyramidDrop"}
    (own,) = {row.method.pruner.seed for row in rows(methods="random", options=given)}
    assert own == 5
    for options, message in {
        "fastv layer": r"config.eval.options: 'layer', expected KEY=VALUE",
        "fastv rank=2": "fastv has no option 'rank'; its options: average, layer",
    }.items():
        with pytest.raises(ValueError, match=message):
            labels("", options)


def test_prompts_beyond_the_context_lose_their_end(model, root):
    encoded = encode_questions(
        model, asked_by("scienceqa", root), batch_size=4, numbers=[7, 8, 9, 10]
    )
    prompts = encoded.prompts
    long = prompts._replace(length=np.full_like(prompts.length, LLAVA.CONTEXT_LIMIT))
    with pytest.warns(UserWarning, match="question 7 and 1 more take more than 2048 embeddings"):
        cut = cut_prompts(encoded._replace(prompts=long), LLAVA.CONTEXT_LIMIT)
    assert cut.prompts.length.tolist() == [LLAVA.CONTEXT_LIMIT - 8, LLAVA.CONTEXT_LIMIT] * 2


def test_a_prompt_may_be_longer_than_any_width(model):
    text = "red " * 70_000
    ids = encode_questions(
        model, [BenchmarkQuestion(0, text, text, None)], batch_size=1
    ).prompts.ids
    assert ids.shape[1] > 1 << 16
