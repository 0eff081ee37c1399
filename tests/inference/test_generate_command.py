import dataclasses
import io
import json
import sys
import warnings

import numpy as np
import pytest
from commands import status
from generation_reference import random_image
from PIL import Image
from small_world import broken_at, stepprune
from visual import as_a_phone_stores

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy, save_policy
from stepprune_jax.cli.generate import main
from stepprune_jax.inference import Generator, RunOptions, generate, read_request, trace_arrays
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors.calibration import Calibration

NAME, SIX = "stepprune-generate", RunOptions(max_tokens=6)


@pytest.fixture(scope="module")
def files(tmp_path_factory, llava_folder):
    """A folder with a model, two images and a policy."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "model").symlink_to(llava_folder)
    random_image(1).save(folder / "1.png")
    stored = as_a_phone_stores(random_image(2))
    stored.save(folder / "2.png", exif=stored.getexif())
    (folder / "broken.png").write_bytes((folder / "1.png").read_bytes()[:80])
    save_policy(stepprune(), folder / "policy")
    return folder


def run(files, *arguments, images=("1.png",)):
    image_flags = [part for name in images for part in ("--image", files / name)]
    flags = ("--max_tokens", 6, "--dtype", "float32")
    return status(NAME, main, "--model", files / "model", *image_flags, *flags, *arguments)


def as_json(files, capsys, *arguments, **options):
    assert run(files, "--json", *arguments, **options) == 0
    return json.loads(capsys.readouterr().out)


def test_the_answer_and_then_the_figures(files, llava_model, capfd):
    pruning = ("--policy", files / "policy", "--budget", 3)
    assert run(files, "--prompt", "red dog?", *pruning) == 0
    *text, figures = capfd.readouterr().out.rstrip("\n").split("\n")
    method = build_pruner(None, 3, policy=load_policy(files / "policy"))
    (expected,) = generate(llava_model, ["red dog?"], [files / "1.png"], method, options=SIX)
    assert "\n".join(text) == expected.text
    assert figures.startswith("[kept 3 of 9 visual tokens, first token after ")
    assert figures.endswith("tokens/s]")


def test_one_json_object_a_trace_and_an_overlay(files, llava_model, capfd):
    names, traces = ("1.png", "2.png"), []
    trace, overlay = files / "trace.npz", files / "kept.png"
    options = ("--pruner", "fastv", "--budget", 3, "--pruner_options", "layer=1")
    outputs = ("--trace", trace, "--overlay", overlay)
    assert run(files, "--prompt", "two?", "--json", *options, *outputs, images=names) == 0
    out, err = capfd.readouterr()
    assert "loading model" in err
    method, images = build_pruner("fastv", 3, options={"layer": 1}), [files / n for n in names]
    record = lambda result: traces.append(trace_arrays(result))  # noqa: E731
    (expected,) = generate(llava_model, ["two?"], [images], method, options=SIX, trace=record)
    record_of_answer = json.loads(out)
    expected_fields = {"model": str(files / "model"), "policy": None, "budget": "3"}
    expected_fields |= {"pruner": "fastv", "pruner_options": {"layer": "1"}}
    expected_fields |= json.loads(json.dumps(expected._asdict()))
    assert record_of_answer.items() >= expected_fields.items()
    assert record_of_answer["ttft_ms"] > record_of_answer["compile_ms"] >= 0
    assert record_of_answer["tokens_per_s"] > 0
    with np.load(trace) as arrays:
        assert set(arrays) == set(traces[0])
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, traces[0][name])
        assert arrays["logits"].argmax() == record_of_answer["token_ids"][0]
    with Image.open(overlay) as image:
        assert image.width > image.height


def test_a_mean_budget_is_a_bias_of_the_calibration(files, capsys):
    policy = load_policy(files / "policy")
    table = Calibration((1.0, 4.0), (6.0, -6.0), (1.0, 0.0), (0.0, 1.0), 9.0, 5)
    save_policy(policy.replace(calibration=table), files / "calibrated")
    question = ("--prompt", "two?", "--policy", files / "calibrated")
    kept_indices = [
        as_json(files, capsys, *question, *budget)["kept_indices"]
        for budget in (("--mean_budget", 2.5), ("--stop_bias", 0.0), ("--budget", "mean:2.5"))
    ]
    assert kept_indices[0] == kept_indices[1] == kept_indices[2]
    assert len(kept_indices[0][0]) in range(1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(files, *question, "--mean_budget", 3.99) == 0
    assert capsys.readouterr().err.count("warning: at a mean of 3.99 tokens the count of") == 1


def test_sampling_is_repeatable_from_the_command_line(files, capsys):
    question = ("--prompt", "two?", "--temperature", 1.5, "--top_p", 0.95)
    texts = [as_json(files, capsys, *question, "--seed", n)["token_ids"] for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_system_speaks_as_it_is_told_to(files, llava_model, capsys, monkeypatch):
    request = read_request(llava_model, ["two?"], [files / "1.png"], system="be a red dog")
    (expected,) = Generator(llava_model, options=SIX).answer(request)
    question = ("--prompt", "two?", "--system", "be a red dog")
    answer = as_json(files, capsys, *question)
    assert (answer["system"], answer["token_ids"]) == ("be a red dog", [*expected.token_ids])
    assert answer["token_ids"] != as_json(files, capsys, "--prompt", "two?")["token_ids"]
    monkeypatch.setattr(sys, "stdin", None)
    assert run(files, *question, "--interactive") == 0
    assert capsys.readouterr().out.startswith(f"{expected.text}\n[kept 9 of 9")
    assert run(files, *question[:2], "--system", "<image>") == 2
    assert "<image> is not allowed in the system prompt" in capsys.readouterr().err


def test_a_conversation_until_exit(files, llava_model, capsys, monkeypatch):
    lines = b"What is this?\n\n<image> <image> dog\nr\xffd\nred\nexit\nnot asked\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    assert run(files, "--interactive", "--positions", "compact") == 0
    out, err = capsys.readouterr()
    assert out.count("[kept 9 of 9 visual tokens") == 2
    assert "2 <image>, but 1 image(s) are given" in err
    assert "the prompt is not UTF-8 text: '\\udcff'" in err
    images, options = [files / "1.png"], RunOptions(6, "compact")
    (first,) = generate(llava_model, ["What is this?"], images, options=options)
    turns = ["What is this?", first.text, "red"]
    (second,) = generate(llava_model, [turns], images, options=options)
    answer_lines = [line for line in out.split("\n") if line and not line.startswith("[kept")]
    assert answer_lines == [x for x in f"{first.text}\n{second.text}".split("\n") if x]


@pytest.mark.parametrize("stdin", [None, io.StringIO("")], ids=["closed", "empty"])
def test_without_stdin_only_the_first_prompt_is_answered(files, capsys, monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(files, "--interactive", "--prompt", "two?", images=()) == 0
    assert capsys.readouterr().out.count("[kept 0 of 0 visual tokens") == 1


def test_int8_weights_are_those_of_the_library(files, capsys):
    answer = as_json(files, capsys, "--prompt", "two?", "--weights", "int8")
    loading = {"dtype": "float32", "weights": "int8", "progress": False}
    model = load_vlm(files / "model", **loading)
    (expected,) = generate(model, ["two?"], [files / "1.png"], options=SIX)
    assert (answer["language_weights"], answer["token_ids"]) == ("int8", [*expected.token_ids])
    assert as_json(files, capsys, "--prompt", "two?")["language_weights"] == "full"
    assert run(files, "--prompt", "two?", "--weights", "int4") == 2
    assert "argument --weights: invalid choice: 'int4' (choose from" in capsys.readouterr().err


def test_a_mesh_by_name(files, capsys):
    question = ("--prompt", "two?")
    unsharded, sharded = (
        as_json(files, capsys, *question, *m) for m in ((), ("--mesh", "data_tensor"))
    )
    assert unsharded["token_ids"] == sharded["token_ids"]
    assert run(files, *question, "--mesh", "tensor") == 2
    out, err = capsys.readouterr()
    assert out == "" and "not divisible by the 8 devices" in err


MISTAKES = {
    "no model": (["--prompt", "a", "--model", "/absent"], "no folder /absent"),
    "no prompt": ([], "--prompt is missing"),
    "marks": (["--prompt", "<image> <image> a"], "2 <image>, but 1 image"),
    "broken image": (["--prompt", "a", "--image", "{}/broken.png"], "damaged image"),
    "pixels": (["--prompt", "a", "--min_pixels", "9"], "min_pixels is 9, expected none, as this"),
    "trace alone": (["--prompt", "a", "--trace", "{}/t.npz"], "--trace requires --json"),
    "trace": (["--prompt", "a", "--json", "--trace", "{}/no/t.npz"], "expected a .npz file"),
    "overlay": (["--interactive", "--overlay", "{}/o.png"], "requires one --prompt"),
    "two budgets": (
        ["--prompt", "a", "--mean_budget", "3", "--budget", "3"],
        "--budget and --mean_budget are given",
    ),
    "long": (["--prompt", "a", "--max_tokens", "1000000000"], "an integer from 1 to 256, the"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_before_weights_are_loaded(files, capsys, monkeypatch, case):
    arguments, message = MISTAKES[case]

    def refuse(*_):
        raise AssertionError("weights were loaded")

    monkeypatch.setitem(main.__globals__, "load_params", refuse)
    assert run(files, *(argument.format(files) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepprune-generate: error: ") and err.count("\n") == 1
    assert message in err


QUESTIONS = ("red dog?", "two?", "is it a cat?", "yes or no?", "what color?")


def ask(files, *arguments):
    # Without draws, which depend on a question's number.
    flags = ("--policy", files / "policy", "--budget", 3, "--pruner_options", "draw=0")
    flags += ("--max_tokens", 6, "--dtype", "float32")
    return status(NAME, main, "--model", files / "model", *flags, "--batch_size", 2, *arguments)


@pytest.fixture
def questions(files, question_file, tmp_path):
    """The flags for a file of questions. The last one is the file of the answers."""
    flags = ("--questions", question_file, "--image_folder", files)
    return (*flags, "--out", tmp_path / "out.jsonl")


def read_answers(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def question_file(files, tmp_path):
    lines = [
        {"question_id": f"q{n}", "image": f"{n % 2 + 1}.png", "text": text}
        for n, text in enumerate(QUESTIONS)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_of_questions_is_resumed(files, llava_model, questions, monkeypatch, capfd):
    """Each answer equals the answer to one question, in the first call and after a kill."""
    *_, out = questions
    assert ask(files, *questions) == 0
    answers = read_answers(out)
    policy = load_policy(files / "policy")
    for number, line in enumerate(answers):
        image = random_image(number % 2 + 1)
        method = build_pruner(None, 3, policy=policy, options={"draw": 0})
        (answer,) = generate(llava_model, [QUESTIONS[number]], [image], method, options=SIX)
        assert (line["question_id"], line["text"]) == (f"q{number}", answer.text)
        assert (line["kept"], line["visual_tokens"], line["pruner"]) == (3, 9, "stepprune")
        assert line["kept_indices"] == [*answer.kept_indices[0]]
        assert line["ms"] is None or line["ms"] > 0
    # A call that was killed within its third line has two answers.
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    assert ask(files, *questions) == 0
    resumed = read_answers(out)
    assert resumed[-1]["ms"] > 0  # nothing was compiled any more
    without_time = {"ms": 0}
    assert [line | without_time for line in resumed] == [line | without_time for line in answers]
    assert out.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    monkeypatch.setattr("stepprune_jax.cli.generate.load_params", None)  # not needed any more
    assert ask(files, *questions) == 0
    assert "has an answer to every question" in capfd.readouterr().err


def test_a_question_with_broken_logits_is_named_last(files, questions, monkeypatch, capfd):
    *_, out = questions
    answer = Generator.answer_set

    def answer_broken(generator, *arguments, **options):
        model = broken_at(generator.model, "▁dog")
        return answer(dataclasses.replace(generator, model=model), *arguments, **options)

    monkeypatch.setattr(Generator, "answer_set", answer_broken)
    assert ask(files, *questions) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert "error: question q0: the model's logits are not finite." in message
    assert message.endswith(f"All other answers are in {out}")
    monkeypatch.setattr(Generator, "answer_set", answer)
    assert [line["question_id"] for line in read_answers(out)] == ["q1", "q2", "q3", "q4"]
    assert ask(files, *questions) == 0  # the question is asked again
    assert read_answers(out)[-1]["question_id"] == "q0"


def test_what_a_file_of_questions_does_not_go_with(files, question_file, questions, capfd):
    *_, out = questions
    assert ask(files, *questions) == 0
    for arguments, message in (
        (
            (*questions, "--max_tokens", 5),
            "was answered with another max_tokens; give another --out",
        ),
        ((*questions, "--temperature", 1), "--temperature does not belong to --questions"),
        ((*questions, "--system", "?"), "--system does not belong to --questions"),
        (("--questions", question_file), "--questions and --out are given together"),
        (("--questions", question_file, "--out", "/no/where"), "--out is '/no/where', expected"),
        (("--questions", question_file, "--out", out), "1.png"),
    ):
        capfd.readouterr()
        assert ask(files, *arguments) == 2
        assert message in capfd.readouterr().err


def test_answers_to_other_questions_are_not_continued(files, question_file, tmp_path, capfd):
    """The other questions are about other images, or their answers are by another policy."""
    out, policy = tmp_path / "out.jsonl", save_policy(stepprune(), tmp_path / "policy")
    (tmp_path / "images" / "more").mkdir(parents=True)
    for number, name in enumerate(("1.png", "2.png", "more/1.png")):
        random_image(number).save(tmp_path / "images" / name)
    questions = ("--questions", question_file, "--image_folder", tmp_path / "images", "--out", out)
    assert ask(files, *questions, "--policy", policy) == 0
    text = question_file.read_text()
    question_file.write_text(text.replace("1.png", "more/1.png", 1))
    assert ask(files, *questions, "--policy", policy) == 2
    assert "question 'q0' is not one of --questions, or is about" in capfd.readouterr().err
    question_file.write_text(text)
    save_policy(stepprune(5), policy)
    assert ask(files, *questions, "--policy", policy) == 2
    assert "was answered with another policy_weights; give" in capfd.readouterr().err
