"""Reads LLaVA's answer files: one JSON object per line, in the order of the file.

The relevant fields are `question_id`, `text` (the answer) and `prompt` (the question as the model
saw it, without the conversation template). Other programs may have written the file.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import JsonObject, field, identity, read_json_lines, words
from stepprune_jax.user_input import UserError


class GivenAnswer(NamedTuple):
    """A line of an answer file: its place, `question_id` as text, the answer, and all fields."""

    where: str
    id: str
    text: str
    fields: JsonObject

    @property
    def prompt(self) -> str:
        """The recorded question; raises a UserError if the line has no prompt."""
        return words(self.fields, "prompt", self.where)


def read_answers(file: str | Path, broken: list[str] | None = None) -> list[GivenAnswer]:
    """Reads an answer file, in its order.

    Lines that are not JSON are an error; or skipped, with a message on each added to `broken`.
    """
    answers = []
    for where, value in read_json_lines(file, broken):
        name = identity(value, "question_id", where)
        text = field(value, "text", where, lambda text: isinstance(text, str), "an answer")
        answers.append(GivenAnswer(where, name, text, value))
    return answers


def latest(
    answers: Iterable[GivenAnswer],
    question_ids: Iterable[str],
    warnings: list[str],
    remedy: str = "",
) -> dict[str, GivenAnswer]:
    """Returns the last answer to each question of a benchmark, in the order of `question_ids`.

    Duplicates, unknown ids and missing answers become warnings.

    Raises:
        UserError: no line answers any of the questions; the message ends with `remedy`.
    """
    question_ids = list(dict.fromkeys(question_ids))
    last, repeated, unknown = dict.fromkeys(question_ids), 0, []
    for answer in answers:
        if answer.id not in last:
            unknown.append(answer.id)
            continue
        repeated += last[answer.id] is not None
        last[answer.id] = answer
    kept = {name: answer for name, answer in last.items() if answer is not None}
    if not kept:
        first = f", such as {question_ids[0]!r}" if question_ids else ""
        raise UserError(f"no answer is to a question of this benchmark{first}{remedy}")
    if repeated:
        warnings.append(f"{repeated:,} questions answered repeatedly: the last answer counts")
    if unknown:
        ignored = f"{len(unknown):,} answers to unknown questions ignored"
        warnings.append(f"{ignored}, such as {unknown[0]!r}")
    missing = [name for name in question_ids if name not in kept]
    if missing:
        warnings.append(
            f"{len(missing):,} of {len(question_ids):,} questions have no answer, such as "
            f"{missing[0]!r}"
        )
    return kept


def require_all(
    file: str | Path,
    question_ids: Collection[str],
    answered_ids: Collection[str],
    unknown_lines: int = 0,
) -> None:
    """Raises a UserError for unanswered questions or unknown lines, as official programs do."""
    if len(answered_ids) < len(question_ids) or unknown_lines:
        missing = (name for name in question_ids if name not in answered_ids)
        example = next((f", such as {name!r}" for name in missing), "")
        count = f"{len(question_ids) - len(answered_ids):,} of {len(question_ids):,}"
        raise UserError(
            f"{file}: {count} questions have no answer{example}, and {unknown_lines:,} lines "
            "answer other questions: the official program refuses this; skip them with --missing "
            "leave-out"
        )
