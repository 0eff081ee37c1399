"""The generation stage of an evaluation of public benchmarks and a data folder."""

import dataclasses
import itertools
import json
import re
import shutil
import types
import zlib

import jax
import numpy as np
import pytest
from benchmark_folders import SIZES, write_benchmarks
from hypothesis import given
from hypothesis import strategies as st
from small_world import broken_at, changed, glimpse, one_shot, small_run, stepprune, write_split

from stepprune_jax.benchmarks import BENCHMARKS, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import append, check_claim, claim
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import policy_digest
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli.evaluate import evaluate
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.evaluation.calibrate import CalibrationSet, StopBiases, sample_evenly
from stepprune_jax.evaluation.generate_stage import format_duration, generate_answers, read_tasks
from stepprune_jax.evaluation.rows import Conditions, plan_rows
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.inference import Generator, RunOptions, dataset, encode, generate, read_request
from stepprune_jax.inference.decoding import run_decode
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.inference.programs import run_first_tokens, run_prefill, run_rank
from stepprune_jax.inference.truncation import check_lengths, truncate_prompts
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.pruning import Budget
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import GlimpsePrune

NAMES = ("folder", "pope", "mmbench", "scienceqa", "textvqa")
PUBLIC = NAMES[1:]
METHODS = "all tokens,random,CDPruner,StepPrune,AutoSelect-like,GlimpsePrune"
# All tokens, two budgets of each method, and the rows with a learned stop or a threshold.
ROWS = 15
GLIMPSE = GlimpsePrune.init(
    jax.random.key(1),
    glimpse(selected_layers=(0,), reduce_layer=0, use_attention_logits=True),
    None,
)
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a folder of public benchmarks that is also a data folder."""
    root = write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")
    write_split(root, "test", 3, 0)
    write_split(root, "validation", 4, 1)
    return root


@pytest.fixture(scope="module")
def config(model, root, tmp_path_factory):
    policies = {"AutoSelect-like": one_shot(), "GlimpsePrune": GLIMPSE}
    folder = tmp_path_factory.mktemp("rows")
    return small_run(
        model.folder,
        root,
        benchmarks=",".join(NAMES),
        data=str(root),
        methods=METHODS,
        rows={name: str(save_policy(policy, folder / name)) for name, policy in policies.items()},
        max_new_tokens=3,
        validation_questions=8,
        samples=2,
    )


def read_questions(name, root):
    return BENCHMARKS[name].read_questions(root)


def new_run(folder):
    save_policy(stepprune(), folder / "policy.safetensors")
    return folder


def num_compiled():
    num_prefills = run_first_tokens.num_compiled() + run_prefill.num_compiled()
    return [num_prefills, run_decode.num_compiled(), run_rank.num_compiled()]


@pytest.fixture(scope="module")
def first(config, tmp_path_factory):
    """Returns the folder of a finished run, and the numbers of programs that it compiled."""
    old_counts, workdir = num_compiled(), new_run(tmp_path_factory.mktemp("run"))
    generate_answers(config, workdir)
    return workdir, np.subtract(num_compiled(), old_counts)


@pytest.fixture(scope="module")
def run(first):
    return first[0]


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture
def rankings(monkeypatch):
    """Records each ranking: name of the pruner, number of questions, number of steps."""
    records, rank_all = [], dataset.rank_all

    def recording_rank(model, method, prompts, vision, **options):
        records.append((method.name, len(prompts.length), options["steps"]))
        return rank_all(model, method, prompts, vision, **options)

    monkeypatch.setattr(dataset, "rank_all", recording_rank)
    return records


def lines(run, benchmark, method):
    text = (run / "answers" / benchmark / f"{method}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def files(run):
    """Returns the lines of all answer files by benchmark and row, with times of 0."""
    return {
        (path.parent.name, path.stem): [
            line | {"ms": 0} for line in lines(run, path.parent.name, path.stem)
        ]
        for path in (run / "answers").rglob("*.jsonl")
    }


def provenance(run, benchmark, method):
    return json.loads((run / "answers" / benchmark / f"{method}.json").read_text())


def test_every_row_answers_every_question_in_order(run, root):
    answers = files(run)
    assert len(answers) == len(NAMES) * ROWS
    for (name, _), rows in answers.items():
        questions = read_questions(name, root)
        keys = [(row["question_id"], row["prompt"], row["kept"] > 0) for row in rows]
        assert keys == [(q.question_id, q.prompt, q.image is not None) for q in questions]
    assert all(line["ms"] > 0 for line in lines(run, "pope", "random-exact-55.6"))


@pytest.mark.parametrize(
    "name",
    ["folder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scienceqa", "mmbench"))],
)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("all-tokens", {}),
        ("cdpruner-exact-55.6", {"name": "cdpruner", "budget": 4}),
        ("stepprune-exact-77.8", {"policy": stepprune(), "budget": 2}),
        ("stepprune-adaptive-77.8", {"policy": stepprune()}),
        ("stepprune-own-stop", {"policy": stepprune()}),
        ("glimpseprune-exact-77.8", {"policy": GLIMPSE, "budget": 2}),
        ("glimpseprune-own-stop", {"policy": GLIMPSE, "budget": Budget("adaptive")}),
    ],
)
def test_answers_equal_those_of_generate(run, root, model, name, method, options):
    questions = read_questions(name, root)
    bias = provenance(run, name, method)["stop_bias"]
    expected = generate(
        model,
        [question.text for question in questions],
        [question.image for question in questions],
        build_pruner(**options, stop_bias=bias),
        options=RunOptions(3, "original"),
    )
    rows = lines(run, name, method)
    assert [row["text"] for row in rows] == [answer.text for answer in expected]
    assert [row["kept"] for row in rows] == [answer.kept for answer in expected]
    for row, answer in zip(rows, expected, strict=True):
        assert row.get("order") in (None, list(*answer.kept_indices))
    assert len({row["text"] for row in rows}) > 1


def test_random_selections_depend_on_the_seed_the_image_and_the_question(run, root, config, model):
    key, expected = jax.random.key(config.seed, impl="threefry2x32"), []
    for question in read_questions("folder", root):
        request = read_request(model, [question.text], [question.image], as_shown=False)
        check = zlib.crc32(model.backbone.normalise(request.images.pixels).tobytes())
        check = zlib.crc32(np.array(request.question_ids[0], np.int32).tobytes(), check)
        scores = jax.random.uniform(jax.random.fold_in(key, np.uint32(check)), (9,))
        expected.append(np.argsort(-scores)[:4].tolist())
    orders = [row["order"] for row in lines(run, "folder", "random-exact-55.6")]
    assert orders == expected and len(set(map(tuple, orders))) > 1


def test_adaptive_rows_meet_their_budgets_on_average(run):
    entries = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    folder, public = sorted(entries, key=lambda entry: "split" not in entry)
    # The folder is calibrated on its validation split, the benchmarks on a common sample.
    assert folder["split"] == "validation" and folder["questions"] == public["questions"] == 8
    assert set(folder["biases"]) == set(public["biases"]) == {"4", "2"}
    # The benchmarks contain the calibration questions; the folder's test split does not.
    cases = (PUBLIC, public["biases"], 0.7), (["folder"], folder["biases"], 1)
    for names, biases, tolerance in cases:
        rows = [row for name in names for row in lines(run, name, "stepprune-adaptive-77.8")]
        kept = [row["kept"] for row in rows if row["kept"]]
        assert abs(np.mean(kept) - 2) < tolerance and len(set(kept)) > 1
        card = provenance(run, names[0], "stepprune-adaptive-77.8")
        assert card["stop_bias"] == biases["2"] and card["made"]["positions"] == "original"
    assert provenance(run, "folder", "stepprune-own-stop")["stop_bias"] == 0


def test_selections_are_stored_for_samples_and_for_all_questions_of_a_folder(run):
    rows = lines(run, "textvqa", "stepprune-adaptive-55.6")
    assert [number for number, row in enumerate(rows) if "order" in row] == [0, 2]
    rows += lines(run, "folder", "random-exact-55.6")
    assert all(len(row["order"]) == row["kept"] for row in (rows[0], *rows[4:]))
    assert "order" not in lines(run, "folder", "all-tokens")[0]


def test_rows_share_few_programs_and_none_is_compiled_twice(first, config, copied):
    workdir, num_new = first
    assert (num_new <= [10, 10, 4]).all()
    old_counts = num_compiled()
    shutil.rmtree(copied / "answers" / "folder")
    generate_answers(config, copied)
    assert num_compiled() == old_counts and files(copied) == files(workdir)


# The run is interrupted in the folder, and in a public benchmark.
@pytest.mark.parametrize("appends", [9, 24])
def test_interrupted_runs_resume_with_the_missing_answers(
    run, config, tmp_path, appends, monkeypatch
):
    workdir = new_run(tmp_path)
    config = changed(config, benchmarks="folder,textvqa", methods="random,StepPrune")
    monkeypatch.setattr(encode, "CHUNK", 4)
    (workdir / "answers").mkdir()
    shutil.copy(run / "answers" / "stop_biases.json", workdir / "answers")
    paths, append = [], generate_stage.append

    def interrupted_append(path, rows):
        if len(paths) == appends:
            raise KeyboardInterrupt
        paths.append(path)
        append(path, rows)

    monkeypatch.setattr(generate_stage, "append", interrupted_append)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(config, workdir)
    assert paths[-1].parent.name == ("folder" if appends == 9 else "textvqa")
    for path in (paths[0], paths[-1]):
        path.write_bytes(path.read_bytes()[:-9])  # as an interruption inside a line leaves it
    monkeypatch.setattr(generate_stage, "append", append)
    generate_answers(config, workdir)
    assert len(files(workdir)) == 14 and files(workdir).items() <= files(run).items()


def test_another_policy_is_refused_before_the_model_is_loaded(run, config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    other_policy = save_policy(stepprune(5), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds answers with another provenance.* policy: "):
        generate_answers(config, run, policy=other_policy)
    with pytest.raises(ValueError, match=r"with another provenance.* language_weights: "):
        generate_answers(config.replace({"model.weights": "int8"}), run)


def test_int8_weights_are_loaded_as_such(config):
    model = generate_stage.load_model(config.replace({"model.weights": "int8"}))
    assert model.params["language"]["head"]["kernel"].value.dtype == "int8"
    with pytest.raises(
        ValueError, match=r"^config\.model\.weights is 'int4', expected one of full,"
    ):
        config.replace({"model.weights": "int4"})


def test_the_error_about_bad_logits_comes_after_all_other_answers(
    config, run, root, tmp_path, monkeypatch
):
    """The remaining questions of all rows, and the next benchmark, are answered."""
    load = generate_stage.load_model
    monkeypatch.setattr(generate_stage, "load_model", lambda run: broken_at(load(run), "▁dog"))
    two_benchmarks = changed(config, benchmarks="folder,pope", methods="all tokens,random")
    broken_ids = [q.question_id for q in read_questions("folder", root) if "dog" in q.text]
    assert 0 < len(broken_ids) < 9
    with pytest.raises(ValueError, match=f"^folder: questions? {', '.join(broken_ids)}: the mod"):
        generate_answers(two_benchmarks, tmp_path)
    expected, answers = files(run), files(tmp_path)
    assert len(answers) == 6
    for (benchmark, method), rows in answers.items():
        all_rows = expected[benchmark, method]
        expected_rows = [row for row in all_rows if row["question_id"] not in broken_ids]
        assert rows == expected_rows and (len(rows) == 9 - len(broken_ids) or benchmark == "pope")


def test_a_run_announces_its_answers_and_their_time(config, tmp_path, caplog):
    one_benchmark = changed(config, benchmarks="folder", methods="all tokens,random")
    with caplog.at_level("INFO"):
        generate_answers(one_benchmark, tmp_path)
    assert "folder: 3 rows of 9 questions are 27 answers; fewer with" in caplog.text
    for path in (tmp_path / "answers" / "folder").glob("random-*.jsonl"):
        path.unlink()
    caplog.clear()
    with caplog.at_level("INFO"):
        generate_answers(one_benchmark, tmp_path)
    # The first run has compiled the programs, so the answers have times.
    first, second = [line for line in caplog.messages if line.startswith("folder: ")]
    assert "27 answers; 9 exist already" in first
    assert re.match(r"folder: about \d+ s for the remaining 9 answers at the speed of", second)
    durations = [format_duration(seconds) for seconds in (0.2, 89.0, 120.0, 7200.0)]
    assert durations == ["1 s", "89 s", "2 min", "2.0 h"]


def test_finished_answers_are_scored_and_not_generated_again(run, config, copied, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    path = copied / "answers" / "folder" / "random-exact-55.6.jsonl"
    text = path.read_text()
    # Lines in another order are sorted in the order of the questions.
    path.write_text("".join(text.splitlines(keepends=True)[::-1]))
    evaluate(changed(config, benchmarks="folder,mmbench"), copied)
    assert path.read_text() == text and files(copied) == files(run)
    scores = json.loads((copied / "report" / "scores.json").read_text())
    assert len(scores) == 2 * ROWS
    assert {score["problem"] for score in scores} == {None}
    flops = {s["method"]: s["gflops"] for s in scores if s["benchmark"] == "folder"}
    assert 0 < flops["random"] < flops["AutoSelect-like"] < flops["all tokens"]


def test_stop_biases_of_another_policy_are_added_to_the_cached_ones(
    run, model, root, config, tmp_path
):
    shutil.copy(run / "answers" / "stop_biases.json", tmp_path)
    policies = {"StepPrune": stepprune(5)}
    digests, settings = {"StepPrune": policy_digest(stepprune(5))}, config.eval
    sample = CalibrationSet(
        {}, sample_evenly({"pope": read_questions("pope", root)}, 8), decimals=3
    )
    file = tmp_path / "stop_biases.json"
    biases = StopBiases(file, {"weights": "w"}, digests, settings.budgets)
    assert biases.read_cached(sample) == {}
    new = biases.compute(model, policies, sample, Execution(), 4)
    assert biases.read_cached(sample) == new and set(new["StepPrune"]) == {4, 2}
    old = json.loads((run / "answers" / "stop_biases.json").read_text())["StepPrune"]
    assert json.loads(file.read_text())["StepPrune"][:-1] == old
    # Biases of another sample are separate. Biases of other budgets are added to the entry.
    assert biases.read_cached(CalibrationSet({"sample": "other"}, sample.questions)) == {}
    other_budgets = StopBiases(file, {"weights": "w"}, digests, (4, 3))
    assert other_budgets.read_cached(sample) == {}
    extended = other_budgets.compute(model, policies, sample, Execution(), 4)
    assert extended["StepPrune"][4] == new["StepPrune"][4] and biases.read_cached(sample) == new


def test_stop_biases_depend_on_the_size_of_images(copied, config):
    shutil.rmtree(copied / "answers" / "folder")
    smaller = config.replace({"model.max_pixels": 16**2})
    smaller = changed(smaller, benchmarks="folder", methods="StepPrune", budgets=(2, 1))
    generate_answers(smaller, copied)
    entries = json.loads((copied / "answers" / "stop_biases.json").read_text())["StepPrune"]
    (full_entry,) = (e for e in entries if "split" in e and e["num_tokens"] == 9)
    (small_entry,) = (e for e in entries if "split" in e and e["num_tokens"] == 4)
    assert small_entry["biases"]["2"] != full_entry["biases"]["2"]
    kept = [row["kept"] for row in lines(copied, "folder", "stepprune-adaptive-50")]
    assert abs(np.mean(kept) - 2) < 1


def test_without_a_validation_split_a_policy_has_no_rows_with_mean_budgets(
    config, root, run, tmp_path, caplog
):
    data = shutil.copytree(root, tmp_path / "data")
    (data / "validation.jsonl").unlink()
    settings = changed(config, benchmarks="folder")
    settings = dataclasses.replace(
        settings, data=dataclasses.replace(settings.data, folder=str(data))
    )
    source = settings.model.inspect()
    conditions = Conditions(settings, source, {"StepPrune": stepprune()}, tmp_path)
    (task,) = read_tasks(conditions)
    assert task.sample is None and "validation.jsonl" in caplog.text
    assert [row.mode for row in conditions.rows({}) if row.policy] == ["exact", "exact", "adaptive"]
    assert [row.label for row in conditions.rows({})][-1] == "StepPrune, own stop"


def test_samples_for_stop_biases_are_spread_over_benchmarks(root, config):
    questions = {name: read_questions(name, root) for name in ("pope", "scienceqa")}
    sample = sample_evenly(questions, 4)
    assert sample == [questions["pope"][n] for n in (0, 3)] + [
        questions["scienceqa"][n] for n in (0, 2)
    ]
    # With a limit of 0, all questions with an image.
    assert len(sample_evenly(questions, 0)) == SIZES["pope"] + SIZES["scienceqa"] - 2
    without_images = {"pope": [question._replace(image=None) for question in questions["pope"]]}
    with pytest.raises(ValueError, match="no question of pope has an image"):
        sample_evenly(without_images, 8)
    limited, complete = (
        generate_stage.read_sample(changed(config, validation_questions=limit), "folder")
        for limit in (4, 0)
    )
    assert (len(limited.questions), len(complete.questions)) == (4, 12)
    assert limited.identity != complete.identity


def test_rows_share_one_ranking_per_chunk_and_images_are_encoded_once(
    run, config, copied, rankings, monkeypatch
):
    shutil.rmtree(copied / "answers" / "folder")
    monkeypatch.setattr(encode, "CHUNK", 8)
    image_counts, numbers, encode_questions = [], [], generate_stage.encode_questions

    def recording_encode(model, questions, **options):
        encoded = encode_questions(model, questions, **options)
        image_counts.append(len(encoded.images.features))
        numbers.extend(encoded.prompts.number.tolist())
        return encoded

    monkeypatch.setattr(generate_stage, "encode_questions", recording_encode)
    generate_answers(config, copied)
    # Nine questions about three images, in chunks of eight and one.
    names = ["random", "cdpruner", "autoselect", "stepprune"]
    assert rankings == [(name, count, 4) for count in (8, 1) for name in names]
    assert image_counts == [3, 1] and numbers == list(range(9))
    assert files(copied) == files(run)


def test_only_rows_with_missing_answers_are_computed(run, config, copied, rankings):
    (copied / "answers" / "pope" / "autoselect-like-exact-77.8.jsonl").unlink()
    generate_answers(config, copied)
    assert rankings == [("autoselect", SIZES["pope"], 2)]
    assert files(copied) == files(run)


def test_rows_that_would_share_a_file_are_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_stage, "load_model", None)
    config = changed(config, rows={"Random": config.eval.rows["AutoSelect-like"]}, methods="random")
    with pytest.raises(ValueError, match=r"of 'random' at 4 and of 'Random' at 4: remove one"):
        generate_answers(config, tmp_path)


def test_a_run_with_an_option_that_is_a_list_can_be_resumed(config, model, root, tmp_path):
    options = "pyramiddrop average=False layer_list=[1] image_token_ratio_list=[.5]"
    run = changed(config, methods="pyramiddrop", options=options, rows={})
    conditions = Conditions(run, inspect_folder(model.folder), {}, tmp_path)
    questions = read_questions("folder", root)
    file = conditions.files(conditions.rows({}), BENCHMARKS["folder"], questions)[0]
    claim(file)
    append(file.path, [{"question_id": 0}])
    check_claim(file)


@pytest.mark.parametrize(
    ("mesh", "rows", "methods"),
    [
        ("data", 8, "all tokens"),
        pytest.param("data_tensor", 4, "all tokens,StepPrune", marks=pytest.mark.slow),
    ],
)
def test_devices_share_the_questions(run, config, tmp_path, monkeypatch, mesh, rows, methods):
    config = changed(config, benchmarks="pope", methods=methods, batch_size=1)
    config = dataclasses.replace(config, mesh=mesh)
    batches, answer_set = set(), Generator.answer_set

    def recording_answer(generator, questions, batching, *variants, **options):
        batches.add((batching.batch_size, row_count(mesh_of(generator.model.params))))
        return answer_set(generator, questions, batching, *variants, **options)

    monkeypatch.setattr(Generator, "answer_set", recording_answer)
    generate_answers(config, new_run(tmp_path))
    assert batches == {(rows, rows)}
    # Adaptive rows differ, because their biases depend on all benchmarks of a run.
    answers = {key: lines for key, lines in files(tmp_path).items() if "adaptive" not in key[1]}
    assert answers and answers.items() <= files(run).items()


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 5))
def test_every_question_is_assigned_to_one_process(num_questions, chunk_length, count):
    indices = list(range(3, 3 + num_questions))
    shares = [
        generate_stage.split_chunks(indices, chunk_length, process_index=index, num_processes=count)
        for index in range(count)
    ]
    # Processes wait for each other after each chunk, so all need the same number of chunks.
    assert len({len(chunks) for chunks in shares}) == 1
    assert [index for chunks in shares for chunk in chunks for index in chunk] == indices
    sizes = [sum(map(len, chunks)) for chunks in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(chunk) <= chunk_length for chunks in shares for chunk in chunks)


def test_chunks_are_complete_batches_that_fit_into_memory(model, monkeypatch):
    assert [encode.chunk_size(model, size) for size in (32, 100, 5000)] == [1024, 1000, 5000]
    # A question's features are 9 x 32 numbers of four bytes.
    monkeypatch.setattr(encode, "_CHUNK_BYTES", 9 * 32 * 4 * 70)
    assert [encode.chunk_size(model, size) for size in (1, 32, 100)] == [70, 64, 100]


def fake_clock(patch, module, seconds, num_compiled=lambda: 0):
    """Replaces a module's clock by one that advances by `seconds` per reading."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: seconds * next(ticks))
    patch.setattr(module, "time", clock)
    patch.setattr(module, "num_compiled", num_compiled)


