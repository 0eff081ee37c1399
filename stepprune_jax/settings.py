"""Frozen settings with defaults, which check themselves.

A group of a configuration is a frozen dataclass; a field says what it accepts beside its type:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OptimizerSettings(Settings, path="config.optimizer"):
        lr: float = positive(1e-3)
        warmup: int = count(40, least=0)

Errors name the field as users know it: "config.optimizer.lr is 0.0, expected a number above 0".
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from stepprune_jax.user_input import UserError, expect, naming, nearest

T = TypeVar("T", bound="Settings")

Holds = Callable[[Any], bool]  # whether a value of the type of a field is accepted
Annotation = Any  # the type of a field, as it is written
Default = Any  # to a type checker, a field has the type of its default

# Normal numbers of float32, apart from 0. Integers in JSON may be too large for any float.
_LEAST, _LARGEST = 2.0**-126, 2.0**127 * (2 - 2.0**-23)
_WORDS = {bool: "True or False", int: "an integer of 32 bits", float: "a number", str: "a string"}


def setting(
    default: object,
    expected: str = "",
    holds: Holds = lambda _: True,
    *,
    free: bool = False,
) -> Default:
    """Defines a field of `Settings`.

    Args:
        default: its default.
        expected: description of accepted values, for messages; by default that of the field's type.
        holds: tells whether a value of the field's type is accepted; None is, where the type is.
        free: whether a run may be resumed with another value, because no result depends on it.
    """
    metadata = {"expected": expected, "holds": holds, "free": free}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(default: int | None, least: int = 1, *, free: bool = False) -> Default:
    """Defines a field for an integer of at least `least`; `free` as in `setting`."""
    expected = f"an integer from {least}, below 2**31"
    return setting(default, expected, lambda value: value >= least, free=free)


def number(default: float | None, *, free: bool = False) -> Default:
    """Defines a field for a number of at least 0."""
    return setting(default, "a number from 0", lambda value: value >= 0, free=free)


def positive(default: float | None) -> Default:
    """Defines a field for a number above 0."""
    return setting(default, "a number above 0", lambda value: value > 0)


def share(default: float) -> Default:
    """Defines a field for a share from 0 to 1."""
    return setting(default, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def choice(default: str, names: Sequence[str]) -> Default:
    """Defines a field for one of several names."""
    return setting(default, f"one of {', '.join(names)}", lambda value: value in names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings; a subclass gives the path that its errors name, such as config.data.

    Raises:
        ValueError: a field has a value that it does not accept.
    """

    _path: ClassVar[str] = "config"

    def __init_subclass__(cls, path: str = "config", **options: object):
        super().__init_subclass__(**options)
        cls._path = path

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _accepted(type(self), field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def expect(self, name: str, fits: bool, expected: str) -> None:
        """Raises a UserError that names the field and what was `expected`, unless it fits."""
        expect(f"{self._path}.{name}", getattr(self, name), fits, expected)

    def replace(self: T, changes: Mapping[str, object]) -> T:
        """Returns these settings with some fields changed.

        Args:
            changes: values by dotted name, such as "optimizer.lr".

        Raises:
            ValueError: there is no such field, or it does not accept the value.
        """
        return _replace(self, changes, self._path)

    def flat(self) -> dict[str, object]:
        """Returns the fields by dotted name, with JSON values."""
        return dict(_walk("", json.loads(json.dumps(dataclasses.asdict(self)))))

    def free_fields(self) -> tuple[str, ...]:
        """Returns the dotted names of fields and groups that no result depends on."""
        return tuple(_free(self, ""))

    def changes(self, old: Mapping[str, object]) -> list[str]:
        """Compares these settings with those of an earlier run, as "config.name: old -> new".

        Args:
            old: result of `flat`.

        Returns:
            The differing fields, without those that no result depends on.
        """
        new, free = self.flat(), self.free_fields()
        return [
            f"config.{name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
            and not any(name == part or name.startswith(part + ".") for part in free)
        ]


def read_changes(settings: Settings, texts: Mapping[str, str]) -> dict[str, object]:
    """Reads changes from the command line, for `Settings.replace`.

    Args:
        settings: the settings that are to be changed.
        texts: values by dotted name: the text itself for a field of text, else a literal of Python.
            For a tuple it may be values with commas between them; one that has a comma needs the
            literal. No text is the empty tuple.
    """
    return {name: read_value(text, _kind_at(settings, name)) for name, text in texts.items()}


def read_value(given: object, kind: Annotation) -> object:
    """Reads a value of a type, which may be text; what cannot be read stays text, to be refused."""
    value, several = given, get_origin(kind) is tuple
    if isinstance(given, str) and kind is not str:
        if several:  # unless the whole is a literal
            value = tuple(read_value(x, get_args(kind)[0]) for x in given.split(",") if x)
        words = {"true": True, "false": False, "none": None}
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            known = given.lower() in words
            value = words[given.lower()] if known else ast.literal_eval(given)
    value = tuple(value) if isinstance(value, list) else value
    return (value,) if several and not isinstance(value, tuple) else value


def accepted(
    name: str, value: object, kind: Annotation, expected: str = "", holds: Holds = lambda _: True
) -> object:
    """Returns a value of a type, with integers as floats where the type has those.

    Raises:
        ValueError: it is refused; the message has its name. `expected` and `holds` as in `setting`.
    """
    fits = _fits(value, kind) and (value is None or holds(value))
    expect(name, value, fits, expected or _expected(kind))
    # `lr=1` is 1.0: one type, one program.
    if isinstance(value, tuple) and _fits((0.5,), kind):
        return tuple(float(item) if isinstance(item, int) else item for item in value)
    whole = isinstance(value, int) and not isinstance(value, bool) and _fits(0.5, kind)
    return float(value) if whole else value


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Returns whether a value is an integer of at least `least`; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that float32 holds; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return value == 0 or _LEAST <= abs(value) <= _LARGEST


def _accepted(cls: type[Settings], field: dataclasses.Field, value: object) -> object:
    """Returns a value of a field as it is stored; raises if it is refused."""
    limits = {name: field.metadata[name] for name in ("expected", "holds") if field.metadata}
    return accepted(f"{cls._path}.{field.name}", value, _kinds(cls)[field.name], **limits)


@functools.cache
def _kinds(cls: type) -> dict[str, Annotation]:
    return get_type_hints(cls)


def _fits(value: object, kind: Annotation) -> bool:
    """Returns whether a value is of the type that a field is annotated with."""
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, arm) for arm in arms)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arms[0]) for item in value)
    if kind is float:
        return is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31
    return isinstance(value, origin or kind)


