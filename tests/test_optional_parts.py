"""Optional parts call their packages, which `make test` does not have, by recorded signatures."""

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
    """Reads the names that a module defines at its top level, without importing it."""
    tree = ast.parse(importlib.util.find_spec(path).loader.get_source(path))
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return named | {target.id for node in assigned for target in node.targets}


@pytest.mark.parametrize("path", ENTRY_POINTS)
def test_an_entry_point_leads_to_a_function(path):
    module, _, function = path.partition(":")
    assert function in definitions(module)


def test_every_host_has_recorded_signatures():
    assert {file for file, _ in PARTS} == {PAGE, *HOSTS}


@pytest.mark.parametrize(("file", "package"), PARTS, ids=lambda value: str(value).split("/")[-1])
def test_calls_of_another_package_bind(file, package, monkeypatch):
    stand_ins.install(monkeypatch, package)
    assert problems([file.read_text(encoding="utf-8")]) == []


@pytest.mark.parametrize(("file", "package"), PARTS, ids=lambda value: str(value).split("/")[-1])
def test_overridden_methods_take_what_the_package_passes(file, package):
    recorded = stand_ins.RECORD[package]["signatures"]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            for method in methods:
                parameters = recorded.get(f"{package}.{ast.unparse(base)}.{method.name}")
                if parameters:
                    ours = {n.arg for n in ast.walk(method.args) if isinstance(n, ast.arg)}
                    theirs = stand_ins.signature(parameters).parameters
                    assert method.args.kwarg or theirs.keys() <= ours, method.name


def test_a_wrong_call_is_found(monkeypatch):
    stand_ins.install(monkeypatch, "gradio")
    (unknown, missing) = problems(
        ["import gradio as gr", "gr.Button('Ask', color='red')", "gr.Knob()"]
    )
    assert "unexpected keyword argument 'color'" in unknown and "gradio has no Knob" in missing
