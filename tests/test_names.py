"""All global names that the package reads are defined.

Linters cannot check this, because the strings of jaxtyping's shapes disable their check.
"""

import builtins
import dis
import importlib.util
import pkgutil
import types

import pytest
from lmms_eval_stub import integration

import stepprune_jax

MODULES = [
    module.name for module in pkgutil.walk_packages(stepprune_jax.__path__, "stepprune_jax.")
]
VLLM_PLUGIN = "stepprune_jax.integrations.vllm_plugin"
# Modules that import packages which the test environment does not have.
EXCLUDED = {
    "stepprune_jax.integrations.lmms_eval",
    "stepprune_jax.demo.app",
    f"{VLLM_PLUGIN}.models",
    f"{VLLM_PLUGIN}.processing",
}


def walk_code(code):
    """Yields a code object and all nested code objects."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from walk_code(constant)


@pytest.mark.parametrize("name", sorted({*MODULES} - EXCLUDED))
def test_names_are_defined(name):
    check_names(importlib.import_module(name))


def test_names_of_the_model_for_lmms_eval_are_defined():
    with integration() as module:
        check_names(module)


def check_names(module):
    """Checks that the functions of a module read only global names that the module has."""
    _, *functions = walk_code(module.__loader__.get_code(module.__name__))
    global_names, class_names = set(), set()
    for code in functions:
        opcodes = ("LOAD_GLOBAL", "LOAD_NAME")
        global_names |= {i.argval for i in dis.get_instructions(code) if i.opname in opcodes}
        if "__qualname__" in code.co_names:  # a class body may read names that it defines
            class_names |= {*code.co_names}
    assert global_names <= {*vars(module), *vars(builtins), *class_names}


@pytest.mark.parametrize("name", [name for name in MODULES if ".cli" not in name])
def test_only_commands_print(name):
    """Library code logs or returns values. It neither calls `print` nor passes it on."""
    spec = importlib.util.find_spec(name)
    codes = walk_code(spec.loader.get_code(name))
    assert "print" not in {name for code in codes for name in code.co_names}
