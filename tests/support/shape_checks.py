"""Checks the annotations of the package at each call.

jaxtyping's import hook decorates every function with `jaxtyping.jaxtyped`, and `tests/conftest.py`
puts `check_annotations` in its place. Both check all arguments and results, and that the axes of
one call agree. jaxtyping's decorator took a fifth of the processor time of
`tests/inference/test_generate.py`, and this one takes a quarter of that. jaxtyping's decorator
compiles two functions for each function that is defined, also for a function that is never called
and for a function inside another one, and it checks the arguments of each call twice.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError, jaxtyped

# Binds the names of axes for one call. Taken here, before the name in jaxtyping is replaced.
_one_call = functools.partial(jaxtyped, "context")


def check_annotations(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a decorator with the interface of `jaxtyped`.

    Args:
        typechecker: a decorator that checks the arguments and results of a function. It is
            applied at the first call, when the names in quoted annotations are defined.
    """

    def decorate(function: Any) -> Any:
        if inspect.isclass(function):
            if dataclasses.is_dataclass(function) and "__init__" in vars(function):
                function.__init__ = decorate(function.__init__)
            return function
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(decorate(function.__func__))
        if isinstance(function, property):
            return property(
                *(f and decorate(f) for f in (function.fget, function.fset, function.fdel))
            )
        if not function.__annotations__:
            return function
        checked_function = None

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal checked_function
            if checked_function is None:
                checked_function = typechecker(_copy(function))
            try:
                with _one_call():
                    return checked_function(*args, **kwargs)
            except BeartypeCallHintViolation as error:  # which is no TypeError
                raise TypeCheckError(str(error)) from error

        return checked

    return decorate


def _copy(function: types.FunctionType) -> types.FunctionType:
    """Copies a function, because beartype replaces quoted annotations, which `help` shows."""
    code, name, closure = function.__code__, function.__name__, function.__closure__
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = dict(function.__annotations__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy
