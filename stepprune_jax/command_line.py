"""What the commands share: flags, configuration files, and user errors reported in one line."""

import argparse
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from absl import app, flags, logging

from stepprune_jax.user_input import is_user_error

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line on stderr and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Writes the message, without the usage, and exits; a closed pipe is no error."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
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
        # Orbax reports every file it touches, and failures with a traceback before it raises them.
        logging.set_verbosity(logging.FATAL)
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
    """Reports in one line, with exit status 2, what is no bug.

    That is what `user_input` has marked, and what the machine refuses: a full disk, a folder that
    may not be written to. Where nobody reads the output any more (`| head`) the program ends
    quietly, with the status of one that SIGPIPE has ended.

    Args:
        name: name of the program, for messages.
    """
    try:
        yield
        sys.stdout.flush()  # else a full disk is noticed when nobody can report it
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if not is_user_error(error) and not _refused_by_machine(error):
            raise
        if _refused_by_machine(error) and error.filename is None:
            _discard(sys.stdout)  # it may be what cannot be written to
        _exit(name, " ".join(str(error).split()))


def exit_with(name: str, main: Callable[[], int | None]) -> NoReturn:
    """Calls the main function of a command inside `one_line_errors` and exits with its status.

    Args:
        name: name of the program, for messages.
        main: the function; None is status 0.
    """
    with one_line_errors(name):
        status = main()
    sys.exit(status)


def _refused_by_machine(error: Exception) -> bool:
    """Whether an error is about a disk or its permissions."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def _discard(stream: TextIO) -> None:
    """Lets what is still to be written to a stream go nowhere: it is flushed once more at exit."""
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


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
