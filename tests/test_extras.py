"""Requirements in pyproject.toml agree with imports and with messages about missing packages."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from stepprune_jax import extras

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stepprune_jax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Distributions by the names of their modules, if the names differ.
DISTRIBUTIONS = {"PIL": "pillow", "absl": "absl-py", "orbax": "orbax-checkpoint"}
# Requirements by the names of packages that they install as dependencies.
INSTALLED_BY = {"ml_dtypes": "jax", "libtpu": "jax", "tokenizers": "transformers"}
# Packages that only exist inside the program that imports these modules of ours.
ADAPTERS = {"lmms_eval": {"integrations/lmms_eval.py"}}


def distributions(requirements):
    """Returns the lower-case names of the distributions in requirements."""
    return {re.match(r"[\w.-]+", requirement).group().lower() for requirement in requirements}


def imported_packages():
    """Returns the packages of other projects that modules import, each with the modules."""
    packages = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names}:
                packages.setdefault(name, set()).add(str(file.relative_to(PACKAGE)))
    ours = {"stepprune_jax", *sys.stdlib_module_names}
    return {name: files for name, files in packages.items() if name not in ours}


def test_every_import_is_a_requirement():
    core = distributions(PROJECT["dependencies"])
    for name, files in imported_packages().items():
        name = INSTALLED_BY.get(name, name)
        assert name in core or name in extras._EXTRA or ADAPTERS.get(name) == files, (name, files)


@pytest.mark.parametrize("package", extras._EXTRA)
def test_messages_name_the_extra_that_lists_the_package(package):
    requirements = PROJECT["optional-dependencies"][extras._EXTRA[package]]
    assert DISTRIBUTIONS.get(package, package) in distributions(requirements)


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_runs_a_command(script):
    module, _, function = PROJECT["scripts"][script].partition(":")
    run = getattr(importlib.import_module(module), function)
    name = inspect.getclosurevars(inspect.unwrap(run)).nonlocals["name"]
    source = Path(find_spec(f"stepprune_jax.cli.{name}").origin).read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert "command" in {node.name for node in functions}
