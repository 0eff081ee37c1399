"""Configurations by name: "shapes", "llava7b:literal".

They are the files of `configs/`, which an installed package contains. A configuration that builds
on another one calls `load`:

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
    """Returns the file of a configuration, and the argument that follows a colon.

    Args:
        config: one of `names`, or the path of a file.

    Raises:
        FileNotFoundError: there is no such name or file; the message lists the names.
    """
    name, _, argument = config.partition(":")
    known = names()
    file = _folder() / f"{name}.py" if name in known else Path(name)
    if not file.is_file():
        raise FileNotFoundError(
            f"no configuration file {name}, and no configuration of that name."
            f"{nearest(name, known)} The names are {', '.join(known)}"
        )
    return file, argument


def load(config: str, changes: Sequence[str] = ()) -> Any:
    """Loads a configuration: the settings that its `get_config` returns.

    Args:
        config: one of `names`, or the path of a file; an argument of `get_config` may follow a
            colon, as in "llava7b:literal".
        changes: changes to its fields, each "field=value", such as "optimizer.lr=1e-3".

    Returns:
        The settings, by default a `training.Run`.

    Raises:
        FileNotFoundError: there is no such configuration.
        ValueError: it does not take the argument, has a mistake, or does not accept a change.
    """
    file, argument = find(config)
    try:
        get_config = runpy.run_path(str(file)).get("get_config", lambda: None)
        settings = get_config(*[argument] * bool(argument))
    except OSError:
        raise
    except Exception as error:  # any kind: the file is a program
        raise UserError(f"{_place(error, file)}{error}") from error
    found = f"{file}: expected a get_config that returns settings, not {type(settings).__name__}"
    require(isinstance(settings, Settings), found)
    texts = {}
    for change in changes:
        name, equals, texts[name] = change.partition("=")
        require(bool(equals), f"{change!r} is no change of a field, expected FIELD=VALUE")
    return settings.replace(read_changes(settings, texts))


def _place(error: Exception, file: Path) -> str:
    """Returns the start of a message: the file, and for a bug in it the line and the kind."""
    if isinstance(error, ValueError):  # a refused value, which names its field
        return f"{file}: "
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        where, line = error.filename, error.lineno
    elif where == __file__:  # the call itself, such as an argument that it does not take
        return f"{file}: {type(error).__name__}: "
    return f"{where}, line {line}: {type(error).__name__}: "


def _folder() -> Path:
    """Returns the folder of the files: in the package, or beside it in a clone."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
