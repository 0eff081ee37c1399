"""Reads the question lists of the benchmarks as LLaVA's programs do: what is asked of the model.

GQA, VQAv2, TextVQA, POPE, MME and the shapes world have lists of JSON lines whose `text` is the
whole message. ScienceQA and MMBench have their own forms, to which the request for a letter is
added here (LLaVA's `--single-pred-prompt`).
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import layout, mmbench
from stepprune_jax.benchmarks.result import WORD_OR_PHRASE, Benchmark
from stepprune_jax.data.json_files import (
    as_object,
    identity,
    read_json_lines,
    read_json_list,
    read_json_object,
    words,
)

_IMAGE = "<image>"
_OCR_LINE = "Reference OCR token:"
_MMBENCH_OPTIONS = "ABCD"
_EVAL_ZIP = "LLaVA's eval.zip"
_COCO = "https://cocodataset.org/#download"
# Where the pictures of a benchmark are, by its name.
_PICTURES = {
    "gqa": "images.zip at https://cs.stanford.edu/people/dorarad/gqa/download.html",
    "mme": "MME's authors (github.com/BradyFU/Awesome-Multimodal-Large-Language-Models)",
    "pope": f"val2014.zip at {_COCO}",
    "scienceqa": "the download script of github.com/lupantech/ScienceQA",
    "textvqa": "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip",
    "vqav2": f"test2015.zip (of the validation split val2014.zip) at {_COCO}",
}


class Asked(NamedTuple):
    """A question of a benchmark.

    Attributes:
        question_id: as the list has it. That of TextVQA names the image and is not unique.
        text: the user's whole message, without an image mark.
        prompt: the question as the answer file records it.
        image: the picture: a file, the bytes of one, or None.
        fields: what else the answer file records: names to JSON values.
    """

    question_id: str | int
    text: str
    prompt: str
    image: Path | bytes | None
    fields: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple[str, str]:
        """What tells questions of a benchmark apart, and finds the lines that answer them."""
        return str(self.question_id), self.prompt


def read_questions(
    benchmark: Benchmark, root: str | Path, file: str = "", *, ocr: bool = True
) -> list[Asked]:
    """Reads the questions of a benchmark.

    Args:
        benchmark: which one.
        root: folder of LLaVA's layout; for the shapes world a folder of its data.
        file: another question file than the benchmark's, relative to the root: any of its splits
            in the same form, or, for VQAv2, the official questions of a split.
        ocr: whether TextVQA's prompts keep their line of OCR tokens, as LLaVA's figures have it.

    Returns:
        The questions in the order of the file, at least one.

    Raises:
        FileNotFoundError: the file or a picture is missing.
        ValueError: the file is not what it should be; the message names file, line and field.
    """
    path = _find(benchmark, Path(root), file)
    if benchmark.name == "scienceqa":
        questions = list(_scienceqa(path, Path(root) / benchmark.images, benchmark.instruction))
    elif benchmark.images is None:
        questions = list(_mmbench(path, benchmark.instruction))
    elif benchmark.name == "vqav2" and path.suffix == ".json":
        questions = list(_official_vqav2(path))
    else:
        questions = list(_lines(path, Path(root) / benchmark.images))
        if benchmark.name == "textvqa" and not ocr:
            questions = [_without_ocr(question) for question in questions]
    if not questions:
        raise ValueError(f"{path}: expected at least one question, found none")
    _check_pictures(questions, _PICTURES.get(benchmark.name))
    return questions


def _find(benchmark: Benchmark, root: Path, file: str) -> Path:
    """The question file; LLaVA's documentation and script disagree about MMBench-CN's folder."""
    wanted = root / (file or benchmark.questions)
    if not file and benchmark is mmbench.BENCHMARK_CN and not wanted.is_file():
        other = root / mmbench.BENCHMARK.name / wanted.name
        wanted = other if other.is_file() else wanted
    return layout.file(wanted, _EVAL_ZIP if benchmark.images else mmbench.SOURCE)


def _check_pictures(questions: list[Asked], source: str | None) -> None:
    """Looks for every picture before a model is loaded."""
    paths = dict.fromkeys(q.image for q in questions if isinstance(q.image, Path))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing):,} of {len(paths):,} pictures are missing, as {missing[0]}"
            + (f": get them from {source}" if source else "")
        )


def _lines(path: Path, pictures: Path) -> Iterator[Asked]:
    """A list in LLaVA's usual form."""
    for where, value in read_json_lines(path):
        identity(value, "question_id", where)
        text = words(value, "text", where)
        image = pictures / words(value, "image", where)
        yield Asked(value["question_id"], text, text, image)


