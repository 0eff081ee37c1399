import json

import pytest
from PIL import Image

from experiments.datasets import easy_vqa
from experiments.pretrain.conversations import read_conversations
from stepprune_jax.data.llava import read_answers, read_questions

TRAIN = [
    [question, answer, number]
    for number in range(6)
    for question, answer in (
        ("what is the blue shape?", "circle"),
        ("what color is the circle?", "blue"),
        ("is there not a red shape?", "yes"),
    )
]
TEST = [["what is the color of the shape?", "teal", 0], ["what shape is present?", "circle", 9]]


@pytest.fixture
def source(tmp_path):
    for split, rows in (("train", TRAIN), ("test", TEST)):
        images = tmp_path / "easy" / split / "images"
        images.mkdir(parents=True)
        for number in {row[2] for row in rows}:
            Image.new("RGB", (4, 4), (number, 0, 0)).save(images / f"{number}.png")
        write(tmp_path / "easy", split, rows)
    return tmp_path / "easy"


def write(source, split, rows):
    (source / split / "questions.json").write_text(json.dumps(rows))


def test_the_folder_is_read_back_as_it_was(source, tmp_path):
    out = tmp_path / "out"
    counts = easy_vqa.convert(source, out, validation_share=0.3)
    assert counts == {"train": 12, "validation": 6, "test": 2}
    samples = read_conversations(out / "train.json", out / "images")
    asked = read_questions(out / "validation.jsonl", out / "images")
    assert [len(sample.turns) for sample in samples] == [6] * 4
    assert samples[0].turns[:2] == ("what is the blue shape?", "circle")
    assert [question.category for question in asked[:3]] == ["shape", "color", "yes-no"]
    assert read_answers(out / "validation_answers.jsonl", asked)[:3] == ["circle", "blue", "yes"]
    trained, held = {s.image for s in samples}, {q.image for q in asked}
    assert len(trained) == 4 and len(held) == 2 and not trained & held
    asked = read_questions(out / "test.jsonl", out / "images")
    assert read_answers(out / "test_answers.jsonl", asked) == ["teal", "circle"]
    assert [question.category for question in asked] == ["color", "shape"]
    # Pictures of both splits are numbered from 0; each went to its own place.
    assert asked[1].image.read_bytes() == (source / "test/images/9.png").read_bytes()
    fewer = easy_vqa.convert(source, tmp_path / "fewer", validation_share=0.3, test_images=1)
    assert fewer == {"train": 12, "validation": 6, "test": 1}
    asked = read_questions(tmp_path / "fewer/test.jsonl", tmp_path / "fewer/images")
    assert [question.image.name for question in asked] == ["0.png"]
    other = tmp_path / "other"
    easy_vqa.convert(source, other, validation_share=0.3, seed=3)
    assert (other / "train.json").read_text() != (out / "train.json").read_text()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([TRAIN[0], ["a?", "b"]], "entry 1: expected .question, answer, number of image., got"),
        ([TRAIN[0], ["a?", "", 1]], 'entry 1: "answer" is ""'),
        ([["a?", "b", 5]], 'entry 0: "image": no file at .*5.png'),
        ([[3, "b", 1]], 'entry 0: "question" is 3, expected a text'),
    ],
)
def test_bad_entries_are_refused_before_anything_is_written(source, tmp_path, rows, message):
    write(source, "test", rows)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"questions\.json: {message}"):
        easy_vqa.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
