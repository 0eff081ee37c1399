"""Reads JSON files strictly, with the place of every mistake, and writes them atomically.

A place is a text for error messages, such as "train.json: sample 3" or "answers.jsonl: line 2".
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.user_input import UserError

# An unpaired surrogate. JSON can contain its escape sequence, but UTF-8 cannot encode it.
_SURROGATE = re.compile("[\ud800-\udfff]")
# Longest excerpt of a value in a message, in characters.
_MAX_EXCERPT = 60


# A parsed object: values of any kind by name.
JsonObject = dict[str, Any]


class Record(NamedTuple):
    """One JSON object of a file.

    Attributes:
        place: file and line of the object, or file and index, for messages.
        value: the fields of the object by name.
    """

    place: str
    value: JsonObject


def read_json_list(file: str | Path, kind: str = "entry") -> list[Any]:
    """Reads a file that holds one JSON list.

    Args:
        file: path of the file.
        kind: what the list consists of, in the singular, for messages, such as "sample".

    Returns:
        The list, with at least one value.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not valid JSON, is not a list, or is an empty list.
    """
    try:
        value = _read_json(file)
    except UserError as error:
        # Python's JSON parser says "Extra data" if a second value follows the first.
        is_json_lines = str(error).endswith("Extra data")
        hint = ": expected one list, not an object per line" if is_json_lines else ""
        raise UserError(f"{error}{hint}") from error
    if not isinstance(value, list) or not value:
        expected = f"at least one {kind}" if isinstance(value, list) else "a JSON list"
        raise UserError(f"{file}: expected {expected}, got {_describe(value)}")
    return value


def read_json_object(file: str | Path) -> JsonObject:
    """Reads a file that holds one JSON object."""
    return as_object(_read_json(file), str(file))


def read_json_lines(file: str | Path, broken: list[str] | None = None) -> list[Record]:
    """Reads a file with one JSON object per line. Blank lines are skipped.

    Args:
        file: path of the file.
        broken: output list of messages. A line that is not JSON appends a message to it. With None,
            such a line raises an error instead.

    Returns:
        The objects in the order of the file, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file has no object.
    """
    # splitlines would also split at U+2028 and similar characters inside a JSON string.
    lines = read_text(file).split("\n")
    records = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}: line {line_number}"
        try:
            value = parse_json(line, place)
        except UserError as error:
            # A complete file ends with a line break, so the last of `lines` is then empty.
            is_incomplete = line_number == len(lines)
            hint = (
                " (the last line is incomplete: was the file truncated?)" if is_incomplete else ""
            )
            if broken is None:
                raise UserError(f"{error}{hint}") from error
            broken.append(f"{error}{hint}")
            continue
        records.append(Record(place, as_object(value, place)))
    if not records:
        raise UserError(f"{file}: expected one JSON object per line, got an empty file")
    return records


def parse_json(text: str | bytes, place: str, *, unique: bool = False) -> Any:
    """Parses untrusted JSON.

    Args:
        text: the JSON text. Bytes must be UTF-8.
        place: source of the text, for messages.
        unique: True raises an error for an object with two fields of the same name. False keeps the
            last of them.

    Returns:
        The parsed value.

    Raises:
        ValueError: the text is not valid JSON; the message gives line and column.
    """
    try:
        # json.loads would also accept bytes in UTF-16 and UTF-32.
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_build_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}{_describe_problem(error)}") from error


def _describe_problem(error: ValueError | RecursionError) -> str:
    """Describes why a text could not be parsed. The result is appended to the text's place."""
    if isinstance(error, json.JSONDecodeError):
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        return f"{line}, column {error.colno}: not JSON: {error.msg}"
    # Other ValueErrors are about UTF-8, long integers and repeated names.
    is_too_deep = isinstance(error, RecursionError)
    return f": unreadable JSON: {'nested too deep' if is_too_deep else error}"


def _build_unique(fields: list[tuple[str, Any]]) -> JsonObject:
    """Builds a JSON object from (name, value) pairs, and raises an error if a name occurs twice."""
    json_object: JsonObject = {}
    for name, value in fields:
        if name in json_object:
            raise UserError(f"{name!r} is given twice")
        json_object[name] = value
    return json_object


def as_object(value: object, place: str) -> JsonObject:
    """Returns `value` if it is a JSON object, and raises an error about `place` otherwise."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected a JSON object, got {_describe(value)}")
    return value


def field(
    json_object: Mapping[str, object],
    name: str,
    place: str,
    is_valid: Callable[[Any], bool],
    expected: str,
) -> Any:
    """Returns the checked value of a field of a JSON object.

    Args:
        json_object: the fields of the object by name.
        name: name of the field.
        place: file and line of the object, for the message.
        is_valid: returns whether a value of the field is valid. Receives None for a missing field.
        expected: description of valid values, for the message.

    Raises:
        ValueError: the field's value is not valid.
    """
    value = json_object.get(name)
    if not is_valid(value):
        problem = f"is {_describe(value)}" if name in json_object else "is missing"
        raise UserError(f'{place}: "{name}" {problem}, expected {expected}')
    return value


def words(
    json_object: Mapping[str, object],
    name: str,
    place: str,
    expected: str = "a text that is not blank",
) -> str:
    """Returns the value of a text field, which must have a character that is not a blank.

    Args:
        json_object: the fields of a JSON object by name.
        name: name of the field.
        place: file and line of the object, for the message.
        expected: description of valid values, for the message.

    Raises:
        ValueError: the field is missing, blank, or not a text that UTF-8 can encode.
    """

    def is_valid(text: object) -> bool:
        return isinstance(text, str) and bool(text.strip()) and not _SURROGATE.search(text)

    return field(json_object, name, place, is_valid, expected)


def identity(json_object: Mapping[str, object], name: str, place: str) -> str:
    """Returns an id field as text. The id must be an integer, or a text as in `words`."""
    raw_id = json_object.get(name)
    if isinstance(raw_id, int) and not isinstance(raw_id, bool):
        return str(raw_id)
    return words(json_object, name, place)


@contextlib.contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Adds a file's name to an OSError without one, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically: a reader sees the old or the new contents, never a mixture."""
    temporary_path = path.with_name(f"{path.name}.partial")
    try:
        with file_named(temporary_path):
            temporary_path.write_bytes(data)
            os.replace(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)  # on a full disk, an incomplete file remains


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON atomically.

    Raises:
        ValueError: the value contains NaN or infinity, which JSON cannot express.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # An unpaired surrogate, as in a file name that is not UTF-8, becomes its JSON escape sequence.
    replace_file(path, text.encode(errors="backslashreplace"))


def write_json_lines(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON value per line, in ASCII, atomically."""
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _read_json(file: str | Path) -> Any:
    """Reads the single JSON value of a file."""
    return parse_json(read_text(file), str(file))


def read_text(file: str | Path) -> str:
    """Reads a UTF-8 file without its byte order mark.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8; the message gives the line.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line_number}: not UTF-8: {error.reason}") from error


def _describe(value: object) -> str:
    """Describes a JSON value for messages, such as "an empty list", "an object" or "3"."""
    if isinstance(value, (dict, list)):
        article, kind = ("an", "object") if isinstance(value, dict) else ("a", "list")
        return f"{article} {kind}" if value else f"an empty {kind}"
    text = json.dumps(value)
    return text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}..."