def test_the_time_of_encoding_covers_questions_with_an_image(model, root, monkeypatch):
    fake_clock(monkeypatch, encode, 6.0)
    # Two images are read in six seconds; the tower takes as long for a batch of four.
    encoded = encode_questions(model, read_questions("scienceqa", root), batch_size=4)
    assert encoded.seconds == (6.0 + 6.0 * 2 / 4) / 2
    fake_clock(monkeypatch, encode, 6.0, itertools.count().__next__)
    assert np.isnan(
        encode_questions(model, read_questions("scienceqa", root), batch_size=4).seconds
    )


def test_a_question_takes_as_long_in_a_batch_that_is_not_full(config, tmp_path, monkeypatch):
    # The last of nine questions is alone in a batch of four, whose time is that of a full one.
    fake_clock(monkeypatch, dataset, 6.0)
    fake_clock(monkeypatch, encode, 0.0)
    generate_answers(changed(config, benchmarks="folder", methods="all tokens,random"), tmp_path)
    for method, ms in (("all-tokens", 1500), ("random-exact-55.6", 3000)):
        assert {line["ms"] for line in lines(tmp_path, "folder", method)} == {ms}


def test_questions_without_any_image_are_answered(run, config, root, tmp_path, monkeypatch):
    questions = [q for q in read_questions("scienceqa", root) if q.image is None]
    monkeypatch.setattr(EvaluationRun, "questions", lambda *_: questions)
    config = changed(config, benchmarks="scienceqa", methods="random,AutoSelect-like")
    generate_answers(config, tmp_path)
    for method in ("random-exact-55.6", "autoselect-like-exact-77.8"):
        texts = [row["text"] for row in lines(tmp_path, "scienceqa", method)]
        assert texts == [row["text"] for row in lines(run, "scienceqa", method)[1::2]]


