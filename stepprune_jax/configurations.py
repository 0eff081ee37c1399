"""Loads configurations by name, such as "shapes" or "llava7b:literal".

A configuration is a Python file in `configs/`, or a file of the user. Its function `get_config` may
build on another configuration:

    from stepprune_jax import configurations

    def get_config(arg=""):
        run = configurations.load(f"shapes:{arg}")
        return run.replace({"data.folder": "my_data", "steps": 1000})
"""

import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepprune_jax.settings import Settings, read_changes
from stepprune_jax.user_input import UserError, nearest, require

_PACKAGE = Path(__file__).parent


def names() -> list[str]:
    """Returns the names of all configurations, in alphabetical order."""
    return sorted(path.stem for path in _folder().glob("*.py"))


def find(config: str) -> tuple[Path, str]:
    """Finds the file of a configuration.

    Args:
        config: one of `names`, or the path of a file. A colon and an argument of `get_config` may
            follow, as in "llava7b:literal".

    Returns:
        The file, and the argument or "".

    Raises:
        FileNotFoundError: there is no such name or file; the message lists the names.
    """
    name, _, argument = config.partition(":")
    all_names = names()
    file = _folder() / f"{name}.py" if name in all_names else Path(name)
    if not file.is_file():
        raise FileNotFoundError(
            f"no configuration file {name}, and no configuration of that name."
            f"{nearest(name, all_names)} The names are {', '.join(all_names)}"
        )
    return file, argument


def load(config: str, changes: Sequence[str] = ()) -> Any:
    """Loads a configuration by calling its `get_config`.

    Args:
        config: as in `find`.
        changes: changes of fields, each "field=value", such as "optimizer.lr=1e-3".

    Returns:
        The settings, usually a `training.Run`.

    Raises:
        FileNotFoundError: there is no such configuration.
        ValueError: the file has a mistake, or does not accept the argument or a change.
    """
    file, argument = find(config)
    try:
        get_config = runpy.run_path(str(file)).get("get_config", lambda: None)
        settings = get_config(argument) if argument else get_config()
    except OSError:
        raise
    except Exception as error:  # the file is a program, which may raise any type of error
        raise UserError(f"{_locate(error, file)}{error}") from error
    if not isinstance(settings, Settings):
        type_name = type(settings).__name__
        raise UserError(f"{file}: expected a get_config that returns settings, not {type_name}")
    texts: dict[str, str] = {}  # new values by dotted name of the field
    for change in changes:
        name, separator, value = change.partition("=")
        require(bool(separator), f"{change!r} is no change of a field, expected FIELD=VALUE")
        texts[name] = value
    return settings.replace(read_changes(settings, texts))


def _locate(error: Exception, file: Path) -> str:
    """Returns the start of a message about an error in a configuration file.

    Args:
        error: error that was raised by running the file or by calling its `get_config`.
        file: the configuration file.

    Returns:
        The file for a bad value of a field. For a bug in the file, also the line and the type of
        the error.
    """
    if isinstance(error, ValueError):  # a bad value, whose message names the field
        return f"{file}: "
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        path, line = error.filename, error.lineno
    elif path == __file__:  # the call of get_config failed, for example due to its argument
        return f"{file}: {type(error).__name__}: "
    return f"{path}, line {line}: {type(error).__name__}: "


def _folder() -> Path:
    """Returns `configs/` inside the installed package, or next to the package in a clone."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"
