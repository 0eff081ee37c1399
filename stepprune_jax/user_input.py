"""Errors about user input, and helpers that write their messages."""

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
    """Raised for a mistake in user input: a flag, a setting, a file, an image or a prompt.

    The message says in one line which value was given and which value was expected. Commands print
    this line without a traceback. All other errors keep their traceback.
    """


def require(condition: bool, message: str) -> None:
    """Raises a UserError with this message if the condition is false."""
    if not condition:
        raise UserError(message)


def expect(name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raises a UserError if a value is not valid.

    Args:
        name: name of the value, as the user knows it.
        value: the value.
        is_valid: result of the caller's check.
        expected: description of valid values. The message is "NAME is VALUE, expected EXPECTED".
    """
    require(is_valid, f"{name} is {value!r}, expected {expected}")


def expect_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raises a UserError if a value is not an instance of `kind`; arguments as in `expect`."""
    require(isinstance(value, kind), f"{name} is a {type(value).__name__}, expected {expected}")


@contextlib.contextmanager
def naming(place: str | Path, *error_types: type[Exception]) -> Iterator[None]:
    """Puts a place in front of the messages of UserErrors that are raised inside a `with` block.

    Args:
        place: source of the input, such as a file. A message that already begins with the place
            stays unchanged.
        *error_types: further types of errors that the block raises about user input. They become
            UserErrors.
    """
    try:
        yield
    except (UserError, *error_types) as error:
        message = str(error)
        if isinstance(error, UserError) and message.startswith(str(place)):
            raise
        raise UserError(f"{place}: {message.removeprefix('config.json: ')}") from error


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, but only once for each message."""
    _LOG.warning("%s", message)


def one_line(text: object) -> str:
    """Returns untrusted text as one printable line, with other characters escaped."""
    # Categories of control characters (Cc) and of surrogates (Cs). In file names, Python represents
    # bytes that are not UTF-8 by surrogates. Neither can be printed.
    escaped_categories = ("Cc", "Cs")

    def escape(character: str) -> str:
        if unicodedata.category(character) in escaped_categories:
            return character.encode("unicode_escape").decode()
        return character

    return "".join(map(escape, " ".join(str(text).split())))


def local_path(text: str | Path) -> Path:
    """Returns a path with the user's home folder in place of a leading "~".

    `Path.expanduser` would raise an error for "~name" of an unknown user. Here this path stays
    unchanged.

    Raises:
        UserError: the user has no home folder. Without this error, a folder with the name "~" would
            be created in the working directory.
    """
    path = os.path.expanduser(text)
    problem = f"{text}: this user has no home folder, expected a path without ~"
    require(path != "~" and not path.startswith("~/"), problem)
    return Path(path)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the question "Did you mean X?" for an unknown name, or "" if no name is similar."""
    similar = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {similar[0]}?" if similar else ""
