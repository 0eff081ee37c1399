"""What a user gave and got wrong: one class of error, and how its messages are made."""

import contextlib
import difflib
import functools
import logging
import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)


class UserError(ValueError):
    """A mistake in what the user gave: a flag, a setting, a file, an image, a prompt.

    Its message says in one line what was given and what was expected; commands show that line, and
    the traceback of any other error.
    """


def require(condition: bool, message: str) -> None:
    """Raises a UserError with a message, unless a condition holds."""
    if not condition:
        raise UserError(message)


def expect(name: str, value: object, fits: bool, expected: str) -> None:
    """Raises a UserError that names a value and what was `expected`, unless it fits."""
    require(fits, f"{name} is {value!r}, expected {expected}")


def expect_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raises a UserError that names a value and what was `expected`, unless it is of a type."""
    require(isinstance(value, kind), f"{name} is a {type(value).__name__}, expected {expected}")


@contextlib.contextmanager
def naming(place: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Puts a place, such as a file, in front of the user's errors, unless they begin with it.

    Errors of `others` become UserErrors: other packages raise them about what the user gave.
    """
    try:
        yield
    except (UserError, *others) as error:
        message = str(error)
        if isinstance(error, UserError) and message.startswith(str(place)):
            raise
        raise UserError(f"{place}: {message.removeprefix('config.json: ')}") from error


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning about a file, which a program may read several times."""
    _LOG.warning("%s", message)


def one_line(text: object) -> str:
    """Returns a text from outside, such as a message with a file's name, as one printable line."""
    joined = " ".join(str(text).split())
    hidden = ("Cc", "Cs")  # control characters, and bytes of a file's name that are not UTF-8
    return "".join(
        x.encode("unicode_escape").decode() if unicodedata.category(x) in hidden else x
        for x in joined
    )


def local_path(given: str | Path) -> Path:
    """Returns a path from outside with the home folder in place of a leading "~".

    The path of an unknown user's folder remains as given; `Path.expanduser` would raise.

    Raises:
        UserError: the user of this process has no home folder. A folder of the name "~" would be
            created in the working directory.
    """
    path = os.path.expanduser(given)
    problem = f"{given}: this user has no home folder, expected a path without ~"
    require(path != "~" and not path.startswith("~/"), problem)
    return Path(path)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a question that suggests another."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {similar[0]}?" if similar else ""