def test_methods_that_the_model_does_not_support_are_skipped_unless_named(config, model):
    def labels(methods, options=""):
        settings = dataclasses.replace(config.eval, methods=methods, options=options)
        return {row.label: row for row in plan_rows(settings, model.config, {}, {}, 3)}

    # FastV prunes after the second layer, which is the last one of the tiny model. PyramidDrop
    # cannot reach its mean, because the first layer has all tokens.
    late_methods = {"FastV", "PyramidDrop"}
    assert {"VisionZip", "SparseVLM"} <= labels("").keys() and not late_methods & labels("").keys()
    with pytest.raises(ValueError, match="fastv: layer is 2, expected 1 to 1"):
        labels("grid,fastv")
    # With suitable options, the model supports both methods.
    rows = labels("", "fastv layer=1; pyramiddrop average=False layer_list=[1]; random seed=5")
    assert rows.keys() == labels("").keys() | late_methods
    assert rows["random"].pruner.seed == 5
    for options, message in {
        "fastv layer": r"config.eval.options: 'layer', expected KEY=VALUE",
        "fastv rank=2": "fastv has no option 'rank'; its options: average, layer",
    }.items():
        with pytest.raises(ValueError, match=message):
            labels("", options)


def test_prompts_beyond_the_context_are_truncated_or_refused(model, root):
    numbers, limit = [7, 8, 9, 10], Llava.CONTEXT_LIMIT
    encoded = encode_questions(
        model, read_questions("scienceqa", root), batch_size=4, numbers=numbers
    )
    prompts, image_tokens = encoded.prompts, encoded.sizes[:, None]
    long = prompts._replace(length=np.full_like(prompts.length, limit))
    message = "prompt 7 of 2056 embeddings was truncated to its first 2048: .*; so were 1 other"
    with pytest.warns(UserWarning, match=message):
        truncated = truncate_prompts(long, image_tokens, limit)
    assert truncated.length.tolist() == [limit - 8, limit] * 2
    check_lengths(truncated, image_tokens, limit)
    with pytest.raises(ValueError, match=f"question 0 takes {limit + 8} embeddings"):
        check_lengths(long, image_tokens, limit)


def test_a_prompt_may_be_longer_than_any_width(model):
    text = "red " * 70_000
    questions = [BenchmarkQuestion(0, text, text, None)]
    message = r"prompt 0 of \d+ embeddings was truncated to its first 2048"
    with pytest.warns(UserWarning, match=message):
        encoded = encode_questions(model, questions, batch_size=1)
    assert encoded.prompts.ids.shape[1] > 1 << 16
