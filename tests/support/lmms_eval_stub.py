"""Modules with the recorded interface of lmms-eval, for tests without the package."""

import abc
import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator

from interfaces import parse_signature, read_record

RECORD = read_record("lmms_eval")


def _function(signature: str) -> types.FunctionType:
    """Returns a function with a recorded signature that does nothing."""
    namespace = {}
    exec(f"def function{signature}: ...", namespace)
    return namespace["function"]


def _dataclass(name: str) -> type:
    """Returns a dataclass with the recorded fields."""
    fields = []
    for parameter in parse_signature(RECORD[name]):
        default = None if parameter.default is ... else dataclasses.MISSING
        fields.append((parameter.name, object, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(name, fields)


def _base_class() -> type:
    """Returns a class with the abstract methods and the attributes of `lmms`."""

    def set_attributes(self):
        for name in RECORD["attributes"]:
            setattr(self, name, {})
        hook = type("CacheHook", (), {"add_partial": _function(RECORD["add_partial"])})
        self.cache_hook = hook()

    methods = RECORD["abstract_methods"].items()
    abstract = {name: abc.abstractmethod(_function(signature)) for name, signature in methods}
    return abc.ABCMeta("lmms", (), {"__init__": set_attributes, "is_simple": True, **abstract})


@contextlib.contextmanager
def integration() -> Iterator[types.ModuleType]:
    """Imports `stepprune_jax.integrations.lmms_eval` with the stub in place of lmms-eval."""
    name = "stepprune_jax.integrations.lmms_eval"
    model, registry = types.ModuleType("model"), types.ModuleType("registry_v2")
    model.lmms, registry.ModelManifest = _base_class(), _dataclass("ModelManifest")
    packages = ("lmms_eval", "lmms_eval.api", "lmms_eval.models")
    stub = {package: types.ModuleType(package) for package in packages}
    stub |= {"lmms_eval.api.model": model, "lmms_eval.models.registry_v2": registry}
    replaced = {module: sys.modules.pop(module, None) for module in (*stub, name)}
    sys.modules.update(stub)
    try:
        yield importlib.import_module(name)
    finally:
        for module, original in replaced.items():
            sys.modules.pop(module, None)
            if original is not None:
                sys.modules[module] = original


Instance = _dataclass("Instance")
Instance.args = property(lambda instance: instance.arguments)
