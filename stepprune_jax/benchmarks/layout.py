"""Files of a benchmark under a root in LLaVA's layout (`playground/data/eval`)."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepprune_jax.data.json_files import replace_file
from stepprune_jax.user_input import UserError

DATA = "playground/data/eval"


def file(path: Path, source: str) -> Path:
    """Returns a path; raises a FileNotFoundError that names the source if the file is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: get it from {source}")
    return path


def records(value: Mapping[str, object], field: str, path: Path) -> list[tuple[str, Any]]:
    """Returns the entries of the list in a file's field, each with its place for messages."""
    entries = value.get(field)
    if not isinstance(entries, list) or not entries:
        raise UserError(f'{path}: expected a list under "{field}"')
    return [(f"{path}: {field} {number}", entry) for number, entry in enumerate(entries, start=1)]


@contextlib.contextmanager
def expected(where: str, what: str) -> Iterator[None]:
    """Turns a missing field or a wrong type into a UserError that names the record."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{where}: expected {what} ({error!r})") from error


def size_warnings(what: str, count: int, published: int) -> list[str]:
    """Returns a warning if a list is not as long as the published one."""
    if count == published:
        return []
    return [f"{what}: {count:,} here, {published:,} in the published list"]


def write_submission(out: str | Path, content: bytes) -> None:
    """Writes a submission atomically, so that an interrupted run keeps the earlier file."""
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)
