"""Checks code without running it: names are bound, attributes exist, and calls bind.

What an expression holds is followed through imports, classes and annotated results. Any
other expression holds `UNKNOWN`, which may have any attribute and take any argument.
"""

import ast
import builtins
import collections.abc
import importlib
import inspect
import typing
from typing import Any, NamedTuple

OURS = ("stepprune_jax", "experiments", "tools")
UNKNOWN = object()
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterator)


class Instance(NamedTuple):
    """An expression that holds an object with a type, such as `Answer` or `list[Answer]`."""

    type: Any


class Method(NamedTuple):
    """A function that an object of a class has bound."""

    function: Any
    owner: type


def is_ours(value):
    return getattr(value, "__module__", "").partition(".")[0] in OURS


def _annotations(owner):
    try:
        return typing.get_type_hints(owner)
    except Exception:  # jaxtyping's shapes are texts that are no names
        return getattr(owner, "__annotations__", {})


def _held(annotation, owner=None):
    """Returns the value of an expression with an annotation."""
    if annotation is typing.Self:
        return Instance(owner) if owner else UNKNOWN
    return (
        Instance(annotation) if typing.get_origin(annotation) or is_class(annotation) else UNKNOWN
    )


def is_class(value):
    return isinstance(value, type) and not typing.get_origin(value)


def _element(value):
    """Returns the value of an element of a sequence."""
    if not isinstance(value, Instance) or typing.get_origin(value.type) not in _SEQUENCES:
        return UNKNOWN
    return _held(typing.get_args(value.type)[0])


def _subclasses(owner):
    return {owner}.union(*(_subclasses(below) for below in type.__subclasses__(owner)))


