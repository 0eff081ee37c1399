"""Files that anybody may have written: read, or refused in one line that names them.

A short form is part of the suite; `make fuzz` draws thousands. Each failure prints what reproduces
it.
"""

import json
import shutil
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from benchmark_files import write_lines
from benchmark_folders import write_benchmarks
from hostile import VALUES, cases, changed, damaged, one_line
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from experiments.pretrain.conversations import read_conversations
from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    Provenance,
    check_claim,
    find_unanswered,
    read_files,
    recover,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints import safetensors, torch_file
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.data.images import LONGEST_SIDE, open_image
from stepprune_jax.data.json_files import read_json_lines, read_json_list, read_json_object
from stepprune_jax.data.llava import read_answers, read_questions
from stepprune_jax.evaluation.formats import as_markdown
from stepprune_jax.evaluation.scores import read_scores
from stepprune_jax.evaluation.table import merge_scores
from stepprune_jax.workdir.metrics import keep_until, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "images").mkdir()
    Image.new("RGB", (2, 2)).save(folder / "images" / "a.png")
    return folder


JSON_BYTES = st.one_of(
    st.binary(max_size=40),
    damaged(json.dumps({"a": [1, {"b": "c"}], "step": 1}).encode()),
    damaged(b'{"step": 1}\n{"step": 2}\r\n'),
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
    keep_until(path, 1)
    assert all(json.loads(line)["step"] <= 1 for line in path.read_text().splitlines())


LINE = {"question_id": 1, "prompt": "a?", "text": "b", "kept": 2, "ms": 1.5}
ASKED = [BenchmarkQuestion(str(i), "a?", "a?", None) for i in range(3)]
MADE = Provenance("textvqa", "0", 3, "grid", "exact", 2, 9, None, "m", {"dtype": "float32"})


def as_bytes(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


LINES = [LINE, LINE | {"question_id": 2}]


@cases(80)
@given(raw=changed(MADE._asdict()), data=damaged(as_bytes(LINES)) | changed(LINES).map(as_bytes))
def test_answers_and_their_provenance(folder, raw, data):
    file = AnswerFile.of(folder, MADE)
    file.path.parent.mkdir(exist_ok=True)
    file.provenance_path.write_text(json.dumps(raw))
    file.path.write_bytes(data)
    for read in (
        lambda: check_claim(file),
        lambda: find_unanswered(file, ASKED),
        lambda: [found.provenance.slug for found in read_files(file.path.parent)],
    ):
        with one_line(folder):
            read()
    with one_line(folder):
        values = recover(file.path)
        assert recover(file.path) == values  # what was repaired stays as it is


SCORE = {
    **{"benchmark": "pope", "method": "all tokens", "mode": "exact", "budget": 9},
    **{"seed": 0, "gflops": None, "num_tokens": 9, "model": "m", "questions": "0", "asked": 3},
    **{"answered": 3, "headline": 80.0, "parts": {}, "warnings": ["w"], "problem": None},
    **{"mean_k": 9.0, "sd_k": 0.0, "min_k": 9, "max_k": 9, "ms": 1.0},
}


@cases(80)
@given(scores=changed([SCORE, SCORE | {"method": "grid", "budget": 2}]))
@example(scores=[SCORE, SCORE | {"method": "a|\udcff\n\x1b", "budget": 2}])
def test_tables(folder, scores):
    (folder / "report").mkdir(exist_ok=True)
    (folder / "report" / "scores.json").write_text(json.dumps(scores))
    with one_line(folder):
        as_markdown(merge_scores({str(folder): read_scores(folder)}))


TURNS = [{"from": "human", "value": "<image>\na?"}, {"from": "gpt", "value": "b"}]
SAMPLES = [{"id": "s", "image": "a.png", "conversations": TURNS}]
QUESTIONS = [{"question_id": i, "image": "a.png", "text": "a?", "category": "c"} for i in range(2)]
RIGHT = [{"question_id": i, "answer": "b"} for i in range(2)]


@cases(80)
@given(samples=changed(SAMPLES), questions=changed(QUESTIONS), answers=changed(RIGHT))
def test_conversations_questions_and_answers(folder, samples, questions, answers):
    path = folder / "train.json"
    path.write_text(json.dumps(samples))
    with one_line(path):
        for sample in read_conversations(path, folder / "images"):
            assert sample.image is None or sample.image.is_file()
    paths = folder / "test.jsonl", folder / "test_answers.jsonl"
    for path, lines in zip(paths, (questions, answers), strict=True):
        write_lines(path, lines)
    with one_line(folder):
        asked = read_questions(paths[0], folder / "images")
        assert len(read_answers(paths[1], asked)) == len(asked)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks") / "eval")


FILES = {
    "gqa": ("gqa/data/testdev_balanced_questions.json", "gqa/llava_gqa_testdev_balanced.jsonl"),
    "mmbench": ("mmbench/mmbench_dev_20230712.tsv",),
    "mme": ("MME/MME_Benchmark_release_version/count/1.txt", "MME/llava_mme.jsonl"),
    "pope": ("pope/coco/coco_pope_random.json", "pope/llava_pope_test.jsonl"),
    "scienceqa": tuple(
        f"scienceqa/{name}.json" for name in ("problems", "pid_splits", "llava_test_CQM-A")
    ),
    "textvqa": ("textvqa/TextVQA_0.5.1_val.json", "textvqa/llava_textvqa_val_v051_ocr.jsonl"),
    "vqav2": (
        "vqav2/v2_mscoco_val2014_annotations.json",
        "vqav2/v2_OpenEnded_mscoco_val2014_questions.json",
    ),
}


@pytest.mark.parametrize("name", FILES)
@cases(25)
@given(data=st.data())
def test_questions_and_annotations_of_benchmarks(benchmarks, name, data):
    """They are scored and asked, or refused in one line, whatever was answered."""
    benchmark, path = BENCHMARKS[name], benchmarks / data.draw(st.sampled_from(FILES[name]))
    whole = shutil.copy(path, benchmarks / "whole")
    if path.suffix == ".json" and "coco_pope" not in path.name and data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(changed(json.loads(path.read_text())))))
    else:
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        asked = []
        with one_line(benchmarks):
            file = FILES["vqav2"][1] if name == "vqav2" else ""
            asked = benchmark.read_questions(benchmarks, file)
        texts = data.draw(st.lists(st.text(), min_size=len(asked), max_size=len(asked)))
        answers = write_lines(
            benchmarks / "answers.jsonl",
            [
                {"question_id": question.question_id, "prompt": question.prompt, "text": text}
                for question, text in zip(asked, texts, strict=True)
            ]
            or [LINE],
        )
        with one_line():
            json.dumps(benchmark.score(benchmarks, answers), allow_nan=False)
    finally:
        shutil.copy(whole, path)


