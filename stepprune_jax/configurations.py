"""Configurations by name: "shapes", "llava7b:literal".

They are the files of `configs/`, which an installed package contains. A configuration that builds
on another one calls `load`:

    from stepprune_jax import configurations

    def get_config(arg=""):
        c = configurations.load("shapes", arg)
        c.data.folder = "my_data"
        return c
"""

import runpy
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from stepprune_jax.user_input import nearest

_PACKAGE = Path(__file__).parent


def names() -> list[str]:
    """Returns the names of all configurations, in alphabetical order."""
    return sorted(path.stem for path in _folder().glob("*.py"))


def find(config: str) -> str:
    """Resolves a configuration to its file.

    Args:
        config: one of `names`, or the path of a file; an argument may follow a colon.

    Returns:
        The path of the file, followed by a colon and the argument if there is one.

    Raises:
        FileNotFoundError: there is no such name or file; the message lists the names.
    """
    name, colon, argument = config.partition(":")
    known = names()
    if name in known:
        return f"{_folder() / name}.py{colon}{argument}"
    if not Path(name).is_file():
        raise FileNotFoundError(
            f"no configuration file {name}, and no configuration of that name."
            f"{nearest(name, known)} The names are {', '.join(known)}"
        )
    return config


def load(name: str, argument: str = "") -> ConfigDict:
    """Returns a configuration, for another one to build on.

    Args:
        name: one of `names`, or the path of a file.
        argument: argument of its `get_config`, such as "literal".

    Raises:
        FileNotFoundError: there is no such configuration.
        ValueError: it does not take the argument.
    """
    get_config = runpy.run_path(find(name))["get_config"]
    return get_config(argument) if argument else get_config()


def load_config(path: str, changes: Sequence[str] = ()) -> ConfigDict:
    """Loads a configuration file like a command's `--config`.

    Args:
        path: path or name of the configuration; an argument may follow a colon.
        changes: changes, each "field=value", as in `--config.field=value`.

    Returns:
        The configuration.

    Raises:
        FileNotFoundError: no such file or name.
        ValueError: a change to an unknown field, or of another type.
    """
    path = find(path)
    for change in changes:
        if "=" not in change:
            raise ValueError(f"--set {change!r}: expected FIELD=VALUE")
    arguments = ["", f"--config={path}", *(f"--config.{change}" for change in changes)]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", flag_values=values, sys_argv=arguments, lock_config=False
    )
    try:
        values(arguments)
    except flags.Error as error:
        raise ValueError(str(error).replace("flag --config.", "--set ")) from error
    except AttributeError as error:
        raise ValueError(f"--set: the configuration has no field {error}") from error
    return values["config"].value


def _folder() -> Path:
    """Returns the folder of the files: in the package, or beside it in a clone."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
