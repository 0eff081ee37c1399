"""What tells a mistake in the input from a bug: the place where an error was raised."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

_MARK = "_stepprune_jax_user_input"


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Says of errors raised inside that they are about what the user gave; also a decorator.

    For the parts of a program that read and check a configuration, data and models. Errors stay
    what they are; `is_user_error` tells them from those of the other parts.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        setattr(error, _MARK, True)
        raise


def is_user_error(error: BaseException) -> bool:
    """Whether an error was raised inside `user_input`."""
    return getattr(error, _MARK, False)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that ends a message about an unknown name: did they mean a similar one?

    Args:
        name: what was given.
        known: what could have been given.

    Returns:
        The question with a blank in front, or nothing if no name is similar.
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {found[0]}?" if found else ""