def _expected(kind: Annotation) -> str:
    """Describes a type, for messages."""
    arms = [arm for arm in get_args(kind) if arm is not type(None)]
    if get_origin(kind) is tuple:
        return f"a tuple, each {_expected(arms[0])}"
    if get_origin(kind) is Mapping:
        return "a mapping"
    return _WORDS.get(kind) or " or ".join(map(_expected, arms)) or kind.__name__


def _replace(settings: Any, changes: Mapping[str, object], path: str) -> Any:
    """Changes the fields of a group at once, as some values are only valid together."""
    known = [field.name for field in dataclasses.fields(settings)]
    values: dict[str, object] = {}
    within: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if head not in known:
            raise UserError(f"{path}.{head} is not a field.{nearest(head, known)}")
        if rest:
            within.setdefault(head, {})[rest] = value
        else:
            values[head] = value
    for head, inner in within.items():
        old = values.get(head, getattr(settings, head))
        if isinstance(old, Mapping):
            values[head] = {**old, **inner}
        elif dataclasses.is_dataclass(old):
            values[head] = _replace(old, inner, f"{path}.{head}")
        else:
            raise UserError(f"{path}.{head}.{next(iter(inner))} is not a field")
    if isinstance(settings, Settings):  # now: a type checker around the class names no field
        fields = {field.name: field for field in dataclasses.fields(settings)}
        values = {k: _accepted(type(settings), fields[k], v) for k, v in values.items()}
    with naming(path, ValueError):  # the policy's own configurations know no UserError
        return dataclasses.replace(settings, **values)


def _kind_at(settings: object, name: str) -> Annotation:
    """Returns the type of a field by its dotted name; text if there is none."""
    head, _, rest = name.partition(".")
    kind, inner = _kinds(type(settings)).get(head, str), getattr(settings, head, None)
    return _kind_at(inner, rest) if rest and dataclasses.is_dataclass(inner) else kind


def _walk(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of nested dictionaries by dotted name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, value


def _free(settings: Settings, prefix: str) -> Iterator[str]:
    """Yields dotted names of fields marked free; fields of a free group are not listed."""
    for field in dataclasses.fields(settings):
        inner = getattr(settings, field.name)
        if field.metadata.get("free"):
            yield prefix + field.name
        elif isinstance(inner, Settings):
            yield from _free(inner, f"{prefix}{field.name}.")
