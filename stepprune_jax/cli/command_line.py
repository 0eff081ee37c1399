"""Functions that all commands share: flags, configurations, log messages and error reports."""

import argparse
import contextlib
import errno
import io
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
from typing import Any, NoReturn, TypeVar

from stepprune_jax import configurations
from stepprune_jax.cli.compile_cache import keep_programs, user_folder
from stepprune_jax.cli.freed_memory import keep_freed_memory
from stepprune_jax.extras import MissingPackageError, explain
from stepprune_jax.user_input import UserError, expect, local_path, nearest, one_line

T = TypeVar("T")

# Errors that a user can fix: a wrong path, and a disk that is full or cannot be written to.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_SIGPIPE = 13  # On Windows, `signal` has no SIGPIPE.

# Seconds that a failed process of a multi-process run waits before it exits. Its exit may end the
# other processes, which can print their own errors until then.
_EXIT_DELAY = 1


class StoreOnce(argparse.Action):
    """Stores the value of a flag, and refuses a second value, which argparse would keep instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Stores a value; an error names the flag if it has a value already."""
        if getattr(namespace, self.dest) != self.default:
            raise argparse.ArgumentError(self, "given twice, expected once")
        setattr(namespace, self.dest, values)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Formats the help of a command. Shows defaults except None, False and empty lists."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, [])
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line on stderr and exits with status 2.

    The help text shows the default of each flag.

    A parser of a command that compiles jax programs turns on jax's persistent compilation cache,
    unless the user passes --no_compile_cache.
    """

    def __init__(
        self,
        *args: Any,
        module_docstring: str | None = None,
        compiles: bool = False,
        **keywords: Any,
    ):
        """Creates a parser.

        Args:
            *args: positional arguments of `argparse.ArgumentParser`.
            module_docstring: docstring of the command's module. Its first line describes the
                command in the help text.
            compiles: whether the command compiles jax programs and hence has --no_compile_cache.
            **keywords: keyword arguments of `argparse.ArgumentParser`.
        """
        if module_docstring is not None:
            keywords["description"] = module_docstring.partition("\n")[0]
        self._arguments: list[str] = []
        super().__init__(*args, **{"formatter_class": _Help} | keywords)
        if compiles:
            folder = user_folder() or "no folder"
            help_text = f"do not keep compiled programs for later runs (in {folder})"
            self.add_argument("--no_compile_cache", action="store_true", help=help_text)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the arguments and, unless the user opts out, turns on the compilation cache.

        A flag may be written with dashes, such as --max-tokens for --max_tokens.
        """
        arguments = self._normalize(sys.argv[1:] if args is None else args)
        self._arguments = arguments  # `error` looks for a misspelled flag.
        flags, unparsed = super().parse_known_args(arguments, namespace)
        # `cli.start` parses the flags before jax is imported, and the command parses them again.
        if not getattr(flags, "no_compile_cache", True) and "jax" in sys.modules:
            keep_programs()
        return flags, unparsed

    def _normalize(self, arguments: Sequence[str]) -> list[str]:
        """Replaces dashes in the names of known flags, and in abbreviations, by underscores."""
        normalized: list[str] = []
        for index, argument in enumerate(arguments):
            if argument == "--":  # All further arguments are positional.
                return [*normalized, *arguments[index:]]
            name, separator, value = argument.partition("=")
            flag = "--" + name.removeprefix("--").replace("-", "_")
            is_known = name.startswith("--") and self._begins_flag(flag)
            normalized.append(flag + separator + value if is_known else argument)
        return normalized

    def _begins_flag(self, name: str) -> bool:
        """Returns whether a flag has this name, or begins with it: argparse reads --max_tok."""
        return any(flag.startswith(name) for flag in self._option_string_actions)

    def _ask_about_flag(self) -> tuple[str, str]:
        """Returns the first argument that is similar to a flag, and the question about it.

        Both are empty if no flag is misspelled.
        """
        known_flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for argument in self._arguments:
            name = argument.partition("=")[0]
            # `--config.FIELD` is a flag as well, although argparse does not know it.
            if name.startswith("--") and not self._begins_flag(name.partition(".")[0]):
                question = nearest(name[2:], [flag[2:] for flag in known_flags])
                if question:
                    return name, question.replace("Did you mean ", "Did you mean --")
        return "", ""

    def error(self, message: str) -> NoReturn:
        """Prints an error message in one line, without the usage, and exits with status 2.

        argparse reports a missing flag first. If a flag is misspelled, the message names that flag.
        """
        # argparse calls this method inside an `except` block. If the output pipe was closed
        # (`| head`), the BrokenPipeError is raised again for `one_line_errors`.
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
        flag, question = self._ask_about_flag()
        if flag and message.startswith("the following arguments are required"):
            message = f"unknown flag {flag}.{question}"
        elif flag and message.startswith("unrecognized arguments"):
            message += f".{question}"
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def integer_from(minimum: int) -> Callable[[str], int]:
    """Returns a parser of integers of at least `minimum`, for the argument `type` of argparse."""

    def parse_integer(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= (number := int(text)) < 1 << 31:  # Programs count in int32.
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum}, below 2**31")

    return parse_integer


