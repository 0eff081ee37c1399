"""Optional packages, and the console scripts that explain which package is missing."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

# Smallest extra of stepprune-jax that installs each package, by the name that is imported.
_EXTRA = {
    "PIL": "vlm",
    "absl": "vlm",
    "flax": "vlm",
    "huggingface_hub": "vlm",
    "tqdm": "vlm",
    "transformers": "vlm",
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


class MissingPackageError(ImportError):
    """Raised if an optional package is missing. The message says what to install."""


def explain(error: ModuleNotFoundError) -> str:
    """Returns the command that installs the missing package of an import error.

    Raises:
        ModuleNotFoundError: `error` itself, if the missing module is not an optional package.
    """
    package = str(error.name).partition(".")[0]
    if package not in _EXTRA:
        raise error
    return f"{package} is not installed: pip install 'stepprune-jax[{_EXTRA[package]}]'"


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


def _command(name: str) -> Callable[[], None]:
    """Returns a console script that runs the function `command` of a module of `cli`."""

    def run() -> None:
        try:
            command = import_module(f"stepprune_jax.cli.{name}").command
        except ModuleNotFoundError as error:
            sys.exit(f"error: {explain(error)}")
        command()

    return run


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
