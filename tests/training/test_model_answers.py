"""Training without labels, on the frozen model's own answers."""

import json

import pytest
from tiny_run import make_run, metrics, open_tiny_batches

from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.model_answers import PLACEHOLDER, replace_answers
from stepprune_jax.training import model_answers as model_answers_module
from stepprune_jax.training import train
from stepprune_jax.training.model_answers import ANSWERS_FILE, _read_file
from stepprune_jax.user_input import UserError

CHANGES = {
    "recipe": "rloo",
    "rloo.longest": 0.5,
    "data.answer_tokens": 5,
    "optimizer.warmup": 0,
    "steps": 4,
}


def read_entries(data):
    return json.loads((data / "train.json").read_text())


def write_data_like(data, folder, entries):
    """Writes a data folder with the images of `data` and other conversations."""
    folder.mkdir()
    (folder / "images").symlink_to(data / "images")
    (folder / "train.json").write_text(json.dumps(entries))
    return folder


def drop_answers(entries):
    """Returns the entries with the user's turns only."""
    questions = [[turn for turn in e["conversations"] if turn["from"] == "human"] for e in entries]
    return [e | {"conversations": q} for e, q in zip(entries, questions, strict=True)]


@pytest.fixture(scope="module")
def unlabeled_run(world, tmp_path_factory):
    """Data without answers, and the folder of a finished run on these data."""
    model, data = world
    folder = tmp_path_factory.mktemp("unlabeled")
    unlabeled = write_data_like(data, folder / "data", drop_answers(read_entries(data)))
    run = make_run(model, unlabeled, **CHANGES, **{"data.answers": "model"})
    assert train(run, folder / "run") == 0
    return unlabeled, folder / "run"


def test_answers_are_replaced_and_questions_kept():
    turns = [
        {"from": "gpt", "value": "dropped"},
        {"from": "human", "value": "a"},
        {"from": "human", "value": "b"},
        {"from": "gpt", "value": "label"},
        {"from": "human", "value": "c"},
    ]
    entries = [{"image": "0.png", "conversations": turns}, "malformed"]
    replaced = replace_answers(entries, {(0, 0): "x", (0, 1): ""})
    values = [turn["value"] for turn in replaced[0]["conversations"]]
    assert values == ["a", "x", "c", PLACEHOLDER]
    assert replaced[0]["image"] == "0.png" and replaced[1] == "malformed"
    assert len(entries[0]["conversations"]) == 5
    everything_empty = replace_answers(entries[:1], {(0, i): "" for i in range(3)})
    assert everything_empty[0]["conversations"] == [{"from": "gpt", "value": PLACEHOLDER}]


def test_training_without_labels_equals_training_on_the_answers_as_labels(
    world, unlabeled_run, tmp_path
):
    model, data = world
    _, workdir = unlabeled_run
    origin, *lines = map(json.loads, (workdir / ANSWERS_FILE).read_text().splitlines())
    assert origin["answer_tokens"] == 5
    answers = {(line["sample"], line["question"]): line["answer"] for line in lines}
    assert len(answers) == 12  # two questions about each of six images
    labeled = write_data_like(data, tmp_path / "data", replace_answers(read_entries(data), answers))
    train(make_run(model, labeled, **CHANGES), tmp_path / "run")
    assert metrics(workdir) == metrics(tmp_path / "run")
    train(make_run(model, data, **CHANGES), tmp_path / "labels")
    assert metrics(workdir) != metrics(tmp_path / "labels")


def test_an_interrupted_run_generates_only_the_missing_answers(
    world, unlabeled_run, tmp_path, monkeypatch
):
    unlabeled, workdir = unlabeled_run
    complete_text = (workdir / ANSWERS_FILE).read_text()
    lines = complete_text.splitlines(keepends=True)
    (tmp_path / ANSWERS_FILE).write_text("".join(lines[:6]) + lines[6][:10])
    num_answered = []
    answer_chunk = model_answers_module._answer_chunk

    def count_and_answer(run, model, questions):
        num_answered.append(len(questions))
        return answer_chunk(run, model, questions)

    monkeypatch.setattr(model_answers_module, "_answer_chunk", count_and_answer)
    run = make_run(world[0], unlabeled, **CHANGES, **{"data.answers": "model"})
    (tmp_path / "run.json").write_text("{}")  # the folder of a run without a checkpoint
    train(run, tmp_path)
    assert num_answered == [7]
    assert sorted((tmp_path / ANSWERS_FILE).read_text()) == sorted(complete_text)
    assert metrics(tmp_path) == metrics(workdir)


def test_answers_of_another_origin_are_not_used(tmp_path):
    file, line = tmp_path / ANSWERS_FILE, {"sample": 0, "question": 1, "answer": "red"}
    origin = {"model": "m", "data": "d", "answer_tokens": 5}
    write_json_lines(file, [origin, line])
    assert _read_file(file, origin) == {(0, 1): "red"}
    assert _read_file(file, origin | {"answer_tokens": 1}) == {}
    assert json.loads(file.read_text()) == origin | {"answer_tokens": 1}


def test_a_damaged_image_is_an_error_or_skips_its_questions(world, tmp_path):
    model, data = world
    images = tmp_path / "images"
    images.mkdir()
    for path in (data / "images").iterdir():
        (images / path.name).write_bytes(path.read_bytes())
    (images / "3.png").write_bytes(b"no image")
    (tmp_path / "train.json").write_text(json.dumps(drop_answers(read_entries(data))))
    changes = CHANGES | {"data.answers": "model", "steps": 1}
    with pytest.raises(UserError, match=r"3\.png"):
        train(make_run(model, tmp_path, **changes), tmp_path / "run")
    train(make_run(model, tmp_path, **changes, **{"data.missing": "skip"}), tmp_path / "skip")
    _, *lines = map(json.loads, (tmp_path / "skip" / ANSWERS_FILE).read_text().splitlines())
    assert {line["sample"] for line in lines if not line["answer"]} == {3}


def test_conversations_as_one_row_need_labels(world, tmp_path):
    run = make_run(*world, **{"data.answers": "model", "data.split_turns": False})
    with pytest.raises(UserError, match=r"config\.data\.answers"):
        train(run, tmp_path)


def test_placeholders_do_not_enter_the_cached_token_counts_of_labels(world, tmp_path):
    """A dry run opens the rows before the model has answered them."""
    unlabeled = make_run(*world, **{"data.answers": "model"})
    placeholder_targets = open_tiny_batches(unlabeled, tmp_path).corpus.lengths.targets
    label_targets = open_tiny_batches(make_run(*world), tmp_path).corpus.lengths.targets
    fresh_targets = open_tiny_batches(make_run(*world), tmp_path / "fresh").corpus.lengths.targets
    assert label_targets.tolist() == fresh_targets.tolist()
    assert placeholder_targets.tolist() != label_targets.tolist()