def _without_ocr(question: Asked) -> Asked:
    """The question without its line of OCR tokens."""
    lines = [line for line in question.text.split("\n") if not line.startswith(_OCR_LINE)]
    text = "\n".join(lines)
    return question._replace(text=text, prompt=text)


def _scienceqa(path: Path, pictures: Path, instruction: str) -> Iterator[Asked]:
    """LLaVA's list; the recorded prompt has the image mark, which tells scoring of the picture."""
    for number, entry in enumerate(read_json_list(path, "question"), start=1):
        where = f"{path}: question {number}"
        value = as_object(entry, where)
        identity(value, "id", where)
        turns = value.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise ValueError(f'{where}: expected a list of turns as "conversations"')
        said = words(as_object(turns[0], where), "value", f"{where}: turn 1")
        text = said.replace(_IMAGE, "").strip() + instruction
        if "image" not in value:
            yield Asked(value["id"], text, text, None)
            continue
        image = pictures / words(value, "image", where)
        yield Asked(value["id"], text, f"{_IMAGE}\n{text}", image)


def _mmbench(path: Path, instruction: str) -> Iterator[Asked]:
    """The rows of a file, rotations included; options end at the first that is empty."""
    for row in mmbench.read_rows(path):
        where = f"{path}: index {row['index']}"
        options = []
        for letter in _MMBENCH_OPTIONS:
            option = row.get(letter)
            if _is_none(option):
                break
            options.append(option)
        if _is_none(row["question"]):
            raise ValueError(f"{where}: the question is empty")
        head = [] if _is_none(row.get("hint")) else [row["hint"]]
        letters = list(_MMBENCH_OPTIONS[: len(options)])
        named = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
        prompt = "\n".join([*head, row["question"], *named])
        try:
            image = base64.b64decode(row.get("image") or "", validate=True)
        except binascii.Error as error:
            raise ValueError(f"{where}: the image is not base64: {error}") from error
        if not image:
            raise ValueError(f"{where}: no image")
        fields = {"round_id": 0, "options": options, "option_char": letters}
        yield Asked(int(row["index"]), prompt + instruction, prompt, image, fields)


def _is_none(text: str | None) -> bool:
    """What LLaVA's program takes for an empty cell; pandas' own are None already."""
    return text is None or text.lower() in ("nan", "none")


def _official_vqav2(path: Path) -> Iterator[Asked]:
    """The official questions of a split, with LLaVA's request for a short answer."""
    value = read_json_object(path)
    records, split = value.get("questions"), value.get("data_subtype", "val2014")
    if not isinstance(records, list):
        raise ValueError(f'{path}: expected a list under "questions"')
    # The pictures of test-dev2015 are among those of test2015.
    split = "test2015" if str(split).startswith("test") else split
    for number, entry in enumerate(records, start=1):
        where = f"{path}: question {number}"
        record = as_object(entry, where)
        identity(record, "question_id", where)
        picture = identity(record, "image_id", where)
        if not picture.isdecimal():
            raise ValueError(f'{where}: "image_id" must be a whole number, got {picture!r}')
        text = words(record, "question", where) + WORD_OR_PHRASE
        image = path.parent / split / f"COCO_{split}_{int(picture):012d}.jpg"
        yield Asked(record["question_id"], text, text, image)