def file_to_write(flag: str, name: str) -> Path:
    """Returns the path of a result file, after checking that the file can be written.

    Commands call this function before they compute the result, so that no result is lost.

    Args:
        flag: the flag that names the file, such as "--json", for the error message.
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
        flag: the flag that names the result, such as "--out", for the error message.
        name: the value of the flag.
        is_folder: whether the result is a folder.

    Raises:
        UserError: the result cannot be created or written to.
    """
    path = local_path(name)
    candidates = path, *path.absolute().parents
    nearest_existing = next(candidate for candidate in candidates if candidate.exists())
    has_access = os.access(nearest_existing, os.W_OK | os.X_OK)
    is_valid = bool(name) and nearest_existing.is_dir() and has_access
    if not is_folder:
        # An existing file may be replaced; a new file needs a folder that can be written to.
        is_valid = bool(path.name) and (not path.is_dir() if path.exists() else is_valid)
    kind = "folder" if is_folder else "file"
    expect(flag, name, is_valid, f"a {kind} that can be created or written to")


def check_address(host: str, port: int) -> None:
    """Checks that a server can listen on a host and port, before the command loads a model.

    Args:
        host: value of --host, a name or an IP address.
        port: value of --port.

    Raises:
        UserError: the port is out of range or in use, or the host is unknown.
    """
    expect("--port", port, 0 < port < 1 << 16, "1 to 65535")
    try:
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Opens the port for a moment: this raises an OSError if a server could not.
        socket.create_server((host, port), family=address_family).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: the host's name is invalid.
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: {reason}") from error


class Messages(logging.Handler):
    """Prints the library's log: warnings on stderr, progress on stdout or stderr."""

    def __init__(self, progress: str):
        """Creates the handler.

        Args:
            progress: name of the stream for messages below WARNING, "stdout" or "stderr".
        """
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message. Unlike other logging handlers, raises errors of the stream."""
        if record.levelno >= logging.WARNING:
            print(f"warning: {one_line(record.getMessage())}", file=sys.stderr, flush=True)
            if record.exc_info:
                traceback.print_exception(record.exc_info[1])
        else:  # The stream is looked up now because a test or a notebook may replace it.
            print(record.getMessage(), file=getattr(sys, self._progress), flush=True)


def show_messages(progress: str) -> None:
    """Prints the library's log, and silences the logs of other packages.

    Args:
        progress: name of the stream for progress messages, "stdout" or "stderr".
    """
    # Orbax logs every file that it writes. It also logs the traceback of each error that it raises.
    with contextlib.suppress(ModuleNotFoundError):  # Not all commands need Orbax.
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.FATAL)
    # `transformers` recommends torch, which its tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    escape_output()
    logger = logging.getLogger("stepprune_jax")
    logger.handlers[:] = [Messages(progress)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # The handler of absl would print each message again.


def escape_output() -> None:
    """Makes stdout escape characters that its encoding lacks, such as accents in a file name."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # The stdout of a notebook has another type.
        sys.stdout.reconfigure(errors="backslashreplace")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the flags `--config` and `--workdir`, which `read_config` reads, to a parser."""
    parser.add_argument(
        "--config",
        required=True,
        help="a name, such as shapes or llava7b:literal, or a file; --config.FIELD=VALUE changes "
        "any of its fields, such as --config.optimizer.lr=1e-3",
    )
    parser.add_argument("--workdir", help="folder of the run; default: runs/CONFIG")


def split_config_changes(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line with the flags of `add_config`, without importing the configuration.

    Exits with an error message if a flag is unknown, or if there is no such configuration.

    Args:
        parser: the command's parser.
        arguments: command-line arguments; None reads the arguments of the process.

    Returns:
        The flags, and the changes of all `--config.FIELD` flags, each "FIELD=VALUE". The values are
        not checked.
    """
    flags, remaining_arguments = parser.parse_known_args(arguments)
    changes, unexpected_arguments = [], []
    while remaining_arguments:
        argument = remaining_arguments.pop(0)
        name, equals_sign, value = argument.partition("=")
        if not name.startswith("--config."):
            unexpected_arguments.append(argument)
            continue
        if not equals_sign:
            # The value is the next argument. `--config.tensorboard` without a value means True.
            has_value = remaining_arguments and not remaining_arguments[0].startswith("--")
            value = remaining_arguments.pop(0) if has_value else "True"
        changes.append(f"{name.removeprefix('--config.')}={value}")
    if unexpected_arguments:
        hint = _suggest_flag(parser, flags.config, unexpected_arguments[0])
        parser.error(f"unexpected arguments: {' '.join(unexpected_arguments)}{hint}")
    if flags.workdir == "":
        parser.error("--workdir is empty, expected a folder")
    try:
        configurations.find(flags.config)
    except OSError as error:
        parser.error(str(error))
    return flags, changes


