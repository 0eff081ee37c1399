"""Files of a benchmark under a root in LLaVA's layout (`playground/data/eval`)."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepprune_jax.data.json_files import replace_file
from stepprune_jax.user_input import UserError

DATA = "playground/data/eval"


def file(path: Path, source: str) -> Path:
    """Returns the path of an existing file.

    Raises:
        FileNotFoundError: the file is missing; the message names its source.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: get it from {source}")
    return path


def records(value: Mapping[str, object], field: str, path: Path) -> list[tuple[str, Any]]:
    """Returns the entries of a list in a JSON file.

    Args:
        value: the JSON object of the file.
        field: name of the list.
        path: the file, for messages.

    Returns:
        Pairs (place for messages, entry).
    """
    entries = value.get(field)
    if not isinstance(entries, list) or not entries:
        raise UserError(f'{path}: expected a list under "{field}"')
    return [(f"{path}: {field} {number}", entry) for number, entry in enumerate(entries, start=1)]


@contextlib.contextmanager
def expected(place: str, what: str) -> Iterator[None]:
    """Converts errors about missing fields or wrong types inside the context to UserErrors.

    Args:
        place: file and number of the record.
        what: description of the expected fields.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{place}: expected {what} ({error!r})") from error


def size_warnings(what: str, count: int, published: int) -> list[str]:
    """Returns a list of one warning if a list has another length than the published one."""
    if count == published:
        return []
    return [f"{what}: {count:,} here, {published:,} in the published list"]


def write_submission(out: str | Path, content: bytes) -> None:
    """Writes a submission atomically. An interrupted run leaves an earlier file unchanged."""
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)
