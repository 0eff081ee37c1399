"""What the commands share: flags, configuration files, and user errors reported in one line."""

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

from stepprune_jax.user_input import is_user_error


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line on stderr and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Writes the message, without the usage, and exits."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def run(name: str, main: Callable[[], None]) -> None:
    """Parses the flags, among them `--config`, which is required, and calls `main`.

    Without `--workdir`, where a program has that flag, the run's folder is `default_workdir`.

    Reports a mistake in the flags, or an error that `main` marks with `user_input`, in one line on
    stderr and exits with status 2. Any other error is a bug and keeps its traceback.

    Args:
        name: name of the program, for messages.
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
        arguments: the arguments, with the program's name in front.
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
            message = error.args[0] if isinstance(error, KeyError) else error.args[0].args[0]
            raise ValueError(f"--config has no field {' '.join(message.splitlines())}") from error
        raise ValueError(f"--config: {file}, line {line}: {_message(error)}") from error
    if len(rest) > 1:
        raise ValueError(f"unexpected arguments: {' '.join(rest[1:])}")
    values["config"].value.items()  # a file that could not be read says so only when it is used
    return rest


def default_workdir(config: str) -> str:
    """Returns the folder of a run: "runs/llava7b-literal" for "configs/llava7b.py:literal"."""
    file, _, argument = config.partition(":")
    return str(Path("runs") / "-".join(filter(None, (Path(file).stem, argument))))


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Reports errors that are marked with `user_input` in one line and exits with status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        _exit(name, " ".join(str(error).split()))


def _place(error: Exception) -> tuple[str, int]:
    """File and line where a configuration failed."""
    if isinstance(error, SyntaxError):
        return str(error.filename), error.lineno or 0
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno or 0


def _message(error: Exception) -> str:
    """Kind and message of an error; a SyntaxError's own words repeat the place."""
    message = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {message}"


def _exit(name: str, message: str) -> NoReturn:
    """Prints a message and exits with status 2."""
    print(f"{name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