HEADER = {
    "__metadata__": {"format": "pt"},
    "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@cases(80)
@given(data=st.data())
def test_safetensors(folder, data):
    header = data.draw(changed(HEADER)) if data.draw(st.booleans()) else HEADER
    raw, body = json.dumps(header).encode(), bytes(range(32))
    if data.draw(st.booleans()):  # any numbers
        body = data.draw(st.binary(min_size=32, max_size=32))
    content = len(raw).to_bytes(8, "little") + raw + body
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
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


@cases(80)
@given(data=st.data())
def test_pickled_weights(folder, data):
    path = folder / "pytorch_model.bin"
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(4).bfloat16()}, path)
    with zipfile.ZipFile(path) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    members[pickled] = data.draw(damaged(members[pickled]))
    with zipfile.ZipFile(path, "w") as archive:  # with the checksums of what it has now
        for name, content in members.items():
            archive.writestr(name, content)
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    with one_line(path):
        for entry in torch_file.read_tensors(path).values():
            assert safetensors.read_tensor(entry).shape == entry.shape


@cases(30)
@given(index=changed({"weight_map": {"w": "x.safetensors", "b": "x.safetensors"}}))
def test_the_index_of_shards(folder, index):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    specs = {name: (np.dtype(np.float32), (1,)) for name in "wb"}
    safetensors.write_file(model / "x.safetensors", specs, [np.ones(1, np.float32)] * 2)
    (model / safetensors.INDEX_NAME).write_text(json.dumps(index))
    with one_line(model):
        entries = read_folder(model)
        assert {entry.path.parent for entry in entries.values()} == {model}


@pytest.mark.filterwarnings("ignore")  # of Pillow, about files that it reads nonetheless
@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "P"), ("JPEG", "L"), ("GIF", "P"), ("TIFF", "F"), ("WEBP", "RGB")]
)
@cases(25)
@given(data=st.data())
def test_images(folder, kind, mode, data):
    path = folder / "image"
    Image.linear_gradient("L").resize((12, 9)).convert(mode).save(path, kind)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    with one_line(path):
        image = open_image(path, as_shown=data.draw(st.booleans()))
        assert image.mode == "RGB" and max(image.size) <= LONGEST_SIDE
