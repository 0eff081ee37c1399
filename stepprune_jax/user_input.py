"""Distinguishes a user's mistake from a bug by the place where the error was raised."""

import contextlib
import difflib
import functools
import logging
import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)
_MARK = "_stepprune_jax_user_input"


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Marks errors raised inside as errors in the user's input; also a decorator.

    Meant for code that reads and checks a configuration, data and models. The errors themselves do
    not change; `is_user_error` tells them from errors raised elsewhere. An import fails where a
    package is missing that only some models need.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        setattr(error, _MARK, True)
        raise


def check(*rules: tuple[bool, str]) -> None:
    """Raises a ValueError with the first message whose condition is false."""
    for fits, message in rules:
        if not fits:
            raise ValueError(message)


def expect(name: str, value: object, fits: bool, expected: str) -> None:
    """Raises a ValueError that names a value and what was `expected`, unless it fits."""
    check((fits, f"{name} is {value!r}, expected {expected}"))


@contextlib.contextmanager
def errors_named(place: str | Path) -> Iterator[None]:
    """Adds the file to errors about its fields."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {str(error).removeprefix('config.json: ')}") from error


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning about a file, which a program may read several times."""
    _LOG.warning("%s", message)


def is_user_error(error: BaseException) -> bool:
    """Returns whether an error was raised inside `user_input`."""
    return getattr(error, _MARK, False)


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

    Without such a folder it remains as given, and does not exist; `Path.expanduser` would raise.
    """
    return Path(os.path.expanduser(given))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a question that suggests another."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {similar[0]}?" if similar else ""
