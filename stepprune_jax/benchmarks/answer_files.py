"""Writes answer files line by line, and resumes them after an interruption.

The answers in `METHOD.jsonl` have a provenance in `METHOD.json`: everything that determines them. A
run with another provenance is refused. If several processes share the questions, process 0 writes
to `METHOD.jsonl`, and process n to `METHOD.part-n.jsonl`. The parts are merged later.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.data.json_files import (
    JsonObject,
    field,
    file_named,
    identity,
    read_json_lines,
    read_json_object,
    replace_file,
    write_json,
)
from stepprune_jax.user_input import UserError

ANSWERS = "answers"


def pruning_rate(count: float | int, num_tokens: int) -> float:
    """Returns the pruned fraction of `num_tokens` tokens in percent, if `count` tokens are kept."""
    return round(100 * (1 - count / num_tokens), 1)


class Provenance(NamedTuple):
    """Provenance of an answer file: everything that determines its answers.

    Attributes:
        benchmark: name of the benchmark.
        questions: digest of the questions.
        asked: number of questions.
        method: name of the table row.
        mode: "exact" if every image keeps the budget, "adaptive" if the learned stop decides and
            the budget is a mean.
        budget: tokens to keep per image; None for the learned stop without a target.
        num_tokens: visual tokens of an image before pruning.
        stop_bias: number added to the stop logits; None without a learned stop.
        model: identity of the model.
        made: further settings that determine the answers, JSON values by name.
    """

    benchmark: str
    questions: str
    asked: int
    method: str
    mode: str
    budget: int | None
    num_tokens: int
    stop_bias: float | None
    model: str
    made: Mapping[str, object] = {}

    @property
    def pruning_rate(self) -> float | None:
        """Pruning rate in percent; None for a learned stop, whose count is unknown in advance."""
        return None if self.budget is None else pruning_rate(self.budget, self.num_tokens)

    @property
    def slug(self) -> str:
        """Base name of the answer file, made of method, mode and pruning rate."""
        rate = [self.mode, f"{self.pruning_rate:g}"] if self.pruning_rate else []
        words = " ".join([self.method, *rate]).lower().replace("+", " plus")
        return re.sub(r"(?:[^\w.]|_)+", "-", words).strip("-") or "row"


def digest(texts: Sequence[str]) -> str:
    """Returns the start of a SHA-256 digest of texts, in hexadecimal."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def questions_digest(questions: Sequence[BenchmarkQuestion]) -> str:
    """Returns a digest of the ids and messages of questions. It does not cover the images."""
    return digest([f"{question.question_id} {question.text}" for question in questions])


class AnswerFile(NamedTuple):
    """The answer file of one table row on one benchmark.

    Attributes:
        path: the file, which may not exist yet.
        provenance: everything that determines its answers.
    """

    path: Path
    provenance: Provenance

    @property
    def provenance_path(self) -> Path:
        """Path of the provenance."""
        return self.path.with_suffix(".json")

    @classmethod
    def of(cls, folder: Path, provenance: Provenance) -> "AnswerFile":
        """Returns the file of a row in a folder with one folder per benchmark."""
        return cls(folder / provenance.benchmark / f"{provenance.slug}.jsonl", provenance)

    def part(self, number: int) -> Path:
        """Returns the path that a process writes to; process 0 writes to the file itself."""
        return self.path.with_suffix(f".part-{number}.jsonl") if number else self.path

    def parts(self) -> list[Path]:
        """Lists the existing files of this row: the file itself, then its parts."""
        parts = sorted(self.path.parent.glob(f"{self.path.stem}.part-*.jsonl"))
        return [path for path in (self.path, *parts) if path.is_file()]


# Field of a line: the bound that the count of a learned stop is at.
BOUND = "bound"


class AnswerLine(NamedTuple):
    """A line of an answer file.

    Attributes:
        text: the answer.
        kept: number of visual tokens kept.
        ms: milliseconds of the answer; None if not measured.
        fields: optional fields. `gflops`: operations up to the first token. `order`, `grid` and
            `visual_tokens`: the kept tokens, the grid and the number of tokens of the image, so
            that a report can draw them. `BOUND`: "minimum" or "T_max" if the count of a learned
            stop is at this bound.
    """

    text: str
    kept: int
    ms: float | None
    fields: Mapping[str, object] = {}


# Types of the fields of a provenance.
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("benchmark", "questions", "method", "mode", "model"), (str,)),
    **dict.fromkeys(("asked", "num_tokens"), (int,)),
    "budget": (int, type(None)),
    "stop_bias": (float, int, type(None)),
    "made": (dict,),
}


def check_claim(file: AnswerFile) -> None:
    """Raises a UserError if an existing file has no provenance or a different one."""
    if not file.parts():
        return
    has_provenance = file.provenance_path.is_file()
    recorded = _flat(_read(file.provenance_path)) if has_provenance else {}
    current = _flat(file.provenance)
    changes = [
        f"{name}: {recorded.get(name)!r} -> {current.get(name)!r}"
        for name in sorted(recorded.keys() | current.keys())
        if recorded.get(name) != current.get(name)
    ]
    if changes:
        provenance_name = file.provenance_path.name
        reason = "; ".join(changes) if has_provenance else f"{provenance_name} is missing"
        raise UserError(
            f"{file.path} holds answers with another provenance; move the file and its .json away, "
            f"or give another --workdir. {reason}"
        )


