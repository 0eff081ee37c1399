"""Every global name that the package reads is there: linters cannot tell, as shapes are strings."""

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
# They import what is not installed here.
ELSEWHERE = {"stepprune_jax.integrations.lmms_eval", "stepprune_jax.demo.app"}


def inside(code):
    """A code object, and all those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from inside(constant)


@pytest.mark.parametrize("name", sorted({*MODULES} - ELSEWHERE))
def test_names_are_defined(name):
    check_names(importlib.import_module(name))


def test_names_of_the_model_for_lmms_eval_are_defined():
    with integration() as module:
        check_names(module)


def check_names(module):
    """Asserts that the functions of a module read global names that the module has."""
    _, *functions = inside(module.__loader__.get_code(module.__name__))
    read, local = set(), set()
    for code in functions:
        globals_of = ("LOAD_GLOBAL", "LOAD_NAME")
        read |= {i.argval for i in dis.get_instructions(code) if i.opname in globals_of}
        if "__qualname__" in code.co_names:  # the body of a class, which may read what it defines
            local |= {*code.co_names}
    assert read <= {*vars(module), *vars(builtins), *local}


@pytest.mark.parametrize("name", [name for name in MODULES if ".cli" not in name])
def test_only_commands_print(name):
    """The library logs or returns: neither calls `print` nor passes it on."""
    spec = importlib.util.find_spec(name)
    codes = inside(spec.loader.get_code(name))
    assert "print" not in {read for code in codes for read in code.co_names}
