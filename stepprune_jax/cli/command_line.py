"""Shared by all commands: flags, configuration files, and user errors reported in one line."""

import argparse
import contextlib
import errno
import logging
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from stepprune_jax import configurations
from stepprune_jax.cli.compile_cache import keep_programs, user_folder
from stepprune_jax.extras import MissingPackageError, explain
from stepprune_jax.user_input import UserError, expect, local_path, one_line, require

T = TypeVar("T")

# Errors that a user can mend: a file that is absent, and a disk that refuses to be written.
_ABSENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_SIGPIPE = 13  # `signal` has no name for it on Windows
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)

# Seconds between the report of a failure and the end of its process: all processes can report.
_LAST_WORDS = 1


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line on stderr and exits with status 2.

    With `compiles`, programs are kept for later runs, and a flag prevents that.
    """

    def __init__(self, *args: Any, compiles: bool = False, **keywords: Any):
        super().__init__(*args, **keywords)
        if compiles:
            folder = user_folder() or "no folder"
            text = f"do not keep compiled programs for later runs (in {folder})"
            self.add_argument("--no_compile_cache", action="store_true", help=text)

    def parse_known_args(self, *args: Any, **keywords: Any) -> tuple[argparse.Namespace, list[str]]:
        """Reads the arguments, and makes jax keep its programs."""
        given, rest = super().parse_known_args(*args, **keywords)
        if not getattr(given, "no_compile_cache", True):
            keep_programs()
        return given, rest

    def error(self, message: str) -> NoReturn:
        """Writes the message, without the usage, and exits; a closed pipe is not an error."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def integer_from(least: int) -> Callable[[str], int]:
    """Returns a `type` of arguments that are integers of at least `least`."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (number := int(text)) < 1 << 31:  # programs count in int32
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least}, below 2**31")

    return read


def file_to_write(flag: str, given: str) -> Path:
    """Checks the file of a result before the work that leads to it."""
    path = local_path(given)
    good = bool(path.name) and not path.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    expect(flag, given, good, "a file in a folder that can be written to")
    return path


def check_creatable(flag: str, name: str, *, is_folder: bool) -> None:
    """Checks a file or folder of results, whose parents are created, before the work for it."""
    path = local_path(name)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    can_write = bool(name) and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not is_folder:
        can_write = bool(path.name) and (not path.is_dir() if path.exists() else can_write)
    kind = "folder" if is_folder else "file"
    expect(flag, name, can_write, f"a {kind} that can be created or written to")


def check_address(host: str, port: int) -> None:
    """Checks that a server can listen at an address, before the long load of a model."""
    expect("--port", port, 0 < port < 1 << 16, "1 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as error:  # the latter for names that no host can have
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: {reason}") from error


class Messages(logging.Handler):
    """Shows the library's log: warnings on stderr, progress on a stream of choice."""

    def __init__(self, progress: str):
        """Takes the name of the stream for progress, "stdout" or "stderr"."""
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message; a failure to write is an error of the program."""
        if record.levelno >= logging.WARNING:
            print(f"warning: {one_line(record.getMessage())}", file=sys.stderr, flush=True)
            if record.exc_info:
                traceback.print_exception(record.exc_info[1])
        else:  # looked up now: the stream may have been replaced
            print(record.getMessage(), file=getattr(sys, self._progress), flush=True)


def show_messages(progress: str) -> None:
    """Makes a command show the library's log."""
    # Orbax reports every file it touches, and failures with a traceback before it raises them.
    with contextlib.suppress(ModuleNotFoundError):  # a program without orbax
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.FATAL)
    # `transformers` would advise to install torch, which its tokenizers, all we use, do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # The name of a file need not be text, nor the terminal's encoding have every character.
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no such method
        sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("stepprune_jax")
    logger.handlers[:] = [Messages(progress)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl's handler would repeat it


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, `--config.FIELD` and `--workdir` to a command; see `read_config`."""
    parser.add_argument(
        "--config",
        required=True,
        help="a name, such as shapes or llava7b:literal, or a file; --config.FIELD=VALUE changes "
        "any of its fields, such as --config.optimizer.lr=1e-3",
    )
    parser.add_argument("--workdir", help="folder of the run; default: runs/CONFIG")


def read_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, kind: type[T]
) -> tuple[argparse.Namespace, T]:
    """Reads the command line of a command with `add_config`."""
    given, rest = parser.parse_known_args(arguments)
    changes, others = [], []
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--config."):
            others.append(name + equals + value)
            continue
        if not equals:  # `--config.tensorboard` alone is True
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        changes.append(f"{name.removeprefix('--config.')}={value}")
    if others:
        parser.error(f"unexpected arguments: {' '.join(others)}")
    if given.workdir == "":
        parser.error("--workdir is empty, expected a folder")
    try:
        settings = configurations.load(given.config, changes)
        found, expected = type(settings).__name__, kind.__name__
        fits = isinstance(settings, kind)
        require(fits, f"--config {given.config} is {found}, expected {expected}")
    except (UserError, OSError) as error:
        parser.error(str(error))
    given.workdir = local_path(given.workdir or default_workdir(given.config))
    return given, settings


def program(name: str) -> str:
    """Returns the name of the running console script, such as stepprune-train, or else `name`."""
    called = Path(sys.argv[0]).stem  # on Windows, scripts end in .exe
    return called if called.startswith("stepprune-") else name


def command() -> str:
    """Returns the command line of this process, for display."""
    called = program("")
    return shlex.join([called, *sys.argv[1:]] if called else ["python", *sys.argv])


def default_workdir(config: str) -> str:
    """Returns the folder of a run: "runs/llava7b-literal" for "configs/llava7b.py:literal".

    A configuration given by name has the same folder.
    """
    file, _, argument = config.partition(":")
    return str(Path("runs") / "-".join(filter(None, (Path(file).stem, argument))))


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Reports errors that are not bugs in one line, and exits with status 2.

    Which those are is said by their types: a UserError, a missing package of an extra, and refusals
    of the machine, such as a full disk, a file that is not there, too little memory, or a device
    that is not there. If the output's reader has gone (`| head`), the program ends quietly, with
    the status that SIGPIPE gives; after Ctrl-C, with that of SIGINT and one line.
    """
    try:
        yield
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()  # otherwise a full disk is noticed too late to be reported
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(signal_status(_SIGPIPE))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        sys.exit(signal_status(signal.SIGINT))
    except (UserError, MissingPackageError) as error:
        _exit(name, str(error))
    except ModuleNotFoundError as error:
        _exit(name, explain(error))
    except OSError as error:
        if error.errno in _REFUSALS and error.filename is None:
            _discard(sys.stdout)  # it may be the stream that cannot be written to
        elif error.filename is None and not isinstance(error, _ABSENT):
            raise
        _exit(name, str(error))
    except MemoryError as error:
        _exit(name, f"out of memory: {error}")
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):
            raise
        _exit(name, str(error))
    except AssertionError:
        if not _lacks_plugin():
            raise
        _exit(name, f"JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']!r}: jax has no such device")


