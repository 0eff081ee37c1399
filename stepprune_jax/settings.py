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
import difflib
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from stepprune_jax.user_input import UserError, expect, naming

T = TypeVar("T", bound="Settings")

Validator = Callable[[Any], bool]  # returns whether a value of the field's type is valid
Annotation = Any  # type of a field, as in its annotation
Default = Any  # a field definition; a type checker sees the type of the field's default

# Names of fields that other programs use, with ours.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "num_steps": "steps",
    "max_steps": "steps",
    "train_steps": "steps",
    "iterations": "steps",
    "epochs": "steps",
    "warmup_steps": "warmup",
    "wd": "weight_decay",
    "budget": "budgets",
}

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

    Returns:
        The definition, to be assigned to the field in the body of the class.
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
        """Raises a UserError about a field if its value is not valid, as in `user_input.expect`.

        Args:
            name: name of the field.
            is_valid: result of the caller's check.
            expected: description of valid values, for the message.
        """
        expect(f"{self._path}.{name}", getattr(self, name), is_valid, expected)

    def replace(self: T, changes: Mapping[str, object]) -> T:
        """Returns a copy of these settings with some fields changed.

        Args:
            changes: new values by dotted name, such as "optimizer.lr".

        Raises:
            ValueError: there is no such field, or the value is not valid.
        """
        return _replace(self, changes, self._path)

    def flat(self) -> dict[str, object]:
        """Returns the fields as JSON values by dotted name. Tuples become lists."""
        return dict(_flatten("", json.loads(json.dumps(dataclasses.asdict(self)))))

    def suggest(self, name: str) -> str:
        """Returns the question "Did you mean X?" for a name that is no field; see `_suggest`."""
        return _suggest(self, name, self._path)

    def free_fields(self) -> tuple[str, ...]:
        """Returns the dotted names of fields and groups that no result depends on."""
        return tuple(_list_free(self, ""))

    def changes(self, old: Mapping[str, object]) -> list[str]:
        """Lists the fields whose values differ from the settings of an earlier run.

        Fields that no result depends on are omitted (`free` in `setting`).

        Args:
            old: values of the earlier run by dotted name, as returned by `flat`.

        Returns:
            A line "config.name: old -> new" for each field that differs, in alphabetical order.
        """
        new, free_names = self.flat(), self.free_fields()

        def is_free(name: str) -> bool:
            return any(name == free or name.startswith(f"{free}.") for free in free_names)

        return [
            f"config.{name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name) and not is_free(name)
        ]


def read_changes(settings: Settings, texts: Mapping[str, str]) -> dict[str, object]:
    """Converts changes from the command line to values for `Settings.replace`.

    Args:
        settings: the settings that will be changed. They determine the type of each field.
        texts: new values as text, by dotted name. `read_value` describes the syntax.

    Returns:
        The values by dotted name. A text that does not have the field's type is returned as text,
        and `Settings.replace` raises an error for it.
    """
    return {name: read_value(text, _annotation_of(settings, name)) for name, text in texts.items()}


def read_value(value: object, annotation: Annotation) -> object:
    """Converts text to a value of a type, for values from the command line.

    For the type `str` the value is the text itself. For other types the text is a Python literal,
    such as "3" or "(1, 2)", or one of "true", "false" and "none" in any case. For a tuple type the
    text can also be the items with commas between them, such as "a,b", and "" for no items.

    Args:
        value: the text. A value that is not text is returned unchanged, except that a list becomes
            a tuple.
        annotation: the type, such as `int | None` or `tuple[str, ...]`.

    Returns:
        The value. A single item for a tuple type becomes a tuple of one item. A text that cannot be
        converted is returned as text, and `accepted` raises an error for it.
    """
    is_tuple_type = get_origin(annotation) is tuple
    if isinstance(value, str) and annotation is not str:
        value = _parse_text(value, get_args(annotation)[0] if is_tuple_type else None)
    if isinstance(value, list):
        value = tuple(value)
    return (value,) if is_tuple_type and not isinstance(value, tuple) else value


def _parse_text(text: str, item_annotation: Annotation | None) -> object:
    """Parses text as a constant, as a Python literal, or as items with commas between them.

    Args:
        text: the text.
        item_annotation: type of the items for a tuple type; None for all other types.

    Returns:
        The value, or `text` if it cannot be parsed.
    """
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    if item_annotation is None:
        return text
    return tuple(read_value(item, item_annotation) for item in text.split(",") if item)


def accepted(
    name: str,
    value: object,
    annotation: Annotation,
    expected: str = "",
    is_valid: Validator = lambda _: True,
) -> object:
    """Checks the type and validity of a value, and converts integers to floats where necessary.

    Args:
        name: name of the value, for the message.
        value: the value.
        annotation: the type, such as `int | None` or `tuple[str, ...]`.
        expected: description of valid values, for the message; "" describes `annotation`.
        is_valid: returns whether a value of this type is valid. None is always valid if the type
            allows it.

    Returns:
        The value. An integer becomes a float if the type allows floats, also inside a tuple.

    Raises:
        ValueError: the value has another type or is not valid.
    """
    is_accepted = _has_type(value, annotation) and (value is None or is_valid(value))
    expect(name, value, is_accepted, expected or _describe_type(annotation))
    # `lr=1` and `lr=1.0` must give equal settings, which share one compiled program.
    if isinstance(value, tuple) and _has_type((0.5,), annotation):
        items: tuple[Any, ...] = value
        return tuple(float(item) if isinstance(item, int) else item for item in items)
    if isinstance(value, int) and not isinstance(value, bool) and _has_type(0.5, annotation):
        return float(value)
    return value


