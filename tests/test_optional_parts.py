"""Calls of optional packages agree with recorded signatures, because `make test` lacks them."""

import ast
import importlib.util
import tomllib

import pytest
import stand_ins
from page_code import problems
from pages import HOSTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = [*PROJECT["scripts"].values()]
ENTRY_POINTS += [path for group in PROJECT["entry-points"].values() for path in group.values()]
PAGE = ROOT / "stepprune_jax" / "demo" / "app.py"
PARTS = [(PAGE, "gradio")]
PARTS += [
    (ROOT / "examples" / "hosts" / f"{name}.py", package)
    for name, package in (("gemma3", "gemma"), ("maxtext_qwen3_vl", "maxtext"), ("pi0", "openpi"))
]


def definitions(path):
    """Returns the names that a module defines at its top level, without importing it."""
    tree = ast.parse(importlib.util.find_spec(path).loader.get_source(path))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assignments = (node for node in tree.body if isinstance(node, ast.Assign))
    return names | {target.id for node in assignments for target in node.targets}


@pytest.mark.parametrize("path", ENTRY_POINTS)
def test_an_entry_point_names_an_existing_function(path):
    module, _, function = path.partition(":")
    assert function in definitions(module)


def test_every_host_has_recorded_signatures():
    assert {file for file, _ in PARTS} == {PAGE, *HOSTS}


@pytest.mark.parametrize(("file", "package"), PARTS, ids=lambda value: str(value).split("/")[-1])
def test_calls_of_an_optional_package_are_valid(file, package, monkeypatch):
    stand_ins.install(monkeypatch, package)
    assert problems([file.read_text(encoding="utf-8")]) == []


@pytest.mark.parametrize(("file", "package"), PARTS, ids=lambda value: str(value).split("/")[-1])
def test_overridden_methods_accept_the_arguments_of_the_package(file, package):
    recorded = stand_ins.RECORD[package]["signatures"]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            for method in methods:
                parameters = recorded.get(f"{package}.{ast.unparse(base)}.{method.name}")
                if parameters:
                    accepted = {n.arg for n in ast.walk(method.args) if isinstance(n, ast.arg)}
                    passed = stand_ins.signature(parameters).parameters
                    assert method.args.kwarg or passed.keys() <= accepted, method.name


def test_wrong_calls_are_reported(monkeypatch):
    stand_ins.install(monkeypatch, "gradio")
    (unknown, missing) = problems(
        ["import gradio as gr", "gr.Button('Ask', color='red')", "gr.Knob()"]
    )
    assert "unexpected keyword argument 'color'" in unknown and "gradio has no Knob" in missing
