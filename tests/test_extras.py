"""Requirements in pyproject.toml agree with imports and with messages about missing packages."""

import ast
import importlib
import inspect
import json
import re
import sys
import tomllib
import types
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import PAGES, shown

from stepprune_jax import configurations, extras
from stepprune_jax.cli import convert, evaluate, generate, start
from stepprune_jax.training import run

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stepprune_jax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Distributions by the names of their modules, if the names differ.
DISTRIBUTIONS = {"PIL": "pillow", "absl": "absl-py", "orbax": "orbax-checkpoint"}
# Requirements by the names of packages that they install as dependencies.
INSTALLED_BY = {"ml_dtypes": "jax", "libtpu": "jax", "tokenizers": "transformers"}
# Packages that only exist inside the program that imports these modules of ours.
VLLM_PLUGIN = "integrations/vllm_plugin"
ADAPTERS = {
    "lmms_eval": {"integrations/lmms_eval.py"},
    "vllm": {f"{VLLM_PLUGIN}/{name}.py" for name in ("__init__", "models", "processing")},
    "torch": {
        f"{VLLM_PLUGIN}/{name}.py"
        for name in ("interchange", "models", "positions", "processing", "selection", "taps")
    },
}


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


def installed_by(extra):
    """Returns the distributions that an extra lists, with those of the extras that it includes."""
    names = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        for included in requirement.extras if requirement.name == "stepprune-jax" else ():
            names |= installed_by(included)
        names.add(requirement.name)
    return names


@pytest.mark.parametrize(
    ("command", "packages"),
    [
        ("train", {"pillow", "tqdm", "optax", "orbax-checkpoint"}),
        ("evaluate", {"pillow", "tqdm", "matplotlib", "openpyxl"}),
        ("serve", {"pillow", "tqdm", "uvicorn"}),
        ("demo", {"pillow", "tqdm", "matplotlib", "gradio"}),
    ],
)
def test_a_command_names_the_extra_with_all_its_packages(command, packages):
    """With jax alone, the first package that is missing belongs to the extra "vlm"."""
    error = ModuleNotFoundError("no PIL", name="PIL")
    extra = re.search(r'\[(.*)\]"$', extras.explain(error, command)).group(1)
    assert packages <= installed_by(extra)
    assert extras.explain(error) == extras.explain(error, "generate")
    assert extras.explain(error).endswith('[vlm]"')


def test_a_start_names_the_extra_of_the_command(monkeypatch, capsys):
    def import_without_pillow(name):
        if name == "stepprune_jax.cli.train":
            raise ModuleNotFoundError("no PIL", name="PIL")
        return importlib.import_module(name)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(start, "import_module", import_without_pillow)
    monkeypatch.setattr(start.signal, "getsignal", lambda number: None)  # keeps pytest's handlers
    monkeypatch.setattr(sys, "argv", ["stepprune-train", "--config=shapes"])
    with pytest.raises(SystemExit):
        start.start("train", is_interruptible=False)
    error = 'stepprune-train: error: PIL is not installed: pip install ".[train]"\n'
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_runs_a_command(script):
    module, _, function = PROJECT["scripts"][script].partition(":")
    run = getattr(importlib.import_module(module), function)
    name = inspect.getclosurevars(inspect.unwrap(run)).nonlocals["name"]
    source = Path(find_spec(f"stepprune_jax.cli.{name}").origin).read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert "command" in {node.name for node in functions}


@pytest.mark.parametrize(
    ("clone", "source"), [(ROOT, "."), (ROOT / "docs", ROOT / "docs"), (None, "stepprune-jax")]
)
def test_the_command_for_an_extra_suits_the_current_folder(monkeypatch, clone, source):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(extras, "find_clone", lambda: clone)
    assert extras.install_command("eval") == f'pip install "{source}[eval]"'


@pytest.mark.parametrize(
    ("address", "is_a_clone"),
    [
        (ROOT.as_uri(), True),
        (ROOT.joinpath("no such folder").as_uri(), False),
        ("https://example.org/stepprune_jax.whl", False),
        (None, False),
    ],
)
def test_an_installed_package_remembers_the_clone(monkeypatch, tmp_path, address, is_a_clone):
    """pip stores the address of an installation in direct_url.json, except for an index."""
    text = None if address is None else json.dumps({"url": address, "dir_info": {}})
    installation = types.SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installation)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "stepprune_jax" / "extras.py"))
    assert extras.find_clone.__wrapped__() == (ROOT if is_a_clone else None)


def overlay():
    generate.main(["--model=nowhere", "--image=x.png", "--prompt=What?", "--overlay=o.png"])


def train_with_overlays():
    changes = {"model.folder": "nowhere", "validation.every": 1}
    run.train(configurations.load("shapes").replace(changes), "nowhere")


def convert_to_a_workbook():
    convert.main(["mmbench", "--answers=nowhere", "--out=x.xlsx"])


def evaluate_to_a_workbook():
    changes = {"model.folder": "nowhere", "eval.benchmarks": "mmbench"}
    settings = configurations.load("shapes").replace(changes)
    evaluate.evaluate(settings, "nowhere", stages=["generate", "convert"])


@pytest.mark.parametrize(
    ("package", "work"),
    [
        ("matplotlib", overlay),
        ("matplotlib", train_with_overlays),
        ("openpyxl", convert_to_a_workbook),
        ("openpyxl", evaluate_to_a_workbook),
    ],
)
def test_a_missing_package_is_reported_before_any_file_is_read(
    package, work, monkeypatch, tmp_path
):
    """The folders `nowhere` do not exist, so work that began would report a missing folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        extras.MissingPackageError, match=f"{package} is not installed: pip install"
    ):
        work()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_pages_install_extras_that_exist(page):
    for names in re.findall(r'pip install (?:-e )?"?\.\[([\w,-]+)\]', page.read_text()):
        assert {*names.split(",")} <= {*PROJECT["optional-dependencies"]}


def test_one_line_of_the_readme_installs_what_the_readme_shows():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"pip install ([^\s`]+)", text) == ['".[eval]"', "."]
    requirements = PROJECT["optional-dependencies"]
    listed = {extra: distributions(requirements[extra]) for extra in ("vlm", "train", "eval")}
    installed = set().union(*listed.values())
    # The README shows answers with a picture of the kept tokens, and training and evaluation.
    assert {"transformers", "optax", "matplotlib"} <= installed
    assert set(re.findall(r"stepprune-[a-z]+", text)) == {"stepprune-generate"}


def requirements_of_the_clone():
    """Returns all requirements of pyproject.toml and of the requirement files, without ours."""
    lines = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines += [line.partition("#")[0] for line in (ROOT / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line.strip() and line[0] not in "-#"]
    return [each for each in requirements if each.name not in ("stepprune-jax", "lmms-eval")]


def test_every_requirement_has_a_tested_release_above_its_lower_bound():
    tested = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and line[0] != "#":
            constraint = Requirement(line.partition("#")[0])
            tested.setdefault(constraint.name.replace("_", "-"), []).append(constraint)
    for requirement in requirements_of_the_clone():
        if requirement.name == "filelock":  # an upper bound for lmms-eval, which brings it
            continue
        for constraint in tested[requirement.name.replace("_", "-")]:
            versions = [each.version for each in constraint.specifier if each.operator != "!="]
            assert all(requirement.specifier.contains(version) for version in versions), constraint


def test_upper_bounds_have_a_reason():
    bounded = [each.name for each in requirements_of_the_clone() if "<" in str(each.specifier)]
    assert bounded == ["filelock"]  # pyproject.toml says which release fails, and how