def exit_with(name: str, main: Callable[[], int | None], progress: str = "stderr") -> NoReturn:
    """Calls the main function of a command inside `one_line_errors` and exits with its status."""
    name = program(name)
    show_messages(progress)
    with _end_at_once(), one_line_errors(name):
        status = main()
    sys.exit(status)


def signal_status(number: int) -> int:
    """Returns the exit status of a program that a signal ends, as shells count it; 0 for none."""
    return 128 + number if number else 0


@contextlib.contextmanager
def _end_at_once() -> Iterator[None]:
    """Ends a failed process at once if it is one of several.

    Otherwise jax waits five minutes for the running processes, which wait for this one.
    """
    try:
        yield
    except BaseException as error:
        jax = sys.modules.get("jax")
        status = error.code if isinstance(error, SystemExit) else 1
        if not status or jax is None or not jax.distributed.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError):
                stream.flush()
        time.sleep(_LAST_WORDS)
        os._exit(status if isinstance(status, int) else 1)


def _lacks_plugin() -> bool:
    """Returns whether JAX_PLATFORMS names a platform without its plugin: jax asserts, silently."""
    if not os.environ.get("JAX_PLATFORMS") or "jax" not in sys.modules:
        return False
    try:
        sys.modules["jax"].devices()
    except AssertionError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Discards a stream's pending output, which would otherwise be flushed again at exit."""
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


def _exit(name: str, message: str) -> NoReturn:
    """Prints a message in one line and exits with status 2."""
    print(f"{name}: error: {one_line(message)}", file=sys.stderr, flush=True)
    sys.exit(2)
