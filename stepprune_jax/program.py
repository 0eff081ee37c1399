"""What the programs with a configuration file share: flags, and mistakes told in one line."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging

from stepprune_jax.user_input import is_user_error


def run(name: str, main: Callable[[], None]) -> None:
    """Parses the flags, among them `--config`, which must be given, and calls `main`.

    Without `--workdir`, where a program has it, the run's folder is `default_workdir`.

    A mistake in the flags, or an error that `main` marks as `user_input`, is told in one line on
    stderr, and the exit code is 2. Any other error is a bug and keeps its traceback.

    Args:
        name: of the program, for messages.
        main: what to do; it reads the flags' values itself.
    """

    def parse(arguments: list[str]) -> list[str]:
        try:
            rest = parse_flags(arguments)
        except (flags.Error, OSError, ValueError) as error:
            # A configuration file that fails is quoted with its traceback, the message at the end.
            lines = str(error).strip().splitlines()
            _exit(name, lines[-1].strip().removeprefix("ValueError: "))
        if "workdir" in flags.FLAGS and flags.FLAGS["workdir"].value == "":
            _exit(name, "--workdir is empty, expected a folder")
        if "workdir" in flags.FLAGS and flags.FLAGS["workdir"].value is None:
            flags.FLAGS["workdir"].value = default_workdir(flags.FLAGS["config"].config_filename)
        return rest

    def call(_: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every file it touches
        with one_line_errors(name):
            main()

    flags.mark_flag_as_required("config")
    app.run(call, flags_parser=parse)


def parse_flags(arguments: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses a command line.

    Args:
        arguments: with the program's name in front.
        values: the flags that are defined, among them a configuration file called "config".

    Returns:
        The program's name.

    Raises:
        flags.Error: an unknown flag, a missing one, or a value of another type.
        OSError: there is no such configuration file.
        ValueError: the configuration has no such field, its file has a mistake, or there are other
            arguments.
    """
    try:
        rest = values(arguments)
    except (AttributeError, ImportError, KeyError, NameError, SyntaxError, TypeError) as error:
        file, line = _place(error)
        if Path(file).name == "config_dict.py":  # a KeyError, or an AttributeError around one
            said = error.args[0] if isinstance(error, KeyError) else error.args[0].args[0]
            raise ValueError(f"--config has no field {' '.join(said.splitlines())}") from error
        raise ValueError(f"--config: {file}, line {line}: {_said(error)}") from error
    if len(rest) > 1:
        raise ValueError(f"unexpected arguments: {' '.join(rest[1:])}")
    values["config"].value.items()  # a file that could not be read says so only when it is used
    return rest


def use_cores(config: Any) -> None:
    """Makes `config.cpu_devices` CPU devices, before jax starts; where it is 0, jax's own number.

    One device leaves most of a second core idle. Where jax sees accelerators it uses those.

    Args:
        config: a program's `ConfigDict`.

    Raises:
        ValueError: not an integer from 0.
    """
    count = config.get("cpu_devices", 0)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"config.cpu_devices is {count!r}, expected an integer from 0")
    if count:
        jax.config.update("jax_num_cpu_devices", count)


def _place(error: Exception) -> tuple[str, int]:
    """File and line where a configuration failed."""
    if isinstance(error, SyntaxError):
        return str(error.filename), error.lineno or 0
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno or 0


def _said(error: Exception) -> str:
    """Kind and message of an error; a SyntaxError's own words have the place once more."""
    message = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {message}"


def default_workdir(config: str) -> str:
    """The folder of a run: "runs/llava7b-literal" for "configs/llava7b.py:literal"."""
    file, _, argument = config.partition(":")
    return str(Path("runs") / "-".join(filter(None, (Path(file).stem, argument))))


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Ends the program with one line and exit code 2 on errors that are marked as `user_input`."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        _exit(name, " ".join(str(error).split()))


def _exit(name: str, message: str) -> NoReturn:
    """Prints a message and ends the program."""
    print(f"{name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
