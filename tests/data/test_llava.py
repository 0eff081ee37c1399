import json

import pytest

from experiments.pretrain.conversations import read_conversations
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.llava import Question, read_answers, read_questions


@pytest.fixture
def root(tmp_path):
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for name in ("a.png", "b.png", "deep/c.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    return tmp_path


def chat(*values, first="human"):
    """Returns messages with alternating roles."""
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[n % 2], "value": value} for n, value in enumerate(values)]


def conversations(root, *samples):
    file = root / "train.json"
    file.write_text(json.dumps(samples))
    return read_conversations(file, root / "images")


def write_lines(root, *rows, name="test.jsonl"):
    write_json_lines(root / name, rows)
    return root / name


def question(number=1, **fields):
    return {"question_id": number, "image": "a.png", "text": "What?", "category": "c", **fields}


def questions(root, *rows):
    return read_questions(write_lines(root, *rows), root / "images")


def test_images_and_turns_of_conversations_are_read(root):
    samples = conversations(
        root,
        {
            "id": "x",
            "image": "a.png",
            "conversations": chat("<image>\nWhat?", "red", "And?", "no"),
        },
        {
            "id": 1.5,
            "image": "deep/c.png",
            "conversations": chat("What is this?\n<image>", "dog"),
        },
        {"conversations": chat("How do I write <image> and <video> in HTML?", " So:\n")},
        {"id": "", "conversations": chat("left over", "Hello?", "Hi.", first="gpt")},
        {"image": "b.png", "conversations": chat("What?", "a <image> mark"), "video": ""},
    )
    assert [s.index for s in samples] == [0, 1, 2, 3, 4]
    assert samples[0].image == root / "images" / "a.png"
    assert samples[0].turns == ("What?", "red", "And?", "no")
    assert samples[1].turns == ("What is this?", "dog")
    assert samples[2].image is None and samples[3].turns == ("Hello?", "Hi.")
    assert samples[2].turns == ("How do I write  and <video> in HTML?", " So:\n")
    assert samples[4].turns == ("What?", "a  mark")


def test_a_first_message_of_the_assistant_is_dropped(root):
    """LLaVA's training file has conversations that were cut and begin with an answer."""
    turns = chat("look: <image>", "What?\n<image>", "red", "And?", "no", first="gpt")
    samples = conversations(
        root,
        {"id": "x", "conversations": chat("left over", first="gpt")},
        {"id": "y", "image": "a.png", "conversations": chat("left over", first="gpt")},
        {"id": "z", "image": "a.png", "conversations": turns},
    )
    assert [sample.turns for sample in samples] == [("What?", "red", "And?", "no")]
    assert samples[0].index == 2


GOOD = chat("<image>\nWhat?", "red")
OUTSIDE = '"image" must be a path inside the image folder'


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"image": "a.png"}, '"conversations" is missing'),
        ({"conversations": chat("a", "b", "c")}, "a question that has no answer"),
        ({"conversations": [{"from": "user", "value": "x"}]}, '[0]: "from" is "user", expected'),
        ({"conversations": GOOD}, 'has <image>, but the sample has no "image"'),
        (
            {"images": ["a.png"], "conversations": chat("a", "b")},
            '"images" is not followed, expec',
        ),
        (
            {"video": "a.mp4", "image": "b.png", "conversations": chat("a", "b")},
            'has both "image" and "video"',
        ),
        ({"video": "../a.mp4", "conversations": GOOD}, '"video" must be a path inside'),
        (
            {"image": "a.png", "conversations": chat("<video>\na", "b")},
            "has <video>, but the sample",
        ),
        ({"conversations": chat("a", "b", "And?\n<video>", "c")}, "has <video>, but the sample"),
        ({"image": ["a.png"], "conversations": GOOD}, "is a list, expected the name of one image"),
        ({"system": "Be brief.", "conversations": chat("a", "b")}, '"system" is not followed'),
        (
            {"conversations": chat("a", "b", "<image>c", "d"), "image": "a.png"},
            "first question",
        ),
        ({"image": "../a.png", "conversations": GOOD}, OUTSIDE),
        ({"image": "/etc/passwd", "conversations": GOOD}, OUTSIDE),
        ({"image": "C:\\a.png", "conversations": GOOD}, OUTSIDE),
    ],
)
def test_errors_name_the_number_and_the_field_of_a_bad_sample(root, sample, message):
    with pytest.raises(ValueError) as error:
        conversations(root, {"image": "a.png", "conversations": GOOD}, sample)
    assert "train.json: sample 1: " in str(error.value) and message in str(error.value)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(root):
    rows = [question(n, text="Größe? \u2028 da") for n in (1, 2)]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\r\n"
    (root / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    loaded = read_questions(root / "test.jsonl", root / "images")
    assert [q.question_id for q in loaded] == ["1", "2"]
    assert loaded[0].text == "Größe? \u2028 da"


def test_answers_are_read_in_the_order_of_the_questions(root):
    rows = [question("q1"), question(2, text="<image>\nAnd?"), question("q3", image="b.png")]
    del rows[2]["category"]
    loaded = questions(root, *rows)
    assert loaded[0] == Question("q1", root / "images" / "a.png", "What?", "c")
    assert loaded[1].question_id == "2" and loaded[1].text == "And?"
    assert loaded[2].category == "default"
    answers = [{"question_id": q, "answer": a} for q, a in (("2", "no"), ("q3", "2"), ("q1", "x"))]
    file = write_lines(root, *answers, name="answers.jsonl")
    assert read_answers(file, loaded) == ["x", "no", "2"]


def read(root, name, rows):
    """Reads rows as questions if `name` is "test", otherwise as answers to three questions."""
    file = write_lines(root, *rows, name=f"{name}.jsonl")
    if name == "test":
        return read_questions(file, root / "images")
    return read_answers(file, questions(root, *map(question, (1, 2, 3))))


def answer(number, text="x"):
    return {"question_id": number, "answer": text}


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("test", [question(), question()], "2: \"question_id\" '1' was already given at line 1"),
        ("test", [question(2, text="<image>\n")], '1: "text" is empty except for <image>'),
        ("test", [question(2, image="../a.png")], f"1: {OUTSIDE}"),
        ("test", [question(2, image=None, video="a.mp4")], '1: "video": no file at'),
        ("test", [question(2, video="a.mp4")], '1: has both "image" and "video"'),
        ("test", [question(2, image=None, video="../a.mp4")], '"video" must be a path inside'),
        ("test", [question(2, text="<video>\nWhat?")], '1: "text" has <video>, but the sample'),
        ("test", [question(2, image="no.png")], '1: "image": no file at '),
        ("test", [question(2, image="x\0y")], '1: "image": no file at '),
        ("answers", [answer(1)], ".jsonl: no answer for question_id '2' and 1 more"),
        ("answers", [answer(1), answer(9)], "2: \"question_id\" '9' belongs to no question"),
        ("answers", [answer(1), answer(2, "\ud800"), answer(3)], '2: "answer" is "\\ud800"'),
    ],
)
def test_errors_name_the_line_and_the_field_of_a_bad_row(root, name, rows, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read(root, name, rows)
    assert f"{root / name}.jsonl" in str(error.value) and message in str(error.value)
