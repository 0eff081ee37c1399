"""JSON files: read strictly, with the place of every mistake named; written whole."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One object of a file.

    Attributes:
        where: file and line or number of the object, for messages.
        value: the object.
    """

    where: str
    value: dict[str, Any]


def read_json_list(file: str | Path, kind: str = "entry") -> list[Any]:
    """Reads a file that holds one JSON list.

    Args:
        file: UTF-8, with or without a byte order mark.
        kind: what the entries are called in messages.

    Returns:
        The entries, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, not JSON (line and column are named), no list, or empty.
    """
    value = _read_json(file)
    if not isinstance(value, list):
        raise ValueError(f"{file}: expected a JSON list, got {_kind(value)}")
    if not value:
        raise ValueError(f"{file}: expected at least one {kind}, got an empty list")
    return value


def read_json_object(file: str | Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
        file: UTF-8, with or without a byte order mark.

    Returns:
        The object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, not JSON (line and column are named), or no object.
    """
    return as_object(_read_json(file), str(file))


def read_json_lines(file: str | Path, broken: list[str] | None = None) -> list[Record]:
    """Reads a file with one JSON object a line.

    Args:
        file: UTF-8, with or without a byte order mark; lines end in a newline, or in a carriage
            return and a newline. Blank lines are passed over.
        broken: where given, lines that are not JSON are skipped and a message on each is appended
            to it.

    Returns:
        The objects, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8 or holds no object; or a line, which is named, is not a JSON
            object. Of the last line the message says that the file may have been cut short.
    """
    # Not splitlines: a JSON string may hold other line ends, such as U+2028, as they are.
    lines = _read_text(file).split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            value = parse_json(line, where)
        except ValueError as error:
            cut = number == len(lines)
            hint = " (it is the last line and has no end: was the file cut short?)" if cut else ""
            if broken is None:
                raise ValueError(f"{error}{hint}") from error
            broken.append(f"{error}{hint}")
            continue
        records.append(Record(where, as_object(value, where)))
    if not records:
        raise ValueError(f"{file}: expected one JSON object a line, got an empty file")
    return records


def parse_json(text: str | bytes, where: str) -> Any:
    """Parses JSON from outside.

    Args:
        text: the JSON; bytes are UTF-8, without a byte order mark.
        where: file and place, for the message.

    Returns:
        The value.

    Raises:
        ValueError: it is no JSON, or none that can be read: not UTF-8, nested without end, a number
            of too many digits. The message is one line and has the place.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"{where}{line}, column {error.colno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: not JSON that can be read: nested too deep") from error
    except ValueError as error:  # of bytes or of digits
        raise ValueError(f"{where}: not JSON that can be read: {error}") from error


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Checks that a value is a JSON object.

    Args:
        value: what was parsed.
        where: its place, for the message.

    Returns:
        The value.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {_kind(value)}")
    return value


def words(value: dict[str, Any], field: str, where: str) -> str:
    """Reads a field that must hold words.

    Args:
        value: the object.
        field: name of the field.
        where: place of the object, for the message.

    Returns:
        The string as it is written.

    Raises:
        ValueError: the field is missing, is no string, is empty or blank, or holds half of a
            surrogate pair, which no tokenizer takes.
    """
    if field not in value:
        raise ValueError(f'{where}: "{field}" is missing')
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f'{where}: "{field}" must be a string, got {_kind(text)}')
    if not text.strip():
        raise ValueError(f'{where}: "{field}" is empty')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'{where}: "{field}" is not text: {error}') from error
    return text


def identity(value: dict[str, Any], field: str, where: str) -> str:
    """Reads a field that must hold words or a whole number, as ids do.

    Args:
        value: the object.
        field: name of the field.
        where: place of the object, for the message.

    Returns:
        The id as a string.

    Raises:
        ValueError: the field is missing or holds something else.
    """
    number = value.get(field)
    if isinstance(number, int) and not isinstance(number, bool):
        return str(number)
    return words(value, field, where)


@contextlib.contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Names a file in an error that does not: that of a write to a full disk has no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file beside its place and moves it there: a reader never sees half of it.

    Args:
        path: the file; an earlier one stays as it was until all is written.
        data: the content.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with file_named(partial):
            partial.write_bytes(data)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # half of it, on a full disk


def write_json(path: Path, value: Any) -> None:
    """Writes JSON for people to read, as `replace_file` does.

    Args:
        path: the file.
        value: what JSON can hold.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    replace_file(path, text.encode())


def _read_json(file: str | Path) -> Any:
    """Reads the one value of a file, with the place of what is not JSON."""
    return parse_json(_read_text(file), str(file))


def _read_text(file: str | Path) -> str:
    """Reads a UTF-8 file whose byte order mark, if any, is dropped."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line}: not UTF-8: {error.reason}") from error


def _kind(value: Any) -> str:
    """What a parsed value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
