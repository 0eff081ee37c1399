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
    """All settings that determine the answers in a file. Built by `evaluation.rows.Conditions`.

    Attributes:
        benchmark: name of the benchmark.
        questions: digest of the questions.
        asked: number of questions.
        method: name of the table row.
        mode: "exact" if every image keeps `budget` tokens, "adaptive" if the count varies and
            `budget` is the mean.
        budget: number of tokens to keep per image; None for a learned stop without a budget.
        num_tokens: visual tokens of an image before pruning.
        stop_bias: number added to the stop logits; None without a learned stop.
        model: name of the model.
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
        """Pruning rate in percent; None without a budget."""
        return None if self.budget is None else pruning_rate(self.budget, self.num_tokens)

    @property
    def slug(self) -> str:
        """Base name of the answer file, made of method, mode and pruning rate."""
        budget_words = [self.mode, f"{self.pruning_rate:g}"] if self.pruning_rate else []
        title = " ".join([self.method, *budget_words]).lower().replace("+", " plus")
        return re.sub(r"(?:[^\w.]|_)+", "-", title).strip("-") or "row"


def digest(texts: Sequence[str]) -> str:
    """Returns the start of a SHA-256 digest of texts, in hexadecimal."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def questions_digest(questions: Sequence[BenchmarkQuestion]) -> str:
    """Returns a digest of the ids and messages of questions, and of the sampling of their videos.

    The digest does not cover the images.
    """
    return digest(
        [f"{question.question_id} {question.text}{question.sampling}" for question in questions]
    )


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
        """Returns the answer file with this provenance.

        Args:
            folder: folder of all answer files, with one subfolder per benchmark.
            provenance: settings that determine the answers.
        """
        return cls(folder / provenance.benchmark / f"{provenance.slug}.jsonl", provenance)

    def part(self, process_index: int) -> Path:
        """Returns the path that a process writes to; process 0 writes to the file itself."""
        if process_index == 0:
            return self.path
        return self.path.with_suffix(f".part-{process_index}.jsonl")

    def parts(self) -> list[Path]:
        """Lists the existing files with answers: the file itself, then parts of other processes."""
        part_paths = sorted(self.path.parent.glob(f"{self.path.stem}.part-*.jsonl"))
        return [path for path in (self.path, *part_paths) if path.is_file()]


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
    """Raises a UserError if a file exists with another provenance or without a provenance."""
    if not file.parts():
        return
    has_provenance = file.provenance_path.is_file()
    recorded = _flatten(_read_provenance(file.provenance_path)) if has_provenance else {}
    current = _flatten(file.provenance)
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
    """Writes the provenance of a file. Later runs with another provenance are then refused.

    Raises:
        UserError: the file exists with another provenance.
    """
    check_claim(file)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    write_json(file.provenance_path, file.provenance._asdict())


def _flatten(provenance: Provenance) -> JsonObject:
    """Returns the values of a provenance by name, with the values of `made` at the top level."""
    values = provenance._asdict()
    return values | values.pop("made")


def _read_provenance(path: Path) -> Provenance:
    """Reads the provenance of an answer file; raises a UserError for another JSON object."""
    value = read_json_object(path)
    has_valid_types = value.keys() == _FIELDS.keys() and all(
        type(value[name]) in types for name, types in _FIELDS.items()
    )
    if not has_valid_types or value["num_tokens"] < 1:
        raise UserError(f"{path} is not the provenance of an answer file")
    return Provenance(**value)


def read_files(folder: Path) -> list[AnswerFile]:
    """Returns the answer files in the folder of a benchmark, sorted by name."""
    provenance_paths = sorted(folder.glob("*.json"))
    files = [
        AnswerFile(path.with_suffix(".jsonl"), _read_provenance(path)) for path in provenance_paths
    ]
    return [file for file in files if file.path.is_file()]