class PageCode(ast.NodeVisitor):
    """Walks through the statements of one namespace; `problems` has a line for each fault."""

    def __init__(self, tree):
        self.names, self.problems = {}, []
        nodes = list(ast.walk(tree))
        self.bound = {n.id for n in nodes if isinstance(n, ast.Name) and type(n.ctx) is ast.Store}
        self.bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        named = (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)
        self.bound |= {n.name for n in nodes if isinstance(n, named)} | {"__name__"}
        self.visit(tree)

    def report(self, node, problem):
        self.problems.append(f"line {node.lineno}: {ast.unparse(node)[:60]}: {problem}")

    # Statements: what names hold.

    def visit_Import(self, node):
        for alias in node.names:
            module = self.imported(node, alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            self.names[name] = module if alias.asname else self.imported(node, name)

    def visit_ImportFrom(self, node):
        module = self.imported(node, node.module)
        for alias in node.names:
            value = UNKNOWN
            if module is not UNKNOWN:
                value = getattr(module, alias.name, None)
                if value is None:
                    value = self.imported(node, f"{node.module}.{alias.name}")
            self.names[alias.asname or alias.name] = value

    def imported(self, node, name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if name.partition(".")[0] in OURS:
                self.report(node, str(error))
            return UNKNOWN

    def bind(self, target, value):
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            hints = typing.get_args(value.type) if isinstance(value, Instance) else ()
            fixed = len(hints) == len(target.elts) and Ellipsis not in hints
            for number, part in enumerate(target.elts):
                starred = isinstance(part, ast.Starred)
                part_value = _held(hints[number]) if fixed else _element(value)
                self.bind(part.value if starred else part, UNKNOWN if starred else part_value)
        else:
            self.value(target)

    def visit_Assign(self, node):
        targets, parts = node.targets, [node.value] * len(node.targets)
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, parts = targets[0].elts, node.value.elts
        for target, held in list(zip(targets, map(self.value, parts), strict=False)):
            self.bind(target, held)

    def visit_For(self, node):
        self.bind(node.target, _element(self.value(node.iter)))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_With(self, node):
        for item in node.items:
            self.value(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, UNKNOWN)
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node):
        for expression in (*node.decorator_list, *node.args.defaults):
            self.value(expression)
        self.names[node.name] = UNKNOWN
        self.inside(node.args, node.body)

    def visit_ClassDef(self, node):
        for expression in (*node.bases, *node.decorator_list):
            self.value(expression)
        self.names[node.name] = UNKNOWN
        self.inside(None, node.body)

    def inside(self, arguments, body):
        """Checks a body whose arguments and own names hold anything."""
        outside = dict(self.names)
        every = ast.walk(arguments) if arguments else ()
        self.names |= {n.arg: UNKNOWN for n in every if isinstance(n, ast.arg)}
        for part in body:
            self.visit(part)
        self.names = outside

    def generic_visit(self, node):
        if isinstance(node, ast.expr):
            self.value(node)
        else:
            super().generic_visit(node)

    # Expressions.

    def value(self, node):
        """Checks an expression; returns what it holds."""
        match node:
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.attribute(node, self.value(node.value))
            case ast.Call():
                return self.call(node)
            case ast.Subscript():
                held = self.value(node.value)
                self.value(node.slice)
                return UNKNOWN if isinstance(node.slice, ast.Slice) else _element(held)
            case ast.Lambda():
                self.inside(node.args, [node.body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                outside = dict(self.names)
                for part in node.generators:
                    self.bind(part.target, _element(self.value(part.iter)))
                    for condition in part.ifs:
                        self.value(condition)
                pair = isinstance(node, ast.DictComp)
                for part in (node.key, node.value) if pair else (node.elt,):
                    self.value(part)
                self.names = outside
            case _:
                super().generic_visit(node)
        return UNKNOWN

    def name(self, node):
        if node.id in self.names:
            return self.names[node.id]
        if node.id not in self.bound and not hasattr(builtins, node.id):
            self.report(node, "is not defined")
        return UNKNOWN

    def attribute(self, node, held):
        if held is UNKNOWN or isinstance(held, Method):
            return UNKNOWN
        if not isinstance(held, Instance):
            if hasattr(held, node.attr):
                return getattr(held, node.attr)
            if inspect.ismodule(held) or is_ours(held):
                self.report(node, f"{held.__name__} has no {node.attr}")
            return UNKNOWN
        owner = typing.get_origin(held.type) or held.type
        if not is_class(owner) or not is_ours(owner):
            return UNKNOWN
        return self.attribute_of(node, owner)

    def attribute_of(self, node, owner):
        """Returns the value of an attribute of an object of one of our classes."""
        hints = _annotations(owner)
        value = inspect.getattr_static(owner, node.attr, UNKNOWN)
        if isinstance(value, property):
            return _held(_annotations(value.fget).get("return"), owner)
        if inspect.isfunction(value):
            return Method(value, owner)
        if node.attr in hints:
            return _held(hints[node.attr], owner)
        is_attribute = any(
            hasattr(it, node.attr) or node.attr in _annotations(it) for it in _subclasses(owner)
        )
        if not is_attribute and not hasattr(owner, "__getattr__"):
            self.report(node, f"{owner.__name__} has no {node.attr}")
        return UNKNOWN

    def call(self, node):
        function = self.value(node.func)
        positional = [self.value(argument) for argument in node.args]
        named = {part.arg: self.value(part.value) for part in node.keywords}
        owner = None
        if isinstance(function, Method):
            function, owner = function
            positional.insert(0, Instance(owner))
        if function is UNKNOWN or isinstance(function, Instance) or not callable(function):
            return UNKNOWN
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # functions that are written in C
            return UNKNOWN
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        unpacked = named.pop(None, None) is not None
        try:
            bind = signature.bind_partial if starred or unpacked else signature.bind
            arguments = bind(*() if starred else positional, **named).arguments
        except TypeError as error:
            self.report(node, str(error))
            return UNKNOWN
        for name, held in arguments.items():
            self.check_type(node, name, held, _annotations(function).get(name))
        if is_class(function):
            return Instance(function)
        return _held(
            _annotations(function).get("return"), owner or getattr(function, "__self__", None)
        )

    def check_type(self, node, name, held, annotation):
        """Reports an object of one of our classes where an unrelated one of ours is expected."""
        if not isinstance(held, Instance) or not is_class(annotation) or not is_class(held.type):
            return
        both = held.type, annotation
        if not all(map(is_ours, both)) or getattr(annotation, "_is_protocol", False):
            return
        if not issubclass(*both) and not issubclass(*both[::-1]):
            names = " is a ".join((name, held.type.__name__))
            self.report(node, f"{names}, expected {annotation.__name__}")


def problems(blocks):
    """Returns a line for each fault in blocks of code that share a namespace."""
    body = [statement for block in blocks for statement in ast.parse(block).body]
    return PageCode(ast.Module(body, type_ignores=[])).problems