def claim(file: AnswerFile) -> None:
    """Writes the provenance of a file, so that only runs with equal provenance add to the file.

    Raises:
        ValueError: the file exists with another provenance.
    """
    check_claim(file)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    write_json(file.provenance_path, file.provenance._asdict())


def _flat(provenance: Provenance) -> JsonObject:
    """Returns the values of a provenance by name, including those in `made`."""
    values = provenance._asdict()
    return values | values.pop("made")


def _read(path: Path) -> Provenance:
    """Reads a provenance."""
    value = read_json_object(path)
    is_valid = value.keys() == _FIELDS.keys()
    is_valid = is_valid and all(type(value[name]) in kinds for name, kinds in _FIELDS.items())
    if not is_valid or value["num_tokens"] < 1:
        raise UserError(f"{path} is not the provenance of an answer file")
    return Provenance(**value)


def read_files(folder: Path) -> list[AnswerFile]:
    """Returns the answer files in the folder of a benchmark, sorted by name."""
    paths = sorted(folder.glob("*.json"))
    files = [AnswerFile(path.with_suffix(".jsonl"), _read(path)) for path in paths]
    return [file for file in files if file.path.is_file()]


def recover(path: Path) -> list[JsonObject]:
    """Reads the lines of an answer file and removes an incomplete last line.

    An interrupted run may leave a last line without a newline. `append` ends every line with one.
    """
    data = path.read_bytes() if path.is_file() else b""
    complete_lines = data[: data.rfind(b"\n") + 1]
    if complete_lines != data:
        replace_file(path, complete_lines)
    lines = read_json_lines(path) if complete_lines.strip() else []
    for place, value in lines:
        identity(value, "question_id", place)
        for name in ("prompt", "text"):
            field(value, name, place, lambda text: isinstance(text, str), "a text")
    return [value for _, value in lines]


def find_unanswered(file: AnswerFile, questions: Sequence[BenchmarkQuestion]) -> list[int]:
    """Returns the numbers of the questions without an answer in a file.

    Also merges the parts of the file and sorts its lines in the order of the questions. Only one
    process may call this function, and no process may write at the same time. A question that
    occurs twice needs two lines.

    Raises:
        ValueError: a line answers another question.
    """
    unanswered_numbers = defaultdict(list)  # by key of the question
    for number, question in enumerate(questions):
        unanswered_numbers[question.key].append(number)
    lines: dict[int, JsonObject] = {}  # by number of the question
    parts, num_lines = file.parts(), 0
    for path in parts:
        for value in recover(path):
            num_lines += 1
            key = str(value["question_id"]), value["prompt"]
            if key not in unanswered_numbers:
                raise UserError(
                    f"{path}: question {key[0]!r} with the prompt {key[1][:60]!r} is not one of "
                    "this benchmark; move the file away"
                )
            if unanswered_numbers[key]:  # the first of several answers counts
                lines[unanswered_numbers[key].pop(0)] = value
    sorted_numbers = sorted(lines)
    if len(parts) > 1 or num_lines > len(lines) or list(lines) != sorted_numbers:
        replace_file(file.path, b"".join(_encode(lines[number]) for number in sorted_numbers))
        for path in parts:
            if path != file.path:
                path.unlink()
    return [number for number in range(len(questions)) if number not in lines]


def append(path: Path, lines: Iterable[JsonObject]) -> None:
    """Appends lines to a file and flushes them to disk."""
    with file_named(path), path.open("ab") as out:
        for line in lines:
            out.write(_encode(line))
        out.flush()
        os.fsync(out.fileno())


def answer_object(
    file: AnswerFile, number: int, question: BenchmarkQuestion, line: AnswerLine
) -> JsonObject:
    """Builds the JSON object of a line.

    Args:
        file: the answer file.
        number: number of the question.
        question: the question.
        line: the answer.

    Returns:
        LLaVA's fields in LLaVA's order, followed by the fields of the answer.
    """
    fields = dict(question.fields)
    first_fields = {name: fields.pop(name) for name in ("round_id",) if name in fields}
    value = {"question_id": question.question_id, **first_fields, "prompt": question.prompt}
    value |= {"text": line.text, **fields, "answer_id": f"{file.path.stem}-{number}"}
    value |= {"model_id": file.provenance.model, "metadata": {}}
    value |= {"kept": line.kept, "ms": None if line.ms is None else round(line.ms, 3)}
    return value | line.fields


def _encode(value: JsonObject) -> bytes:
    """Returns a line of JSON as bytes."""
    # An answer may contain an unpaired surrogate, which only ASCII escapes can express.
    return json.dumps(value, ensure_ascii=True).encode() + b"\n"
