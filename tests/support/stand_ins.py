"""Fake modules of optional packages, made from recorded signatures of the real packages.

`signatures.json` has the version of each package, and the parameters of the functions and classes
that this project calls or overrides. A default is written as 0. Null marks a name that is no
function.
"""

import importlib
import inspect
import json
import pathlib
import sys
import types
from unittest import mock

RECORD = json.loads(pathlib.Path(__file__).with_name("signatures.json").read_text())


def signature(parameters):
    """Parses the text of parameters."""
    return inspect.signature(eval(f"lambda {parameters}: None"))


def _function(parameters):
    """Returns a function with these parameters, which returns a mock."""
    bind = signature(parameters).bind

    def stand_in(*positional, **named):
        bind(*positional, **named)
        return mock.MagicMock()

    stand_in.__signature__ = signature(parameters)
    return stand_in


def _class(name, parameters):
    """Returns a class with these parameters, whose objects are mocks and context managers."""
    bind = signature(parameters).bind

    class StandIn(mock.MagicMock):
        def __init__(self, *positional, **named):
            bind(*positional, **named)
            super().__init__()
            self.__enter__.return_value = self

        def _get_child_mock(self, **named):
            return mock.MagicMock(**named)

    StandIn.__name__, StandIn.__signature__ = name, signature(parameters)
    return StandIn


def stand_in_modules(package):
    """Builds the modules of a package, by name, with the recorded functions and classes."""
    modules = {}
    for name, parameters in RECORD[package]["signatures"].items():
        parts = name.split(".")
        # Names of classes start with a capital letter. All parts before are modules.
        depth = next((n for n, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
        for n in range(1, depth + 1):
            module = ".".join(parts[:n])
            modules.setdefault(module, types.ModuleType(module))
            if n > 1:
                setattr(modules[".".join(parts[: n - 1])], parts[n - 1], modules[module])
        owner = modules[".".join(parts[:depth])]
        for part in parts[depth:-1]:
            owner = getattr(owner, part)
        value = mock.MagicMock()
        if parameters is not None:
            is_class = parts[-1][0].isupper()
            value = _class(parts[-1], parameters) if is_class else _function(parameters)
        setattr(owner, parts[-1], value)
    return modules


def install(monkeypatch, package):
    """Installs the modules of `stand_in_modules` for `import`, and returns them."""
    modules = stand_in_modules(package)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def _find(name):
    """Returns the object of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def _shape(parameters):
    """Returns name, kind and presence of a default of each parameter."""
    return [(p.name, p.kind, p.default is p.empty) for p in parameters.parameters.values()]


def changed_signatures(package):
    """Lists the recorded names whose signature the installed package does not have."""
    changed = []
    for name, parameters in RECORD[package]["signatures"].items():
        if parameters is None:
            _find(name)
        elif _shape(inspect.signature(_find(name))) != _shape(signature(parameters)):
            changed.append(name)
    return changed
