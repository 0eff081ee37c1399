"""Parts of all commands: flags, configuration files, log messages, and user errors in one line."""

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
from stepprune_jax.user_input import UserError, expect, local_path, one_line

T = TypeVar("T")

# Errors that a user can fix: a wrong path, and a disk that is full or cannot be written to.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_SIGPIPE = 13  # On Windows, `signal` has no SIGPIPE.

# Seconds between a failure and the end of its process, so that all processes can report theirs.
_EXIT_DELAY = 1


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line on stderr and exits with status 2.

    A command with `compiles` has a flag --no_compile_cache. Without this flag, jax stores compiled
    programs on disk for later runs.
    """

    def __init__(self, *args: Any, compiles: bool = False, **keywords: Any):
        """Takes the arguments of `argparse.ArgumentParser`, and whether the command uses jax."""
        super().__init__(*args, **keywords)
        if compiles:
            folder = user_folder() or "no folder"
            text = f"do not keep compiled programs for later runs (in {folder})"
            self.add_argument("--no_compile_cache", action="store_true", help=text)

    def parse_known_args(self, *args: Any, **keywords: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parses the arguments and, unless the user opts out, turns on the compilation cache."""
        flags, unparsed = super().parse_known_args(*args, **keywords)
        if not getattr(flags, "no_compile_cache", True):
            keep_programs()
        return flags, unparsed

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage, and exits. A closed pipe is not an error."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def integer_from(minimum: int) -> Callable[[str], int]:
    """Returns a `type` for argparse: an integer of at least `minimum` that fits int32."""

    def parse_integer(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= (number := int(text)) < 1 << 31:  # Programs count in int32.
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum}, below 2**31")

    return parse_integer


def file_to_write(flag: str, name: str) -> Path:
    """Returns the path of a result file, checked before the command computes the result.

    Args:
        flag: the flag that names the file, for the error message.
        name: the value of the flag.

    Raises:
        UserError: the file cannot be written.
    """
    path = local_path(name)
    has_access = os.access(path.parent, os.W_OK | os.X_OK)
    is_writable = bool(path.name) and not path.is_dir() and has_access
    expect(flag, name, is_writable, "a file in a folder that can be written to")
    return path


def check_creatable(flag: str, name: str, *, is_folder: bool) -> None:
    """Checks that a command will be able to create a result file or folder and its parents.

    Args:
        flag: the flag that names the result, for the error message.
        name: the value of the flag.
        is_folder: whether the result is a folder.

    Raises:
        UserError: the result cannot be created or written to.
    """
    path = local_path(name)
    existing_path = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    has_access = os.access(existing_path, os.W_OK | os.X_OK)
    is_creatable = bool(name) and existing_path.is_dir() and has_access
    if not is_folder:
        is_creatable = bool(path.name) and (not path.is_dir() if path.exists() else is_creatable)
    kind = "folder" if is_folder else "file"
    expect(flag, name, is_creatable, f"a {kind} that can be created or written to")


