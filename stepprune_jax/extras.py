"""Optional packages, and the console scripts that explain which package is missing."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# Smallest extra of this package that installs each package, by the name that is imported.
_EXTRA = {
    "PIL": "vlm",
    "absl": "vlm",
    "flax": "vlm",
    "huggingface_hub": "vlm",
    "tqdm": "vlm",
    "transformers": "vlm",
    "av": "video",
    "optax": "train",
    "orbax": "train",
    "matplotlib": "eval",
    "openpyxl": "eval",
    "gradio": "demo",
    "httpx2": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "flatbuffers": "export",
}

# Extras of commands that need more than one extra's packages, by module of `cli`. A command without
# an entry needs the extra of the package that is missing.
_COMMAND_EXTRA = {"train": "train", "evaluate": "eval", "serve": "serve", "demo": "demo"}

# Exit status of a program that Ctrl-C has ended: 128 and the number of SIGINT.
_INTERRUPTED = 130


class MissingPackageError(ImportError):
    """Raised if an optional package is missing. The message says what to install."""


@functools.cache
def find_clone() -> Path | None:
    """Finds the clone of the repository that this package runs from or was installed from.

    Returns:
        The folder of the clone; None if there is none, as after an installation from an index.
    """
    folder = Path(__file__).resolve().parents[1]
    if not (folder / "pyproject.toml").is_file():
        # Only messages need these modules. They take most of the time that the imports at the top
        # of this file would take, during which Ctrl-C ends a command in a traceback.
        import json
        from importlib import metadata
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        try:
            # pip writes this file when it installs from a folder or an address (PEP 610).
            text = metadata.distribution("stepprune-jax").read_text("direct_url.json")
        except metadata.PackageNotFoundError:
            return None
        address = urlsplit(json.loads(text or "{}").get("url", ""))
        if address.scheme != "file":
            return None
        folder = Path(url2pathname(address.path))
    return folder if (folder / "pyproject.toml").is_file() else None


def install_command(extra: str) -> str:
    """Returns the pip command that installs an extra of this package.

    In a clone the command is `pip install ".[extra]"`. Elsewhere it has the clone's folder, or the
    released name if the package does not come from a clone.

    Args:
        extra: name of the extra, a key of `optional-dependencies` in pyproject.toml.
    """
    source, clone = "stepprune-jax", find_clone()
    if clone is not None:
        source = "." if clone == Path.cwd() else str(clone)
    return f'pip install "{source}[{extra}]"'


def explain(error: ModuleNotFoundError, command: str | None = None) -> str:
    """Returns the command that installs the missing package of an import error.

    Args:
        error: the import error.
        command: module of `cli` that was imported. The message then names the extra with all
            packages of this command, so that the next start finds no other package missing.

    Raises:
        ModuleNotFoundError: `error` itself, if the missing module is not an optional package.
    """
    package = str(error.name).partition(".")[0]
    if package not in _EXTRA:
        raise error
    extra = _COMMAND_EXTRA.get(command or "", _EXTRA[package])
    return f"{package} is not installed: {install_command(extra)}"


def need(package: str, reason: str) -> None:
    """Checks that an optional package is installed, before long work that needs it at the end.

    Args:
        package: name of the package in import statements.
        reason: start of the message, such as the flag that needs the package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if find_spec(package) is None:
        raise MissingPackageError(f"{reason}: {explain(ModuleNotFoundError(name=package))}")


def end_interrupted(name: str) -> NoReturn:
    """Prints that a command was interrupted, and ends the process without cleaning up."""
    sys.stderr.write(f"{name}: interrupted\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


def _command(name: str) -> Callable[[], None]:
    """Returns a console script that runs the function `command` of a module of `cli`."""

    def run() -> None:
        # A shell's background job ignores Ctrl-C.
        is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_interruptible:  # Nothing is computed or written before the command runs.
            script = Path(sys.argv[0]).name
            signal.signal(signal.SIGINT, lambda *_: end_interrupted(script))
        start = import_module("stepprune_jax.cli.start").start
        start(name, is_interruptible=is_interruptible)

    return run


# The console scripts that pyproject.toml names, one for each command.
calibrate = _command("calibrate")
check = _command("check")
convert = _command("convert")
demo = _command("demo")
efficiency = _command("efficiency")
evaluate = _command("evaluate")
export = _command("export")
generate = _command("generate")
score = _command("score")
serve = _command("serve")
table = _command("table")
train = _command("train")
