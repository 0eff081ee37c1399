"""Every global name that the package reads is there: linters cannot tell, as shapes are strings."""

import builtins
import dis
import importlib
import pkgutil
import types

import pytest

import stepprune_jax

MODULES = [
    module.name for module in pkgutil.walk_packages(stepprune_jax.__path__, "stepprune_jax.")
]
# They import what is not installed here.
ELSEWHERE = {"stepprune_jax.integrations.lmms_eval", "stepprune_jax.demo.app"}


def global_names(code):
    """Names that a code object, or one inside of it, looks up as globals."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


@pytest.mark.parametrize("name", sorted({*MODULES} - ELSEWHERE))
def test_names_are_defined(name):
    module = importlib.import_module(name)
    code = module.__loader__.get_code(name)
    functions = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    read = {name for function in functions for name in global_names(function)}
    local = {name for function in functions for name in class_names(function)}
    assert read <= {*vars(module), *vars(builtins), *local}


def class_names(code):
    """Names that the body of a class, which may read them, defines."""
    yield from code.co_names if "__qualname__" in code.co_names else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from class_names(constant)