def check_address(host: str, port: int) -> None:
    """Checks that a server can listen at an address, before the command loads a model.

    Raises:
        UserError: the port is out of range or in use, or the host is unknown.
    """
    expect("--port", port, 0 < port < 1 << 16, "1 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have such a name.
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: {reason}") from error


class Messages(logging.Handler):
    """Prints the library's log: warnings on stderr, progress on stdout or stderr."""

    def __init__(self, progress: str):
        """Takes the name of the stream for progress, "stdout" or "stderr"."""
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message. Errors of writing are raised, unlike in other logging handlers."""
        if record.levelno >= logging.WARNING:
            print(f"warning: {one_line(record.getMessage())}", file=sys.stderr, flush=True)
            if record.exc_info:
                traceback.print_exception(record.exc_info[1])
        else:  # The stream is looked up now because a test or a notebook may replace it.
            print(record.getMessage(), file=getattr(sys, self._progress), flush=True)


def show_messages(progress: str) -> None:
    """Prints the library's log on the stream `progress`, and silences other packages."""
    # Orbax logs every file, and logs the traceback of each exception before it raises it.
    with contextlib.suppress(ModuleNotFoundError):  # Not all commands need orbax.
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.FATAL)
    # `transformers` advises to install torch, which its tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # A file's name may contain bytes that are no text, or characters that the terminal lacks.
    if hasattr(sys.stdout, "reconfigure"):  # The stdout of a notebook has no such method.
        sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("stepprune_jax")
    logger.handlers[:] = [Messages(progress)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # The handler of absl would print each message again.


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and `--workdir` to a command. `read_config` also reads `--config.FIELD`."""
    parser.add_argument(
        "--config",
        required=True,
        help="a name, such as shapes or llava7b:literal, or a file; --config.FIELD=VALUE changes "
        "any of its fields, such as --config.optimizer.lr=1e-3",
    )
    parser.add_argument("--workdir", help="folder of the run; default: runs/CONFIG")


def read_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, settings_type: type[T]
) -> tuple[argparse.Namespace, T]:
    """Parses the command line of a command with `add_config`.

    Args:
        parser: the command's parser.
        arguments: command-line arguments; None reads the arguments of the process.
        settings_type: type of the configuration that the command expects.

    Returns:
        The flags, with `workdir` as a path, and the configuration.
    """
    flags, unparsed = parser.parse_known_args(arguments)
    changes, unexpected = [], []
    while unparsed:
        name, equals, value = unparsed.pop(0).partition("=")
        if not name.startswith("--config."):
            unexpected.append(name + equals + value)
            continue
        if not equals:  # `--config.tensorboard` means `--config.tensorboard=True`.
            value = unparsed.pop(0) if unparsed and not unparsed[0].startswith("--") else "True"
        changes.append(f"{name.removeprefix('--config.')}={value}")
    if unexpected:
        parser.error(f"unexpected arguments: {' '.join(unexpected)}")
    if flags.workdir == "":
        parser.error("--workdir is empty, expected a folder")
    try:
        settings = configurations.load(flags.config, changes)
        actual_kind, expected_kind = type(settings).__name__, settings_type.__name__
        if not isinstance(settings, settings_type):
            raise UserError(f"--config {flags.config} is {actual_kind}, expected {expected_kind}")
    except (UserError, OSError) as error:
        parser.error(str(error))
    flags.workdir = local_path(flags.workdir or default_workdir(flags.config))
    return flags, settings


def program(name: str) -> str:
    """Returns the name of the running console script, such as stepprune-train, or else `name`."""
    script = Path(sys.argv[0]).stem  # On Windows, scripts end in .exe.
    return script if script.startswith("stepprune-") else name


def command() -> str:
    """Returns the command line of this process, for display."""
    script = program("")
    return shlex.join([script, *sys.argv[1:]] if script else ["python", *sys.argv])


def default_workdir(config: str) -> str:
    """Returns the default folder of a run: "runs/llava7b-literal" for "configs/llava7b.py:literal".

    A file and the name of a packaged configuration have the same folder.
    """
    file, _, argument = config.partition(":")
    return str(Path("runs") / "-".join(filter(None, (Path(file).stem, argument))))


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Reports errors that are not bugs in one line, and exits with status 2.

    These errors are UserErrors, missing packages of an extra, missing files, full disks, missing
    devices and exhausted memory. Other exceptions are raised. If the reader of the output is gone
    (`| head`), the program ends quietly with the status of SIGPIPE. After Ctrl-C, it prints one
    line and ends with the status of SIGINT.

    Args:
        name: name of the command, which begins each message.
    """
    try:
        yield
        if sys.stdout is not None:  # `>&-` closes stdout.
            sys.stdout.flush()  # Here, the error of a full disk can still be reported.
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
        if error.errno in _DISK_ERRNOS and error.filename is None:
            _discard(sys.stdout)  # The stream that cannot be written to may be stdout.
        elif error.filename is None and not isinstance(error, _PATH_ERRORS):
            raise
        _exit(name, str(error))
    except MemoryError as error:
        _exit(name, f"out of memory: {error}")
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):
            raise
        _exit(name, str(error))
    except AssertionError:
        if not _has_missing_platform():
            raise
        _exit(name, f"JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']!r}: jax has no such device")


def exit_with(name: str, main: Callable[[], int | None], progress: str = "stderr") -> NoReturn:
    """Runs the main function of a command inside `one_line_errors`, and exits with its status.

    Args:
        name: name of the command, used when it is not run as a console script.
        main: returns the exit status; None is 0.
        progress: the stream for progress messages, "stdout" or "stderr".
    """
    name = program(name)
    show_messages(progress)
    with _end_at_once(), one_line_errors(name):
        status = main()
    sys.exit(status)


def signal_status(number: int) -> int:
    """Returns the exit status of a program that a signal ends, as shells define it.

    A program without a signal (`number` is 0) has status 0.
    """
    return 128 + number if number else 0


@contextlib.contextmanager
def _end_at_once() -> Iterator[None]:
    """Ends a failed process of a multi-process run at once.

    A normal exit would wait five minutes: jax waits for the running processes, which wait for this
    process.
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
        time.sleep(_EXIT_DELAY)
        os._exit(status if isinstance(status, int) else 1)


def _has_missing_platform() -> bool:
    """Returns whether JAX_PLATFORMS names a platform without a plugin.

    jax then raises an AssertionError without a message.
    """
    if not os.environ.get("JAX_PLATFORMS") or "jax" not in sys.modules:
        return False
    try:
        sys.modules["jax"].devices()
    except AssertionError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Discards a stream's pending output, so that the exit does not try to write it again."""
    with open(os.devnull, "w") as null_device, contextlib.suppress(OSError, ValueError):
        os.dup2(null_device.fileno(), stream.fileno())


def _exit(name: str, message: str) -> NoReturn:
    """Prints a message in one line and exits with status 2."""
    print(f"{name}: error: {one_line(message)}", file=sys.stderr, flush=True)
    sys.exit(2)
