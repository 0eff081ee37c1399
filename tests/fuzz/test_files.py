"""Files that anybody may have written: read, or refused in one line that names them.

A short form is part of the suite; `make fuzz` draws thousands. Each failure prints what reproduces
it.
"""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_files import write_lines
from hostile import VALUES, cases, changed, damaged, one_line
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stepprune_jax.benchmarks.answer_files import recover
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.data.images import LONGEST_SIDE, open_image
from stepprune_jax.data.json_files import read_json_lines, read_json_list, read_json_object
from stepprune_jax.data.llava import read_answers, read_conversations, read_questions
from stepprune_jax.evaluation.scores import read_scores
from stepprune_jax.workdir.metrics import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "images").mkdir()
    Image.new("RGB", (2, 2)).save(folder / "images" / "a.png")
    return folder


JSON_BYTES = st.one_of(
    st.binary(max_size=40),
    damaged(json.dumps({"a": [1, {"b": "c"}], "d": 1.5}).encode()),
    damaged(b'{"x": 1}\n{"x": 2}\r\n'),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.integers(1, 60_000).map(lambda depth: b"[" * depth),
    st.integers(4000, 6000).map(lambda digits: b"[" + b"9" * digits + b"]"),
)


@cases(80)
@given(data=JSON_BYTES)
def test_json(folder, data):
    path = folder / "x.json"
    path.write_bytes(data)
    for read in (read_json_object, read_json_list, read_json_lines):
        with one_line(path):
            read(path)
    assert all(isinstance(row["step"], int) for row in read_rows(path))


ANSWER = {"question_id": 1, "prompt": "a?", "text": "b", "kept": 3}


@cases(40)
@given(data=damaged((json.dumps(ANSWER) + "\n").encode() * 3))
def test_answers_of_an_interrupted_run(folder, data):
    path = folder / "answers.jsonl"
    path.write_bytes(data)
    with one_line(path):
        values = recover(path)
        assert all({"question_id", "prompt", "text"} <= value.keys() for value in values)
        assert recover(path) == values  # what was repaired stays as it is


@cases(20)
@given(value=changed([{"benchmark": "pope", "method": "all tokens", "mode": "exact"}]))
def test_scores(folder, value):
    (folder / "report").mkdir(exist_ok=True)
    (folder / "report" / "scores.json").write_text(json.dumps(value))
    with one_line(folder):
        read_scores(folder)


TURNS = [{"from": "human", "value": "<image>\na?"}, {"from": "gpt", "value": "b"}]
SAMPLES = [{"id": "s", "image": "a.png", "conversations": TURNS}]
QUESTIONS = [{"question_id": i, "image": "a.png", "text": "a?", "category": "c"} for i in range(2)]
RIGHT = [{"question_id": i, "answer": "b"} for i in range(2)]


@cases(80)
@given(samples=changed(SAMPLES))
def test_conversations(folder, samples):
    path = folder / "train.json"
    path.write_text(json.dumps(samples))
    with one_line(path):
        for sample in read_conversations(path, folder / "images"):
            assert sample.image is None or sample.image.is_file()


@cases(60)
@given(questions=changed(QUESTIONS), answers=changed(RIGHT))
def test_questions_and_answers(folder, questions, answers):
    paths = folder / "test.jsonl", folder / "test_answers.jsonl"
    for path, lines in zip(paths, (questions, answers), strict=True):
        write_lines(path, lines)
    with one_line(folder):
        asked = read_questions(paths[0], folder / "images")
        assert len(read_answers(paths[1], asked)) == len(asked)


def _tensors():
    out = io.BytesIO()
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    return header, bytes(out.getvalue()) + bytes(range(32))


@cases(80)
@given(data=st.data())
def test_safetensors(folder, data):
    header, body = _tensors()
    if data.draw(st.booleans()):
        header = data.draw(changed(header))
    raw = json.dumps(header).encode()
    content = len(raw).to_bytes(8, "little") + raw + body
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
    if data.draw(st.booleans()):  # any numbers
        content = content[:-32] + data.draw(st.binary(min_size=32, max_size=32))
    path = folder / "x.safetensors"
    path.write_bytes(content)
    with one_line(path):
        entries, _ = safetensors.read_contents(path)
        for entry in entries.values():
            assert entry.nbytes <= len(content)
            wanted = np.dtype(data.draw(st.sampled_from((np.float16, jnp.bfloat16, np.float32))))
            tensor = safetensors.read_tensor(entry, dtype=wanted)
            assert tensor.shape == entry.shape
            if jnp.issubdtype(entry.dtype, jnp.floating):
                assert np.isfinite(tensor.astype(wanted)).all()


@cases(30)
@given(index=changed({"weight_map": {"w": "x.safetensors", "b": "x.safetensors"}}))
def test_the_index_of_shards(tmp_path_factory, folder, index):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    safetensors.write_file(
        model / "x.safetensors",
        {name: (np.dtype(np.float32), (1,)) for name in "wb"},
        [np.ones(1, np.float32)] * 2,
    )
    (model / safetensors.INDEX_NAME).write_text(json.dumps(index))
    with one_line(model):
        entries = safetensors.read_folder(model)
        assert {entry.path.parent for entry in entries.values()} == {model}


def encoded(kind, mode):
    out = io.BytesIO()
    Image.linear_gradient("L").resize((12, 9)).convert(mode).save(out, kind)
    return out.getvalue()


IMAGES = [
    encoded(kind, mode)
    for kind, mode in (
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("JPEG", "L"),
        ("GIF", "P"),
        ("TIFF", "F"),
        ("BMP", "RGB"),
        ("WEBP", "RGB"),
    )
]


@pytest.mark.filterwarnings("ignore")  # of Pillow, about files that it reads nonetheless
@cases(120)
@given(data=st.sampled_from(IMAGES).flatmap(damaged))
def test_images(folder, data):
    path = folder / "image"
    path.write_bytes(data)
    with one_line(path):
        image = open_image(path)
        assert image.mode == "RGB" and max(image.size) <= LONGEST_SIDE
