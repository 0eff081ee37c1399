"""pyproject.toml, the imports of the code and the messages about optional packages agree."""

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
# Packages whose distributions have other names than their modules.
DISTRIBUTIONS = {"PIL": "pillow", "absl": "absl-py", "orbax": "orbax-checkpoint"}
# Packages that a requirement brings along.
BROUGHT_BY = {"ml_dtypes": "jax", "libtpu": "jax", "tokenizers": "transformers"}
# Modules that only the program imports that they are made for.
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
        name = BROUGHT_BY.get(name, name)
        assert name in core or name in extras._EXTRA or ADAPTERS.get(name) == files, (name, files)


@pytest.mark.parametrize("package", extras._EXTRA)
def test_messages_name_the_extra_that_lists_the_package(package):
    requirements = PROJECT["optional-dependencies"][extras._EXTRA[package]]
    assert DISTRIBUTIONS.get(package, package) in distributions(requirements)


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_leads_to_a_command(script):
    place, _, function = PROJECT["scripts"][script].partition(":")
    run = getattr(importlib.import_module(place), function)
    name = inspect.getclosurevars(inspect.unwrap(run)).nonlocals["name"]
    source = Path(find_spec(f"stepprune_jax.cli.{name}").origin).read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert "command" in {node.name for node in functions}
