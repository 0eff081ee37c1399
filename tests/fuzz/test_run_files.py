"""Files of runs and of converters that anybody may have changed: read, or refused in one line."""

import contextlib
import dataclasses
import io
import json
import math
import pickle

import numpy as np
import pytest
from benchmark_files import write_lines
from hostile import LEAVES, cases, changed, damaged, one_line
from hypothesis import example, given
from hypothesis import strategies as st
from sort_of_clevr_file import entry, place

from experiments.datasets import sort_of_clevr
from experiments.pretrain.data import _read_labels
from experiments.pretrain.mentions import read_mentions
from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    Provenance,
    check_claim,
    outstanding,
    read_files,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.data.llava import Question, read_scenes
from stepprune_jax.evaluation.records import Records, load_records, save_records
from stepprune_jax.evaluation.scores import read_scores, score_file
from stepprune_jax.evaluation.table import as_markdown, merge_scores, write_table
from stepprune_jax.pruning.calibration import Calibration, read_calibration
from stepprune_jax.settings import Settings, count, text
from stepprune_jax.visualize.training import read_metrics
from stepprune_jax.workdir.checkpoints import Checkpoints, claim
from stepprune_jax.workdir.checkpoints import _damage as damage
from stepprune_jax.workdir.metrics import keep_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


TABLE = Calibration((1.0, 2.5, 6.0), (3.0, 0.0, -1.0), (1.0, 0.2, 0.0), (0.0, 0.2, 1.0), 9.0, 4)


@cases(100)
@given(value=changed(TABLE.as_json()))
def test_calibrations(value):
    with one_line("calibration"):
        table = read_calibration(value)
        assert 0 <= table.mean_count[0] <= table.mean_count[-1] <= table.num_tokens
        assert math.isfinite(table._replace(at_floor=(0,), at_cap=(0,), **_ends(table)).bias_at(1))


def _ends(table):
    """A table of one row that keeps one token, with a bias of the given one."""
    return {"mean_count": (1.0,), "stop_bias": table.stop_bias[:1]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields(Settings):
    steps: int = count()
    name: str = text()


@cases(60)
@given(
    raw=changed({"config": {"steps": 3, "name": "a"}, "model": "m", "data": "d"}), data=st.data()
)
def test_the_description_of_a_run(folder, raw, data):
    written = json.dumps(raw).encode()
    if data.draw(st.booleans()):
        written = data.draw(damaged(written))
    (folder / "run.json").write_bytes(written)
    try:
        claim(folder, Fields(steps=3, name="a"), "m", "d")
    except ValueError as error:  # differences are a list
        said = str(error)
        assert str(folder) in said and ("\n" not in said or "These differ:\n" in said)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    with contextlib.closing(Checkpoints(folder, 1)) as checkpoints:
        checkpoints.save(7, {"x": np.ones(3)})
    return folder / "checkpoints" / "7"


@cases(30)
@given(data=st.data())
def test_the_hashes_of_a_checkpoint(checkpoint, data):
    """Whatever they are instead, the checkpoint is damaged; without its step it is an old one."""
    path = checkpoint / "beside" / "files.json"
    before = path.read_bytes()
    hashes = json.loads(before)
    other = data.draw(changed(hashes))
    path.write_text(json.dumps(other))
    said = damage(checkpoint)
    path.write_bytes(before)
    step = other.get("step")
    good = {**other, "step": 7 if step is None else step} == hashes
    assert bool(said) != good and "\n" not in said


ROW = {"step": 1, "loss": 0.5, "k_mean": 2.0}


@cases(60)
@given(rows=changed([ROW, ROW | {"step": 2}]), step=st.integers(-1, 3), data=st.data())
def test_metrics(folder, rows, step, data):
    path = folder / "metrics.jsonl"
    written = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if data.draw(st.booleans()):
        written = data.draw(damaged(written))
    path.write_bytes(written)
    with one_line(path):
        for values in read_metrics(path).values():
            assert values.dtype == float and not np.isinf(values).any()
    keep_until(path, step)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["step"] <= step for row in kept)


ASKED = [BenchmarkQuestion(str(i), "a?", "a?", None) for i in range(3)]
MADE = Provenance("textvqa", "0", 3, "grid", "exact", 2, 9, None, "m", {"dtype": "float32"})
LINE = {"question_id": 1, "prompt": "a?", "text": "b", "kept": 2, "ms": 1.5}


