"""Frozen settings that check themselves, read from a configuration.

A group of a configuration is a frozen dataclass whose fields state what they accept:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OptimizerSettings(Settings, group="optimizer"):
        lr: float = positive()
        warmup: int = count(0)

`read(kind, fields)` builds one from plain mappings such as `ConfigDict.to_dict()`. Errors name the
field as users know it: "config.optimizer.lr is 0.0, expected a number above 0".
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from stepprune_jax.user_input import nearest

T = TypeVar("T", bound="Settings")

# Normal numbers of float32, apart from 0. Integers in JSON may be too large for any float.
_LEAST, _LARGEST = 2.0**-126, 2.0**127 * (2 - 2.0**-23)


def setting(
    expected: str,
    holds: Callable[[Any], bool],
    *,
    free: bool = False,
    optional: bool = False,
    default: Any = dataclasses.MISSING,
    settings: "type[Settings] | None" = None,
) -> Any:
    """Defines a field of `Settings`.

    Args:
        expected: description of accepted values, for messages.
        holds: tells whether a value is accepted.
        free: whether a run may be resumed with another value, because no result depends on it.
        optional: whether the field may be absent; it is then None.
        default: value of an absent field, if not None.
        settings: the class of a group of fields.
    """
    default = None if optional else default
    accepts = (lambda value: value is None or holds(value)) if optional else holds
    metadata = {"expected": expected, "holds": accepts, "free": free, "settings": settings}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(least: int = 1, **options: Any) -> Any:
    """Defines a field for an integer of at least `least`; options are those of `setting`."""

    def holds(value: Any) -> bool:
        return is_count(value, least) and value < 1 << 31  # programs count in int32

    return setting(f"an integer from {least}, below 2**31", holds, **options)


def integer(**options: Any) -> Any:
    """Defines a field for any integer."""
    return setting("an integer", _is_integer, **options)


def number(**options: Any) -> Any:
    """Defines a field for a finite number of at least 0."""
    return setting("a number from 0", lambda value: is_number(value) and value >= 0, **options)


def positive(**options: Any) -> Any:
    """Defines a field for a finite number above 0."""
    return setting("a number above 0", lambda value: is_number(value) and value > 0, **options)


def share(**options: Any) -> Any:
    """Defines a field for a share from 0 to 1."""

    def holds(value: Any) -> bool:
        return is_number(value) and 0 <= value <= 1

    return setting("a share from 0 to 1", holds, **options)


def choice(names: Sequence[str], **options: Any) -> Any:
    """Defines a field for one of several names."""
    return setting(f"one of {', '.join(names)}", lambda value: value in names, **options)


def text(**options: Any) -> Any:
    """Defines a field for a string."""
    return setting("a string", lambda value: isinstance(value, str), **options)


def switch(**options: Any) -> Any:
    """Defines a field for a boolean."""
    return setting("True or False", lambda value: isinstance(value, bool), **options)


def group(settings: "type[Settings]", **options: Any) -> Any:
    """Defines a field for a group of fields, itself `Settings`."""
    first = dataclasses.fields(settings)[0].name

    def holds(value: Any) -> bool:
        return isinstance(value, settings)

    return setting(f"a group with {first}", holds, settings=settings, **options)


def mapping(**options: Any) -> Any:
    """Defines a field for a group of fields that are read and checked elsewhere."""
    return setting("a group of fields", lambda value: isinstance(value, Mapping), **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings; a subclass for a group of a configuration names the group.

    Raises:
        ValueError: a field has a value that it does not accept.
    """

    _path: ClassVar[str] = "config"
    # Fields added later, by dotted name, with the values of runs begun before.
    _added: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, group: str = "", **options: Any):
        super().__init_subclass__(**options)
        cls._path = f"config.{group}" if group else "config"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            accepted = field.metadata["holds"](getattr(self, field.name))
            self.require(field.name, accepted, field.metadata["expected"])

    def require(self, name: str, holds: bool, expected: str) -> None:
        """Raises a ValueError that names the field and what was `expected`, unless `holds`."""
        if not holds:
            raise _refused(type(self), name, getattr(self, name), expected)

    def flat(self) -> dict[str, Any]:
        """Returns the fields by dotted name, with JSON values."""
        return dict(_walk("", json.loads(json.dumps(dataclasses.asdict(self)))))

    def free_fields(self) -> tuple[str, ...]:
        """Returns the dotted names of fields and groups that no result depends on."""
        return tuple(_free(type(self), ""))

    def changes(self, old: Mapping[str, Any]) -> list[str]:
        """Compares these settings with those of an earlier run, as "config.name: old -> new".

        Args:
            old: result of `flat`.

        Returns:
            The differing fields, without those that no result depends on.
        """
        new, free = self.flat(), self.free_fields()
        old = {**{name: value for name, value in self._added.items() if name in new}, **old}
        return [
            f"config.{name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
            and not any(name == part or name.startswith(part + ".") for part in free)
        ]


def read(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Builds settings from plain values, and groups from mappings.

    Args:
        kind: the class of the settings.
        fields: values by name.

    Raises:
        ValueError: a field is unknown, missing, or has a value that it does not accept.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    # Values first: that of `method` says that a whole configuration is for another program.
    for name, field in known.items():
        if name in fields:
            inner, value = field.metadata["settings"], fields[name]
            value = read(inner, value) if inner and isinstance(value, Mapping) else value
            values[name] = tuple(value) if isinstance(value, list) else value
            # Checked before the class does: a type checker would not name the field.
            if not field.metadata["holds"](values[name]):
                raise _refused(kind, name, value, field.metadata["expected"])
            if field.type in (float, float | None) and value is not None:
                values[name] = float(value)  # `lr=1` is 1.0: one type, one program
    for name in fields:
        if name not in known:
            raise ValueError(f"{kind._path}.{name} is not a field.{nearest(name, known)}")
    for name, field in known.items():
        default = field.default, field.default_factory
        if name not in fields and default == (dataclasses.MISSING, dataclasses.MISSING):
            raise ValueError(f"{kind._path}.{name} is missing")
    return kind(**values)


def _refused(kind: type[Settings], name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{kind._path}.{name} is {value!r}, expected {expected}")


def is_count(value: Any, least: int = 1) -> bool:
    """Returns whether a value is an integer of at least `least`."""
    return _is_integer(value) and value >= least


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that float32 holds; booleans are not."""
    number = isinstance(value, float | int) and not isinstance(value, bool)
    return number and (value == 0 or _LEAST <= abs(value) <= _LARGEST)


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dictionaries by dotted name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, value


def _free(kind: type[Settings], prefix: str) -> Iterator[str]:
    """Yields dotted names of fields marked free; fields of a free group are not listed."""
    for field in dataclasses.fields(kind):
        if field.metadata["free"]:
            yield prefix + field.name
        elif field.metadata["settings"]:
            yield from _free(field.metadata["settings"], f"{prefix}{field.name}.")
