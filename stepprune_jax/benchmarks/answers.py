"""Reads LLaVA's answer files: one JSON object per line, in the order of the file.

The relevant fields are `question_id`, `text` (the answer) and `prompt` (the question as the model
saw it, without the conversation template). Other programs may have written the file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.data.json_files import identity, read_json_lines, words


class Answer(NamedTuple):
    """One line of an answer file.

    Attributes:
        where: file and line, for messages.
        id: `question_id` as a string, so that 7 and "7" are the same question.
        text: the model's answer, unchanged: any string, possibly empty.
        fields: the whole object.
    """

    where: str
    id: str
    text: str
    fields: dict[str, Any]

    @property
    def prompt(self) -> str:
        """The recorded question.

        Raises:
            ValueError: the line has no `prompt` or an empty one.
        """
        return words(self.fields, "prompt", self.where)


def read_answers(file: str | Path, broken: list[str] | None = None) -> list[Answer]:
    """Reads an answer file.

    Args:
        file: UTF-8 JSON lines, with or without a byte order mark, with either kind of line end.
        broken: if given, lines that are not JSON are skipped and a message on each is appended to
            it; otherwise the first one is an error.

    Returns:
        The answers in the order of the file, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no answer, or a line, which is named, is not JSON (for an incomplete
            last line the message suggests truncation), or has no `question_id` or no string as
            `text`.
    """
    answers = []
    for where, value in read_json_lines(file, broken):
        name = identity(value, "question_id", where)
        text = value.get("text")
        if not isinstance(text, str):
            raise ValueError(f'{where}: "text" must be a string, the answer to question {name}')
        answers.append(Answer(where, name, text, value))
    return answers


def latest(
    answers: Iterable[Answer], known: Iterable[str], warnings: list[str]
) -> dict[str, Answer]:
    """Picks the last answer to each question of a benchmark.

    Args:
        answers: lines of an answer file.
        known: ids of the benchmark's questions.
        warnings: duplicates, unknown ids and missing answers are reported here.

    Returns:
        The answers by question id, in the order of `known`; unanswered questions are absent.

    Raises:
        ValueError: no line answers a question of the benchmark.
    """
    known = list(dict.fromkeys(known))
    last, repeated, unknown = dict.fromkeys(known), 0, []
    for answer in answers:
        if answer.id not in last:
            unknown.append(answer.id)
            continue
        repeated += last[answer.id] is not None
        last[answer.id] = answer
    kept = {name: answer for name, answer in last.items() if answer is not None}
    if not kept:
        raise ValueError(
            f"no answer is to a question of this benchmark, whose first question is {known[0]!r}"
        )
    if repeated:
        warnings.append(f"{repeated:,} questions answered repeatedly: the last answer counts")
    if unknown:
        ignored = f"{len(unknown):,} answers to unknown questions ignored"
        warnings.append(f"{ignored}, such as {unknown[0]!r}")
    missing = [name for name in known if name not in kept]
    if missing:
        warnings.append(
            f"{len(missing):,} of {len(known):,} questions have no answer, such as {missing[0]!r}"
        )
    return kept