@cases(60)
@given(raw=changed(MADE._asdict()), lines=changed([LINE, LINE | {"question_id": 2}]))
def test_answers_and_their_provenance(tmp_path_factory, raw, lines):
    root = tmp_path_factory.getbasetemp() / "answers"
    file = AnswerFile.of(root, MADE)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.provenance_path.write_text(json.dumps(raw))
    write_lines(file.path, lines)
    with one_line(root):
        check_claim(file)
    with one_line(root):
        outstanding(file, ASKED)
    with one_line(root):
        (found,) = read_files(file.path.parent)
        score = score_file(found._replace(provenance=MADE), root)
        json.dumps(score, allow_nan=False)


SCORE = {
    **{"benchmark": "pope", "method": "all tokens", "mode": "exact", "budget": 9},
    **{"pruning_rate": 0.0, "num_tokens": 9, "model": "m", "questions": "0", "asked": 3},
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
        table = merge_scores({str(folder): read_scores(folder)})
        assert as_markdown(table)
        write_table(folder, table)


def _npz(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


ARRAYS = st.sampled_from(
    [
        *(np.zeros(shape, kind) for shape in ((), 0, 2, (2, 3), (0, 3)) for kind in "if"),
        np.array(["a", "b"]),
        np.array([None, 1]),
        np.array([np.nan, 1.0]),
        np.array([[-5, 2**62]]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("x", int)]),
        np.zeros(2, complex),
    ]
)


@st.composite
def arrays_of(draw, good):
    """The bytes of a file in which an array is another or missing, or some bytes are."""
    good = dict(good)
    for name in draw(st.lists(st.sampled_from([*good]), max_size=2)):
        if draw(st.booleans()):
            good[name] = draw(ARRAYS)
        else:
            good.pop(name, None)
    data = _npz(**good)
    return draw(damaged(data)) if draw(st.booleans()) else data


RECORDS = Records(
    "grid", "exact", 2, 9, np.full(2, 2), np.array([[0, 1], [3, 4]]), ["a", "b"], np.ones(2, bool)
)._asdict()
LABELS = {
    **{
        "class_a": np.zeros((2, 3), int),
        "words_a": np.array(["x"]),
        "value_b": np.zeros((2, 3, 1)),
    },
    **{"share_c": np.zeros((2, 3)), "words_c": np.array(["", "y"])},
}
MENTIONS = {
    **{"sample": np.array([0, 1]), "exchange": np.zeros(2, int), "word": np.array(["a", "b"])},
    **{"number": np.ones(2, int), "value": np.zeros((2, 2))},
}


@cases(60)
@given(data=arrays_of(RECORDS | {"answer": np.array(["a", "b"])}))
def test_records(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "records"
    folder.mkdir(exist_ok=True)
    (folder / "a.npz").write_bytes(data)
    with one_line(folder):
        (found,) = load_records(folder)
        save_records(folder.with_name("again"), [found])


@cases(60)
@given(labels=arrays_of(LABELS), mentions=arrays_of(MENTIONS))
def test_labels_of_patches(folder, labels, mentions):
    path = folder / "labels.npz"
    for data, read in (
        (labels, lambda: _read_labels(path, 2, 3)),
        (mentions, lambda: read_mentions(path, 2)),
    ):
        path.write_bytes(data)
        with one_line(path):
            read()


SCENE = {"question_id": "q", "complexity": 2, "relevant": [0, 1]}


@cases(40)
@given(scene=changed(SCENE))
def test_scenes(folder, scene):
    path = folder / "scenes.jsonl"
    path.write_text(json.dumps(scene) + "\n")
    with one_line(path):
        (found,) = read_scenes(path, [Question("q", path, "a?", "c")])
        assert found.complexity >= 0


def _clevr():
    scene = entry(place(np.random.default_rng(0)))
    return [scene], [scene]


@st.composite
def clevr(draw):
    """A pickle in which one place holds something else, or some bytes do."""
    (image, *groups), test = _clevr()[0][0], _clevr()[1]
    other = draw(LEAVES | ARRAYS | st.just([]) | st.just({}))
    kind = draw(st.integers(0, 6))
    if kind == 0:
        image = other
    elif kind == 1:
        groups[0] = other
    elif kind == 2:
        groups[1] = (other, groups[1][1])
    elif kind == 3:
        groups[0][0][draw(st.integers(0, 3))] = other
    elif kind == 4:
        groups[0][1][draw(st.integers(0, 3))] = other
    elif kind == 5:
        test = other
    data = pickle.dumps(([(image, *groups)], test), draw(st.integers(0, 5)))
    return draw(damaged(data)) if kind == 6 else data


@cases(60)
@given(data=clevr())
def test_pickles_of_sort_of_clevr(folder, data):
    path = folder / "clevr.pickle"
    path.write_bytes(data)
    with one_line(path):
        scenes = sort_of_clevr.read_scenes(path)
        for scene in scenes["train"] + scenes["test"]:
            assert scene.image.dtype == np.uint8 and scene.asked
