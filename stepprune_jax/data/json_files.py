"""Reads JSON files strictly, with the place of every mistake, and writes them atomically."""

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
        place: file and line or number of the object, for messages.
        value: the object.
    """

    place: str
    value: JsonObject


def read_json_list(file: str | Path, kind: str = "entry") -> list[Any]:
    """Reads a file that holds one JSON list.

    Args:
        file: the file.
        kind: name of the list's values, for messages.

    Returns:
        The list, which is not empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else.
    """
    try:
        value = _read_json(file)
    except UserError as error:
        has_lines = str(error).endswith("Extra data")
        hint = ": expected one list, not an object per line" if has_lines else ""
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
        file: the file.
        broken: output list. Messages about lines that are not JSON are appended. With None, such a
            line is an error.

    Returns:
        The objects in the order of the file, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file has no object.
    """
    # splitlines would also split at U+2028 and similar characters inside a JSON string.
    lines = read_text(file).split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}: line {number}"
        try:
            value = parse_json(line, place)
        except UserError as error:
            is_last = number == len(lines)
            hint = " (the last line is incomplete: was the file truncated?)" if is_last else ""
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
        unique: whether an object that repeats a name is an error. Otherwise the last value counts.

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
    """Returns the end of a message about a text that could not be parsed."""
    if isinstance(error, json.JSONDecodeError):
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        return f"{line}, column {error.colno}: not JSON: {error.msg}"
    # Other ValueErrors are about UTF-8, long integers and repeated names.
    is_too_deep = isinstance(error, RecursionError)
    return f": unreadable JSON: {'nested too deep' if is_too_deep else error}"


def _build_unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Builds an object from its members, and raises if a name occurs twice."""
    result: JsonObject = {}
    for name, value in pairs:
        if name in result:
            raise UserError(f"{name!r} is given twice")
        result[name] = value
    return result


def as_object(value: object, place: str) -> JsonObject:
    """Returns a value that must be a JSON object; `place` is its source, for the error."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected a JSON object, got {_describe(value)}")
    return value


def field(
    value: Mapping[str, object],
    name: str,
    place: str,
    is_valid: Callable[[Any], bool],
    expected: str,
) -> Any:
    """Reads a field of a JSON object.

    Args:
        value: the object.
        name: name of the field.
        place: source of the object, for the message.
        is_valid: returns whether a value is accepted. Receives None for a missing field.
        expected: description of accepted values, for the message.

    Returns:
        The field's value.

    Raises:
        ValueError: the value is not accepted.
    """
    field_value = value.get(name)
    if not is_valid(field_value):
        problem = f"is {_describe(field_value)}" if name in value else "is missing"
        raise UserError(f'{place}: "{name}" {problem}, expected {expected}')
    return field_value


def words(
    value: Mapping[str, object], name: str, place: str, expected: str = "a text that is not blank"
) -> str:
    """Reads a field that must be a string with visible characters, as `field` does."""

    def is_valid(text: object) -> bool:
        return isinstance(text, str) and bool(text.strip()) and not _SURROGATE.search(text)

    return field(value, name, place, is_valid, expected)


def identity(value: Mapping[str, object], name: str, place: str) -> str:
    """Reads an id, which must be an integer or a string with visible characters, as text."""
    number = value.get(name)
    if isinstance(number, int) and not isinstance(number, bool):
        return str(number)
    return words(value, name, place)


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
    partial = path.with_name(f"{path.name}.partial")
    try:
        with file_named(partial):
            partial.write_bytes(data)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # on a full disk, an incomplete file remains


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
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line}: not UTF-8: {error.reason}") from error


def _describe(value: object) -> str:
    """Describes a parsed value: the JSON type of a container, the text of a scalar."""
    if isinstance(value, (dict, list)):
        article, kind = ("an", "object") if isinstance(value, dict) else ("a", "list")
        return f"{article} {kind}" if value else f"an empty {kind}"
    text = json.dumps(value)
    return text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}..."
