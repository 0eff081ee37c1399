"""Defines configurations as frozen dataclasses that check their fields.

A group of a configuration is a subclass of `Settings`. Functions such as `positive` define a
field's default and its valid values:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OptimizerSettings(Settings, path="config.optimizer"):
        lr: float = positive(1e-3)
        warmup: int = count(40, minimum=0)

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

Validator = Callable[[Any], bool]  # returns whether a value of the field's type is valid
Annotation = Any  # type of a field, as in its annotation
Default = Any  # a field definition; a type checker sees the type of the field's default

# Smallest and largest positive normal number of float32. Programs use settings as float32.
_MIN_FLOAT32, _MAX_FLOAT32 = 2.0**-126, 2.0**127 * (2 - 2.0**-23)
_TYPE_NAMES = {
    bool: "True or False",
    int: "an integer of 32 bits",
    float: "a number",
    str: "a string",
}


def setting(
    default: object,
    expected: str = "",
    is_valid: Validator = lambda _: True,
    *,
    free: bool = False,
) -> Default:
    """Defines a field of `Settings`.

    Args:
        default: the default value.
        expected: description of valid values, for messages; "" describes the field's type.
        is_valid: returns whether a value of the field's type is valid. None is always valid if the
            type allows it.
        free: whether a run may be resumed with another value, because no result depends on it.
    """
    metadata = {"expected": expected, "is_valid": is_valid, "free": free}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(default: int | None, minimum: int = 1, *, free: bool = False) -> Default:
    """Defines a field for an integer of at least `minimum`; `free` as in `setting`."""
    expected = f"an integer from {minimum}, below 2**31"
    return setting(default, expected, lambda value: value >= minimum, free=free)


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
    """Base class of configurations and their groups.

    A subclass is declared with the path that error messages show, such as `path="config.data"`.

    Raises:
        ValueError: a field has a value that is not valid.
    """

    _path: ClassVar[str] = "config"

    def __init_subclass__(cls, path: str = "config", **options: object):
        super().__init_subclass__(**options)
        cls._path = path

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _check_field(type(self), field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def expect(self, name: str, is_valid: bool, expected: str) -> None:
        """Raises a UserError about a field if its value is not valid, as `user_input.expect`."""
        expect(f"{self._path}.{name}", getattr(self, name), is_valid, expected)

    def replace(self: T, changes: Mapping[str, object]) -> T:
        """Returns these settings with some fields changed.

        Args:
            changes: values by dotted name, such as "optimizer.lr".

        Raises:
            ValueError: there is no such field, or the value is not valid.
        """
        return _replace(self, changes, self._path)

    def flat(self) -> dict[str, object]:
        """Returns the fields as JSON values by dotted name."""
        return dict(_flatten("", json.loads(json.dumps(dataclasses.asdict(self)))))

    def free_fields(self) -> tuple[str, ...]:
        """Returns the dotted names of fields and groups that no result depends on."""
        return tuple(_list_free(self, ""))

    def changes(self, old: Mapping[str, object]) -> list[str]:
        """Compares these settings with the settings of an earlier run.

        Args:
            old: result of `flat`.

        Returns:
            A line "config.name: old -> new" for each field that differs. Fields that no result
            depends on are omitted.
        """
        new, free_names = self.flat(), self.free_fields()
        return [
            f"config.{name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
            and not any(name == free or name.startswith(free + ".") for free in free_names)
        ]


def read_changes(settings: Settings, texts: Mapping[str, str]) -> dict[str, object]:
    """Reads changes from the command line, for `Settings.replace`.

    Args:
        settings: the settings that will be changed.
        texts: values as text by dotted name. A text field takes the text itself; other fields take
            a Python literal. A tuple field also takes values with commas between them, and "" for
            the empty tuple. A value that contains a comma needs a tuple literal.

    Returns:
        The values by dotted name. A text that cannot be read stays text, which `replace` refuses.
    """
    return {name: read_value(text, _annotation_of(settings, name)) for name, text in texts.items()}


def read_value(value: object, kind: Annotation) -> object:
    """Converts a value that may be text to a type.

    Args:
        value: the value. Only text and lists are converted.
        kind: the type, as in an annotation.

    Returns:
        The converted value. A text that cannot be read stays text, which `accepted` refuses.
    """
    result, is_tuple = value, get_origin(kind) is tuple
    if isinstance(value, str) and kind is not str:
        if is_tuple:  # the default if the text is not a literal
            result = tuple(read_value(x, get_args(kind)[0]) for x in value.split(",") if x)
        constants = {"true": True, "false": False, "none": None}
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            word = value.lower()
            result = constants[word] if word in constants else ast.literal_eval(value)
    result = tuple(result) if isinstance(result, list) else result
    return (result,) if is_tuple and not isinstance(result, tuple) else result


def accepted(
    name: str,
    value: object,
    kind: Annotation,
    expected: str = "",
    is_valid: Validator = lambda _: True,
) -> object:
    """Checks a value and returns it in the form that is stored.

    Args:
        name: name of the value, for the message.
        value: the value.
        kind: the type, as in an annotation.
        expected: as in `setting`.
        is_valid: as in `setting`.

    Returns:
        The value. If the type has floats, integers become floats.

    Raises:
        ValueError: the value has another type or is not valid.
    """
    is_accepted = _has_type(value, kind) and (value is None or is_valid(value))
    expect(name, value, is_accepted, expected or _describe_type(kind))
    # `lr=1` and `lr=1.0` must give equal settings, which share one compiled program.
    if isinstance(value, tuple) and _has_type((0.5,), kind):
        return tuple(float(item) if isinstance(item, int) else item for item in value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_integer and _has_type(0.5, kind) else value


def is_count(value: object, minimum: int = 1) -> TypeGuard[int]:
    """Returns whether a value is an integer of at least `minimum` and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is 0 or a normal float32 number, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return value == 0 or _MIN_FLOAT32 <= abs(value) <= _MAX_FLOAT32