def is_count(value: object, minimum: int = 1) -> TypeGuard[int]:
    """Returns whether a value is an integer of at least `minimum` and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is 0 or a normal float32 number, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return value == 0 or _MIN_FLOAT32 <= abs(value) <= _MAX_FLOAT32


def _check_field(cls: type[Settings], field: dataclasses.Field, value: object) -> object:
    """Checks the value of a field of `cls` with `accepted`, and returns the value to store."""
    name, annotation = f"{cls._path}.{field.name}", _annotations(cls)[field.name]
    if not field.metadata:  # a field with a plain default, which was not defined by `setting`
        return accepted(name, value, annotation)
    return accepted(name, value, annotation, field.metadata["expected"], field.metadata["is_valid"])


@functools.cache
def _annotations(cls: type) -> dict[str, Annotation]:
    """Returns the types of a class's fields by name."""
    return get_type_hints(cls)


def _has_type(value: object, annotation: Annotation) -> bool:
    """Returns whether a value has the type of an annotation, such as `float | None`.

    Integers are valid for `float`. Booleans are valid for neither `int` nor `float`.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if annotation is float:
        return is_number(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31
    return isinstance(value, origin or annotation)


def _describe_type(annotation: Annotation) -> str:
    """Describes the type of an annotation for messages, such as "a tuple, each a string"."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if get_origin(annotation) is tuple:
        return f"a tuple, each {_describe_type(arguments[0])}"
    if get_origin(annotation) is Mapping:
        return "a mapping"
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    if arguments:  # a union such as `int | str | None`
        return " or ".join(map(_describe_type, arguments))
    return annotation.__name__


def _replace(settings: Any, changes: Mapping[str, object], path: str) -> Any:
    """Returns a copy of settings with changed fields.

    All fields of a group change at once, because some values are only valid together.

    Args:
        settings: a `Settings`, or another dataclass that is a group of them.
        changes: new values by dotted name.
        path: dotted path of `settings`, for messages.

    Raises:
        ValueError: there is no such field, or the value is not valid.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    values: dict[str, object] = {}
    group_changes: dict[str, dict[str, object]] = {}  # changes inside a group, by the group's name
    for dotted_name, value in changes.items():
        name, _, inner_name = dotted_name.partition(".")
        if name not in fields:
            raise UserError(f"{path}.{name} is not a field.{_suggest(settings, name, path)}")
        if inner_name:
            group_changes.setdefault(name, {})[inner_name] = value
        else:
            values[name] = value
    for name, inner_changes in group_changes.items():
        old_group = values.get(name, getattr(settings, name))
        if isinstance(old_group, Mapping):
            values[name] = {**old_group, **inner_changes}
        elif dataclasses.is_dataclass(old_group):
            values[name] = _replace(old_group, inner_changes, f"{path}.{name}")
        else:
            raise UserError(f"{path}.{name}.{next(iter(inner_changes))} is not a field")
    if isinstance(settings, Settings):
        # Checked before the constructor, because a run-time type checker such as jaxtyping's would
        # raise an error there that does not name the field.
        values = {
            name: _check_field(type(settings), fields[name], value)
            for name, value in values.items()
        }
    with naming(path, ValueError):  # configurations of the policy raise a plain ValueError
        return dataclasses.replace(settings, **values)


def _suggest(settings: Any, name: str, path: str) -> str:
    """Suggests fields for a name that is no field of a group.

    Args:
        settings: the group, a dataclass.
        name: the unknown name, without the path of the group.
        path: dotted path of the group.

    Returns:
        A question such as " Did you mean config.optimizer.lr or config.rloo.lr?". It has the fields
        of this group and of the groups inside that have this name, or the name that this library
        uses instead, or otherwise a field with a similar name. "" if there is none.
    """
    dotted_names = [dotted_name for dotted_name, _ in _flatten("", dataclasses.asdict(settings))]
    searched_names = (name, _OTHER_NAMES.get(name, name))
    matches = [
        dotted_name
        for dotted_name in dotted_names
        if dotted_name == name or dotted_name.rpartition(".")[2] in searched_names
    ]
    # Fields of the group itself come first.
    matches.sort(key=lambda dotted_name: dotted_name.count("."))
    if not matches:
        field_names = [field.name for field in dataclasses.fields(settings)]
        matches = difflib.get_close_matches(name, field_names, n=1)
        matches = matches or difflib.get_close_matches(name, dotted_names, n=1)
    if not matches:
        return ""
    return f" Did you mean {' or '.join(f'{path}.{match}' for match in matches)}?"


def _annotation_of(settings: object, dotted_name: str) -> Annotation:
    """Returns the annotation of a field, or `str` if there is no such field."""
    name, _, inner_name = dotted_name.partition(".")
    group = getattr(settings, name, None)
    if inner_name and dataclasses.is_dataclass(group):
        return _annotation_of(group, inner_name)
    return _annotations(type(settings)).get(name, str)


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields (dotted name, value) for each leaf of nested dicts.

    Args:
        prefix: dotted name of `value`; "" for the root.
        value: a dict, or a leaf.
    """
    if isinstance(value, dict):
        for name, inner_value in value.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else name, inner_value)
    else:
        yield prefix, value


def _list_free(settings: Settings, prefix: str) -> Iterator[str]:
    """Yields the dotted names of free fields. For a free group, yields only the group's name.

    Args:
        settings: the settings or a group of them.
        prefix: dotted path of `settings` with a final dot; "" for the root.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata.get("free"):
            yield prefix + field.name
        elif isinstance(value, Settings):
            yield from _list_free(value, f"{prefix}{field.name}.")
