"""JSON files: read strictly, with the place of every mistake; written atomically."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.user_input import UserError

# Half of a pair: JSON can name it, and UTF-8 cannot hold it.
_SURROGATE = re.compile("[\ud800-\udfff]")


# A parsed object: values of any kind by name.
JsonObject = dict[str, Any]


class Record(NamedTuple):
    """One object of a file.

    Attributes:
        where: file and line or number of the object, for messages.
        value: the object.
    """

    where: str
    value: JsonObject


def read_json_list(file: str | Path, kind: str = "entry") -> list[Any]:
    """Reads a file that holds one JSON list."""
    try:
        value = _read_json(file)
    except UserError as error:
        lines = str(error).endswith("Extra data")
        hint = ": expected one list, not an object per line" if lines else ""
        raise UserError(f"{error}{hint}") from error
    if not isinstance(value, list) or not value:
        what = f"at least one {kind}" if isinstance(value, list) else "a JSON list"
        raise UserError(f"{file}: expected {what}, got {_kind(value)}")
    return value


def read_json_object(file: str | Path) -> JsonObject:
    """Reads a file that holds one JSON object."""
    return as_object(_read_json(file), str(file))


def read_json_lines(file: str | Path, broken: list[str] | None = None) -> list[Record]:
    """Reads a file with one JSON object per line."""
    # Not splitlines: a JSON string may hold other line ends, such as U+2028, as they are.
    lines = read_text(file).split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            value = parse_json(line, where)
        except UserError as error:
            cut = number == len(lines)
            hint = " (the last line is incomplete: was the file truncated?)" if cut else ""
            if broken is None:
                raise UserError(f"{error}{hint}") from error
            broken.append(f"{error}{hint}")
            continue
        records.append(Record(where, as_object(value, where)))
    if not records:
        raise UserError(f"{file}: expected one JSON object per line, got an empty file")
    return records


def parse_json(text: str | bytes, where: str, *, unique: bool = False) -> Any:
    """Parses untrusted JSON."""
    try:
        # As bytes, json would also take UTF-16 and UTF-32.
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_named_once if unique else None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}{_problem(error)}") from error


def _problem(error: ValueError | RecursionError) -> str:
    """Describes why a text could not be parsed, and where."""
    if isinstance(error, json.JSONDecodeError):
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        return f"{line}, column {error.colno}: not JSON: {error.msg}"
    deep = isinstance(error, RecursionError)  # otherwise bytes, digits or names
    return f": unreadable JSON: {'nested too deep' if deep else error}"


def _named_once(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Returns an object that gives each name once."""
    value: JsonObject = {}
    for name, inner in pairs:
        if name in value:
            raise UserError(f"{name!r} is given twice")
        value[name] = inner
    return value


def as_object(value: object, where: str) -> JsonObject:
    """Checks that a value is a JSON object."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {_kind(value)}")
    return value


def field(
    value: Mapping[str, object],
    name: str,
    where: str,
    holds: Callable[[Any], bool],
    expected: str,
) -> Any:
    """Reads a field of an object; an error names it, and what was expected."""
    found = value.get(name)
    if not holds(found):
        problem = f"is {_kind(found)}" if name in value else "is missing"
        raise UserError(f'{where}: "{name}" {problem}, expected {expected}')
    return found


def words(
    value: Mapping[str, object], name: str, where: str, expected: str = "a text that is not blank"
) -> str:
    """Reads a field that must be a non-blank string; an error says what was `expected`."""

    def holds(text: object) -> bool:
        return isinstance(text, str) and bool(text.strip()) and not _SURROGATE.search(text)

    return field(value, name, where, holds, expected)


def identity(value: Mapping[str, object], name: str, where: str) -> str:
    """Reads a field that must be a non-blank string or an integer, such as an id."""
    number = value.get(name)
    if isinstance(number, int) and not isinstance(number, bool):
        return str(number)
    return words(value, name, where)


@contextlib.contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Adds a file's name to errors without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically: a reader never sees a part of it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with file_named(partial):
            partial.write_bytes(data)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # half of it, on a full disk


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON atomically; a ValueError for NaN and infinity, which JSON lacks."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, as in a name that is not UTF-8, becomes its escape sequence in JSON.
    replace_file(path, text.encode(errors="backslashreplace"))


def write_json_lines(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON value per line, in ASCII, atomically."""
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _read_json(file: str | Path) -> Any:
    """Reads the single value of a file; errors give the place."""
    return parse_json(read_text(file), str(file))


def read_text(file: str | Path) -> str:
    """Reads a UTF-8 file whose byte order mark, if any, is dropped."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line}: not UTF-8: {error.reason}") from error


def _kind(value: object) -> str:
    """Describes a parsed value, in JSON's terms."""
    if isinstance(value, (dict, list)):
        article, kind = ("an", "object") if isinstance(value, dict) else ("a", "list")
        return f"{article} {kind}" if value else f"an empty {kind}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
