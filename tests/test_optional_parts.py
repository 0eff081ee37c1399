"""Calls of optional packages agree with recorded signatures, because `make test` lacks them."""

import ast

import pytest
import stand_ins
from page_code import problems
from pages import HOSTS, ROOT

PAGE = ROOT / "stepprune_jax" / "demo" / "app.py"
PARTS = [(PAGE, "gradio")]
PARTS += [
    (ROOT / "examples" / "hosts" / f"{name}.py", package)
    for name, package in (
        ("gemma3", "gemma"),
        ("maxtext_qwen3_vl", "maxtext"),
        ("pi0", "openpi"),
        ("sglang_jax", "sgl_jax"),
    )
]


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
