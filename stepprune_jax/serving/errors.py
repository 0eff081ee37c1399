"""Requests that are answered with an error."""

import reprlib

from stepprune_jax.user_input import one_line

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        message: what is wrong, in one line.
        field: the field of the request that it is about, or None.
    """

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.message = status, one_line(message)
        self.field = None if field is None else one_line(field[: _REPR.maxstring])


def refuse_unless(fits: bool, field: str, message: str, status: int = 400) -> None:
    """Raises a RequestError about a field, unless it `fits`."""
    if not fits:
        raise RequestError(status, message, field)


def shown(value: object) -> str:
    """Returns a value from outside for a message, cut short."""
    return _REPR.repr(value)