def recover(path: Path) -> list[JsonObject]:
    """Reads the lines of an answer file, and removes an incomplete last line from the file.

    A complete line ends with a newline. An interrupted run may leave an incomplete line.

    Args:
        path: the file, which may not exist.

    Returns:
        The JSON objects of the complete lines.

    Raises:
        UserError: a complete line is not an answer.
    """
    content = path.read_bytes() if path.is_file() else b""
    complete_lines = content[: content.rfind(b"\n") + 1]
    if complete_lines != content:
        replace_file(path, complete_lines)
    records = read_json_lines(path) if complete_lines.strip() else []
    for place, value in records:
        identity(value, "question_id", place)
        for name in ("prompt", "text"):
            field(value, name, place, lambda text: isinstance(text, str), "a text")
    return [value for _, value in records]


def find_unanswered(file: AnswerFile, questions: Sequence[BenchmarkQuestion]) -> list[int]:
    """Returns the indices of the questions without an answer, and repairs the file.

    Repairing merges the parts of all processes into the file, drops repeated answers, and sorts the
    lines in the order of the questions. Only one process may call this function, and no process may
    write at the same time.

    Args:
        file: the answer file, which may not exist.
        questions: questions of the benchmark. A question that occurs twice needs two lines.

    Raises:
        UserError: a line answers another question.
    """
    unanswered_indices = defaultdict(list)  # by key of the question
    for index, question in enumerate(questions):
        unanswered_indices[question.key].append(index)
    lines: dict[int, JsonObject] = {}  # by index of the question
    part_paths, num_lines = file.parts(), 0
    for path in part_paths:
        for line in recover(path):
            num_lines += 1
            key = str(line["question_id"]), line["prompt"]
            if key not in unanswered_indices:
                question_id, prompt = key
                raise UserError(
                    f"{path}: question {question_id!r} with the prompt {prompt[:60]!r} is not one "
                    "of this benchmark; move the file away"
                )
            if unanswered_indices[key]:  # the first of several answers counts
                lines[unanswered_indices[key].pop(0)] = line
    sorted_indices = sorted(lines)
    is_unsorted = list(lines) != sorted_indices
    if len(part_paths) > 1 or num_lines > len(lines) or is_unsorted:
        replace_file(file.path, b"".join(_encode(lines[index]) for index in sorted_indices))
        for path in part_paths:
            if path != file.path:
                path.unlink()
    return [index for index in range(len(questions)) if index not in lines]


def append(path: Path, lines: Iterable[JsonObject]) -> None:
    """Appends lines to a file and flushes them to disk."""
    with file_named(path), path.open("ab") as file:
        for line in lines:
            file.write(_encode(line))
        file.flush()
        os.fsync(file.fileno())


def answer_object(
    file: AnswerFile, question_index: int, question: BenchmarkQuestion, line: AnswerLine
) -> JsonObject:
    """Builds the JSON object of an answer.

    Args:
        file: the answer file.
        question_index: index of the question in the benchmark.
        question: the question.
        line: the answer.

    Returns:
        LLaVA's fields in LLaVA's order, followed by `kept`, `ms` and `line.fields`.
    """
    further_fields = dict(question.fields)
    # LLaVA's files of MMBench have the field `round_id` after the id.
    round_fields = {
        name: further_fields.pop(name) for name in ("round_id",) if name in further_fields
    }
    return {
        "question_id": question.question_id,
        **round_fields,
        "prompt": question.prompt,
        "text": line.text,
        **further_fields,
        "answer_id": f"{file.path.stem}-{question_index}",
        "model_id": file.provenance.model,
        "metadata": {},
        "kept": line.kept,
        "ms": None if line.ms is None else round(line.ms, 3),
        **line.fields,
    }


def _encode(line: JsonObject) -> bytes:
    """Returns a JSON object as a line of bytes."""
    # An answer may contain an unpaired surrogate, which only ASCII escapes can express.
    return json.dumps(line, ensure_ascii=True).encode() + b"\n"
