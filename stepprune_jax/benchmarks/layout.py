"""Files of a benchmark under a root in LLaVA's layout (`playground/data/eval`)."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepprune_jax.data.json_files import replace_file
from stepprune_jax.user_input import UserError

DATA = "playground/data/eval"


def require_file(path: Path, source: str) -> Path:
    """Returns the path of an existing file.

    Raises:
        FileNotFoundError: the file is missing; the message names its source.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: get it from {source}")
    return path


def list_records(content: Mapping[str, object], field: str, path: Path) -> list[tuple[str, Any]]:
    """Returns the values of a list in a JSON file, with their places.

    Args:
        content: the JSON object of the file.
        field: name of the list.
        path: the file, for messages.

    Returns:
        Pairs (place, value). The place is a text for messages: the file, the field, and the number
        of the value.

    Raises:
        UserError: the field is not a list, or the list is empty.
    """
    values = content.get(field)
    if not isinstance(values, list) or not values:
        raise UserError(f'{path}: expected a list under "{field}"')
    return [(f"{path}: {field} {number}", value) for number, value in enumerate(values, start=1)]


@contextlib.contextmanager
def refuse_malformed(place: str, description: str) -> Iterator[None]:
    """Reports missing fields and wrong types of a JSON object as a UserError.

    Inside the context, the object can be read without checks.

    Args:
        place: file and number of the object.
        description: description of the expected fields.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{place}: expected {description} ({error!r})") from error


def size_warnings(list_name: str, num_values: int, num_published: int) -> list[str]:
    """Returns a warning, in a list, if a list has another length than the published list."""
    if num_values == num_published:
        return []
    return [f"{list_name}: {num_values:,} here, {num_published:,} in the published list"]


def write_submission(out: str | Path, content: bytes) -> None:
    """Writes a submission atomically: an interruption leaves an earlier file unchanged.

    Args:
        out: path of the file. Its folder is created if needed.
        content: bytes of the file.

    Raises:
        IsADirectoryError: `out` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: expected the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)
