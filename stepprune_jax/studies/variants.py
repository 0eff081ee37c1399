"""Configurations of the trained rows, loaded from their files."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from stepprune_jax.evaluation.names import DEFAULT


class Row(NamedTuple):
    """How a row is trained.

    Attributes:
        method: name in tables.
        argument: what follows the name of the configuration file.
        changes: fields, and their values in place of the configuration's.
    """

    method: str
    argument: str = ""
    changes: tuple[tuple[str, str | float], ...] = ()


# By its name on the command line; the last five are the files of configs/ablations.
ROWS = {
    "default": Row(DEFAULT),
    "literal": Row("StepPrune literal", ":literal"),
    # With the opening of the text gate that serves it better: docs/experiments.md.
    "autoselect": Row(
        "AutoSelect-like", changes=(("method", "autoselect"), ("text_gate_anneal", 0.1))
    ),
    "causal": Row("causal encoder", changes=(("policy.encoder_attention", "causal"),)),
    "last": Row("last step's score", changes=(("policy.aggregation", "last"),)),
    "uniform": Row("uniform score", changes=(("policy.aggregation", "uniform"),)),
    "alive": Row("undiscounted score", changes=(("policy.aggregation", "alive"),)),
}


class RowConfig(NamedTuple):
    """A row to be trained.

    Attributes:
        key: on the command line, and of the run's folder.
        method: name in tables.
        config: its configuration.
    """

    key: str
    method: str
    config: ConfigDict


def load_config(path: str, changes: Sequence[str] = ()) -> ConfigDict:
    """Runs `get_config` of a configuration file.

    Args:
        path: of the file; what follows a colon is its argument.
        changes: "field=value", the value as JSON or else as a string.

    Returns:
        The configuration.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no `get_config`, or a change to a field that is not there or of another type.
    """
    name, _, argument = path.partition(":")
    if not Path(name).is_file():
        raise FileNotFoundError(f"no configuration file {name}")
    spec = importlib.util.spec_from_file_location("_row_config", name)
    module = importlib.util.module_from_spec(spec)
    # Configurations import each other from the folder of the programs.
    root = str(Path(name).resolve().parents[2 if Path(name).parent.name == "ablations" else 1])
    sys.path.insert(0, root)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(root)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{name} defines no get_config()")
    config = module.get_config(argument) if argument else module.get_config()
    return _changed(config, changes)


def _changed(config: ConfigDict, changes: Sequence[str]) -> ConfigDict:
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r}: expected FIELD=VALUE")
        if field not in _fields(config):
            raise ValueError(f"--set {change!r}: the configuration has no field {field!r}")
        try:
            config.update_from_flattened_dict({field: _value(text)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set {change!r}: {error}") from error
    return config


def _fields(config: ConfigDict, prefix: str = "") -> set[str]:
    """Dotted names of all fields."""
    names = set()
    for name in config:
        value = config.get(name)
        inner = isinstance(value, ConfigDict)
        names |= _fields(value, f"{prefix}{name}.") if inner else {prefix + name}
    return names


def _value(text: str) -> Any:
    """A value as JSON, lists as tuples; or the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value


def row_configs(config: str, rows: Sequence[str], changes: Sequence[str]) -> list[RowConfig]:
    """Loads the configurations of rows.

    Args:
        config: path of the default row's.
        rows: of `ROWS`.
        changes: as in `load_config`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an unknown row, one that comes twice, or a bad change.
    """
    unknown = [row for row in rows if row not in ROWS]
    if unknown or not rows or len({*rows}) != len(rows):
        raise ValueError(f"--rows is {list(rows)}, expected distinct ones of {', '.join(ROWS)}")
    found = []
    for key in rows:
        row = ROWS[key]
        loaded = load_config(f"{config}{row.argument}")
        loaded.update_from_flattened_dict(dict(row.changes))
        found.append(RowConfig(key, row.method, _changed(loaded, changes)))
    return found
