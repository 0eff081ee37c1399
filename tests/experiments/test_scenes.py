"""Files of scenes: the order of their rows, and errors that name line and field."""

import pytest

from experiments.shapes.scene_files import SceneFacts, read_scenes
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.llava import Question

QUESTIONS = [Question(name, None, "What?", "c") for name in ("q1", "2")]
LINES = [{"question_id": q, "complexity": 3, "relevant": r} for q, r in ((2, []), ("q1", [4]))]


def test_scenes_have_the_order_of_the_questions(tmp_path):
    write_json_lines(tmp_path / "s", LINES)
    assert read_scenes(tmp_path / "s", QUESTIONS) == [SceneFacts(3, (4,)), SceneFacts(3, ())]
    write_json_lines(tmp_path / "s", LINES[:1])
    with pytest.raises(ValueError, match="s: no scene for question_id 'q1'"):
        read_scenes(tmp_path / "s", QUESTIONS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relevant": None}, 'line 2: "relevant" is null'),
        ({"complexity": -1}, 'line 2: "complexity" is -1'),
    ],
)
def test_an_error_names_the_invalid_line_and_field(tmp_path, fields, message):
    write_json_lines(tmp_path / "s", [line | fields for line in LINES])
    with pytest.raises(ValueError, match=message):
        read_scenes(tmp_path / "s", QUESTIONS)