def read_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, settings_type: type[T]
) -> tuple[argparse.Namespace, T]:
    """Parses the command line of a command whose parser has the flags of `add_config`.

    Exits with an error message if the command line or the configuration is invalid.

    Args:
        parser: the command's parser.
        arguments: command-line arguments; None reads the arguments of the process.
        settings_type: type of the configuration that the command expects.

    Returns:
        The flags, with `workdir` as a path, and the configuration with the changes of all
        `--config.FIELD` flags.
    """
    flags, changes = split_config_changes(parser, arguments)
    try:
        settings = configurations.load(flags.config, changes)
        actual_kind, expected_kind = type(settings).__name__, settings_type.__name__
        if not isinstance(settings, settings_type):
            raise UserError(f"--config {flags.config} is {actual_kind}, expected {expected_kind}")
    except (UserError, OSError) as error:
        parser.error(str(error))
    # "llava7b:literal" and "configs/llava7b.py:literal" have the folder "runs/llava7b-literal".
    file, _, argument = flags.config.partition(":")
    run_name = "-".join(filter(None, (Path(file).stem, argument)))
    flags.workdir = local_path(flags.workdir or Path("runs", run_name))
    return flags, settings


def _suggest_flag(parser: argparse.ArgumentParser, config: str, argument: str) -> str:
    """Suggests a flag for an unexpected argument, such as --config.steps for --steps=90.

    Args:
        parser: the command's parser.
        config: value of --config.
        argument: the unexpected argument.

    Returns:
        A question, as in ". Did you mean --config.steps?"; "" if no flag or field is similar.
    """
    if not argument.startswith(("--", "config.")):
        return ""
    name = argument.partition("=")[0].removeprefix("--").removeprefix("config.").replace("-", "_")
    question = ""
    with contextlib.suppress(UserError, OSError):  # reported when the configuration is loaded
        question = configurations.load(config).suggest(name).replace(" config.", " --config.")
    question = question or nearest(f"--{name}", parser._option_string_actions)
    return f".{question}" if question else ""


def program(name: str) -> str:
    """Returns the name of the running console script, such as stepprune-train, or else `name`."""
    script = Path(sys.argv[0]).stem  # On Windows, scripts end in .exe.
    return script if script.startswith("stepprune-") else name


def command() -> str:
    """Returns the command line of this process, for display."""
    script = program("")
    return shlex.join([script, *sys.argv[1:]] if script else ["python", *sys.argv])


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Reports errors that a user can fix in one line, and exits with status 2.

    These errors are UserErrors, missing packages, missing files, full disks, missing devices and
    exhausted memory. All other exceptions propagate. If the output pipe is closed (`| head`), the
    program exits quietly with the status of SIGPIPE. After Ctrl-C, the program prints one line and
    exits with the status of SIGINT.

    Args:
        name: name of the command, the prefix of each message.
    """
    try:
        yield
        if sys.stdout is not None:  # `>&-` closes stdout.
            # A full disk raises an error here, where it is still reported in one line.
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
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
            _discard_output()  # The stream that cannot be written to may be stdout.
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
    """Runs the main function of a command, reports its errors, and exits with its status.

    Args:
        name: name of the command, used when it is not run as a console script.
        main: runs the command and returns the exit status; None means 0.
        progress: name of the stream for progress messages, "stdout" or "stderr".
    """
    name = program(name)
    show_messages(progress)
    keep_freed_memory()
    with _exit_without_waiting(), one_line_errors(name):
        status = main()
    sys.exit(status)


def signal_status(number: int) -> int:
    """Returns the exit status that shells give to a program ended by a signal.

    Args:
        number: number of the signal; 0 if no signal ended the program.
    """
    return 128 + number if number else 0


@contextlib.contextmanager
def _exit_without_waiting() -> Iterator[None]:
    """Exits a failed process of a multi-process run without waiting for running processes.

    In a normal exit, jax waits up to five minutes for all processes, which in turn wait for the
    failed process. In a run of one process, exceptions propagate.
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
                stream.flush()  # `os._exit` does not flush streams.
        time.sleep(_EXIT_DELAY)
        os._exit(status if isinstance(status, int) else 1)


def _has_missing_platform() -> bool:
    """Returns whether JAX_PLATFORMS names a platform without a plugin."""
    if not os.environ.get("JAX_PLATFORMS") or "jax" not in sys.modules:
        return False
    try:
        # Called only for its exception. For a missing platform, jax raises an AssertionError
        # without a message.
        sys.modules["jax"].devices()
    except AssertionError:
        return True
    return False


def _discard_output() -> None:
    """Discards the buffered text of stdout, which Python would try to write again at exit."""
    if sys.stdout is None:  # `>&-` closes stdout.
        return
    with open(os.devnull, "w") as null_device, contextlib.suppress(OSError, ValueError):
        os.dup2(null_device.fileno(), sys.stdout.fileno())


def _exit(name: str, message: str) -> NoReturn:
    """Prints a message in one line and exits with status 2."""
    print(f"{name}: error: {one_line(message)}", file=sys.stderr, flush=True)
    sys.exit(2)
