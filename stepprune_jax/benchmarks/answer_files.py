"""Answer files as a run writes them: line by line, resumed after an interruption.

`METHOD.jsonl` is accompanied by `METHOD.json`, its provenance: everything that determines the
answers. A run of another provenance does not add to the file. If several processes share the
questions, all but the first write to separate files, `METHOD.part-1.jsonl` and so on, which are
merged later.
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
    """Returns the pruned share of an image's tokens in percent, to one decimal."""
    return round(100 * (1 - count / num_tokens), 1)


class Provenance(NamedTuple):
    """Provenance of an answer file: everything that determines its answers.

    `questions` is a digest of the `asked` questions, and `method` the name of the table row. In the
    mode "exact" every image keeps the budget, in "adaptive" the policy stops by itself and keeps it
    on average; None is a policy's own stop, N of the `num_tokens` tokens are all of them. `made`
    holds everything else, JSON values by name.
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
        """Pruning rate in percent; None for a policy's own stop, unknown in advance."""
        return None if self.budget is None else pruning_rate(self.budget, self.num_tokens)

    @property
    def slug(self) -> str:
        """Base name of the row's files."""
        rate = [self.mode, f"{self.pruning_rate:g}"] if self.pruning_rate else []
        words = " ".join([self.method, *rate]).lower().replace("+", " plus")
        return re.sub(r"(?:[^\w.]|_)+", "-", words).strip("-") or "row"


def digest(texts: Sequence[str]) -> str:
    """Fingerprints texts, to tell whether two results are about the same questions."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def questions_digest(questions: Sequence[BenchmarkQuestion]) -> str:
    """Fingerprints a question list: its ids and messages, not its images."""
    return digest([f"{question.question_id} {question.text}" for question in questions])


class AnswerFile(NamedTuple):
    """The answers of one method to one benchmark."""

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
        """Lists the file and its parts, as far as they exist."""
        parts = sorted(self.path.parent.glob(f"{self.path.stem}.part-*.jsonl"))
        return [path for path in (self.path, *parts) if path.is_file()]


class AnswerLine(NamedTuple):
    """An answer, how many tokens were kept, its time if known, and what only some lines have.

    `gflops` are the operations up to the first token of an answer about an image; `order`, `grid`
    and `visual_tokens` the kept tokens of one that may be drawn, and of how many they are.
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
    """Raises if a file holds answers without a provenance, or of another one than this run's."""
    if not file.parts():
        return
    there = file.provenance_path.is_file()
    known, mine = _flat(_read(file.provenance_path)) if there else {}, _flat(file.provenance)
    changed = [
        f"{name}: {known.get(name)!r} -> {mine.get(name)!r}"
        for name in sorted(known.keys() | mine.keys())
        if known.get(name) != mine.get(name)
    ]
    if changed:
        differ = "; ".join(changed) if there else f"{file.provenance_path.name} is missing"
        raise UserError(
            f"{file.path} holds answers of another provenance; move it and its .json away, or give "
            f"another --workdir. {differ}"
        )


def claim(file: AnswerFile) -> None:
    """Claims a file for this run by writing its provenance next to it."""
    check_claim(file)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    write_json(file.provenance_path, file.provenance._asdict())


def _flat(provenance: Provenance) -> JsonObject:
    """Lists the values of a provenance by name."""
    values = provenance._asdict()
    return values | values.pop("made")


def _read(path: Path) -> Provenance:
    """Reads a provenance."""
    value = read_json_object(path)
    good = value.keys() == _FIELDS.keys()
    good = good and all(type(value[name]) in kinds for name, kinds in _FIELDS.items())
    if not good or value["num_tokens"] < 1:
        raise UserError(f"{path} is not the provenance of an answer file")
    return Provenance(**value)


def read_files(folder: Path) -> list[AnswerFile]:
    """Lists the answer files of one benchmark by name."""
    paths = sorted(folder.glob("*.json"))
    files = [AnswerFile(path.with_suffix(".jsonl"), _read(path)) for path in paths]
    return [file for file in files if file.path.is_file()]


def recover(path: Path) -> list[JsonObject]:
    """Reads the lines of a file in which a run may have been interrupted, and repairs its end.

    A last line without its newline is removed: `append` ends every line.
    """
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        replace_file(path, whole)
    lines = read_json_lines(path) if whole.strip() else []
    for where, value in lines:
        identity(value, "question_id", where)
        for name in ("prompt", "text"):
            field(value, name, where, lambda text: isinstance(text, str), "a text")
    return [value for _, value in lines]


def outstanding(file: AnswerFile, questions: Sequence[BenchmarkQuestion]) -> list[int]:
    """Lists unanswered questions; merges parts and sorts lines in the order of the questions.

    Must be called in one process only, while none writes. A question that occurs twice needs two
    lines.
    """
    waiting = defaultdict(list)
    for number, question in enumerate(questions):
        waiting[question.key].append(number)
    answered: dict[int, JsonObject] = {}
    parts, num_lines = file.parts(), 0
    for path in parts:
        for value in recover(path):
            num_lines += 1
            key = str(value["question_id"]), value["prompt"]
            if key not in waiting:
                raise UserError(
                    f"{path}: question {key[0]!r} with the prompt {key[1][:60]!r} is not one of "
                    "this benchmark; move the file away"
                )
            if waiting[key]:  # the first of several answers counts
                answered[waiting[key].pop(0)] = value
    ordered = sorted(answered)
    if len(parts) > 1 or num_lines > len(answered) or list(answered) != ordered:
        replace_file(file.path, b"".join(_bytes(answered[number]) for number in ordered))
        for path in parts:
            if path != file.path:
                path.unlink()
    return [number for number in range(len(questions)) if number not in answered]


def append(path: Path, lines: Iterable[JsonObject]) -> None:
    """Appends lines to a file and flushes them to disk."""
    with file_named(path), path.open("ab") as out:
        for line in lines:
            out.write(_bytes(line))
        out.flush()
        os.fsync(out.fileno())


def answer_object(
    file: AnswerFile, number: int, question: BenchmarkQuestion, line: AnswerLine
) -> JsonObject:
    """Builds a line with LLaVA's fields in LLaVA's order, then those of an `AnswerLine`."""
    fields = dict(question.fields)
    head = {name: fields.pop(name) for name in ("round_id",) if name in fields}
    value = {"question_id": question.question_id, **head, "prompt": question.prompt}
    value |= {"text": line.text, **fields, "answer_id": f"{file.path.stem}-{number}"}
    value |= {"model_id": file.provenance.model, "metadata": {}}
    value |= {"kept": line.kept, "ms": None if line.ms is None else round(line.ms, 3)}
    return value | line.fields


def _bytes(value: JsonObject) -> bytes:
    # An answer may hold half of a surrogate pair, which must be escaped.
    return json.dumps(value, ensure_ascii=True).encode() + b"\n"