def _check_field(cls: type[Settings], field: dataclasses.Field, value: object) -> object:
    """Checks the value of a field of `cls`, as `accepted` does."""
    limits = {name: field.metadata[name] for name in ("expected", "is_valid") if field.metadata}
    return accepted(f"{cls._path}.{field.name}", value, _annotations(cls)[field.name], **limits)


@functools.cache
def _annotations(cls: type) -> dict[str, Annotation]:
    return get_type_hints(cls)


def _has_type(value: object, kind: Annotation) -> bool:
    """Returns whether a value has the type of an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if kind is float:
        return is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31
    return isinstance(value, origin or kind)


def _describe_type(kind: Annotation) -> str:
    """Describes the type of an annotation, for messages."""
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) is tuple:
        return f"a tuple, each {_describe_type(arguments[0])}"
    if get_origin(kind) is Mapping:
        return "a mapping"
    return _TYPE_NAMES.get(kind) or " or ".join(map(_describe_type, arguments)) or kind.__name__


def _replace(settings: Any, changes: Mapping[str, object], path: str) -> Any:
    """Returns settings with changed fields.

    All fields of a group change at once, because some values are only valid together.

    Args:
        settings: a dataclass.
        changes: values by dotted name.
        path: dotted path of `settings`, for messages.
    """
    names = [field.name for field in dataclasses.fields(settings)]
    values: dict[str, object] = {}
    group_changes: dict[str, dict[str, object]] = {}
    for dotted_name, value in changes.items():
        name, _, inner_name = dotted_name.partition(".")
        if name not in names:
            raise UserError(f"{path}.{name} is not a field.{nearest(name, names)}")
        if inner_name:
            group_changes.setdefault(name, {})[inner_name] = value
        else:
            values[name] = value
    for name, inner_changes in group_changes.items():
        old = values.get(name, getattr(settings, name))
        if isinstance(old, Mapping):
            values[name] = {**old, **inner_changes}
        elif dataclasses.is_dataclass(old):
            values[name] = _replace(old, inner_changes, f"{path}.{name}")
        else:
            raise UserError(f"{path}.{name}.{next(iter(inner_changes))} is not a field")
    if isinstance(settings, Settings):
        # Checked before the constructor, because a run-time type checker such as jaxtyping's would
        # raise an error there that does not name the field.
        fields = {field.name: field for field in dataclasses.fields(settings)}
        values = {k: _check_field(type(settings), fields[k], v) for k, v in values.items()}
    with naming(path, ValueError):  # configurations of the policy raise a plain ValueError
        return dataclasses.replace(settings, **values)


def _annotation_of(settings: object, dotted_name: str) -> Annotation:
    """Returns the annotation of a field, or `str` if there is no such field."""
    name, _, inner_name = dotted_name.partition(".")
    kind, value = _annotations(type(settings)).get(name, str), getattr(settings, name, None)
    if inner_name and dataclasses.is_dataclass(value):
        return _annotation_of(value, inner_name)
    return kind


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of nested dicts by dotted name."""
    if isinstance(value, dict):
        for name, inner_value in value.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else name, inner_value)
    else:
        yield prefix, value


def _list_free(settings: Settings, prefix: str) -> Iterator[str]:
    """Yields the dotted names of free fields. Fields of a free group are not listed."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata.get("free"):
            yield prefix + field.name
        elif isinstance(value, Settings):
            yield from _list_free(value, f"{prefix}{field.name}.")
