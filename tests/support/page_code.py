"""Checks code without running it: names are defined, attributes exist, and calls are valid.

The value of an expression is inferred from imports, classes and annotated results. All other
expressions have the value `UNKNOWN`, which accepts any attribute and any argument.
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
    """Value of an expression: an object of a type such as `Answer` or `list[Answer]`."""

    type: Any


class Method(NamedTuple):
    """Value of an expression: a method of an object of class `owner`."""

    function: Any
    owner: type


def is_ours(value):
    """Returns whether a class or function is defined in this repository."""
    return getattr(value, "__module__", "").partition(".")[0] in OURS


def _annotations(owner):
    """Returns the annotations of a class or function by name."""
    try:
        return typing.get_type_hints(owner)
    except Exception:  # shapes of jaxtyping are strings that cannot be evaluated
        return getattr(owner, "__annotations__", {})


def _annotated_value(annotation, owner=None):
    """Returns the value of an expression with an annotation; `owner` is the class of Self."""
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
    return _annotated_value(typing.get_args(value.type)[0])


def _subclasses(owner):
    return {owner}.union(*(_subclasses(below) for below in type.__subclasses__(owner)))


class PageCode(ast.NodeVisitor):
    """Checks the statements of one namespace.

    Attributes:
        names: value of each name at the current statement.
        problems: one line per fault.
        defined: all names that are assigned anywhere in the code.
    """

    def __init__(self, tree):
        self.names, self.problems = {}, []
        nodes = list(ast.walk(tree))
        self.defined = {n.id for n in nodes if isinstance(n, ast.Name) and type(n.ctx) is ast.Store}
        self.defined |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        definitions = (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)
        self.defined |= {n.name for n in nodes if isinstance(n, definitions)} | {"__name__"}
        self.visit(tree)

    def report(self, node, problem):
        self.problems.append(f"line {node.lineno}: {ast.unparse(node)[:60]}: {problem}")

    # Statements: they change the values of names.

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
            is_fixed = len(hints) == len(target.elts) and Ellipsis not in hints
            for number, part in enumerate(target.elts):
                is_starred = isinstance(part, ast.Starred)
                part_value = _annotated_value(hints[number]) if is_fixed else _element(value)
                self.bind(part.value if is_starred else part, UNKNOWN if is_starred else part_value)
        else:
            self.value(target)

    def visit_Assign(self, node):
        targets, parts = node.targets, [node.value] * len(node.targets)
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, parts = targets[0].elts, node.value.elts
        for target, value in list(zip(targets, map(self.value, parts), strict=False)):
            self.bind(target, value)

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
        """Checks the body of a function or class. Its arguments are `UNKNOWN`."""
        outer_names = dict(self.names)
        nodes = ast.walk(arguments) if arguments else ()
        self.names |= {n.arg: UNKNOWN for n in nodes if isinstance(n, ast.arg)}
        for statement in body:
            self.visit(statement)
        self.names = outer_names

    def generic_visit(self, node):
        if isinstance(node, ast.expr):
            self.value(node)
        else:
            super().generic_visit(node)

    # Expressions.

    def value(self, node):
        """Checks an expression and returns its value."""
        match node:
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.attribute(node, self.value(node.value))
            case ast.Call():
                return self.call(node)
            case ast.Subscript():
                sequence = self.value(node.value)
                self.value(node.slice)
                return UNKNOWN if isinstance(node.slice, ast.Slice) else _element(sequence)
            case ast.Lambda():
                self.inside(node.args, [node.body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                outer_names = dict(self.names)
                for generator in node.generators:
                    self.bind(generator.target, _element(self.value(generator.iter)))
                    for condition in generator.ifs:
                        self.value(condition)
                is_dict = isinstance(node, ast.DictComp)
                for part in (node.key, node.value) if is_dict else (node.elt,):
                    self.value(part)
                self.names = outer_names
            case _:
                super().generic_visit(node)
        return UNKNOWN

    def name(self, node):
        if node.id in self.names:
            return self.names[node.id]
        if node.id not in self.defined and not hasattr(builtins, node.id):
            self.report(node, "is not defined")
        return UNKNOWN

    def attribute(self, node, value):
        """Returns the value of an attribute of an expression with this value."""
        if value is UNKNOWN or isinstance(value, Method):
            return UNKNOWN
        if not isinstance(value, Instance):
            if hasattr(value, node.attr):
                return getattr(value, node.attr)
            if inspect.ismodule(value) or is_ours(value):
                self.report(node, f"{value.__name__} has no {node.attr}")
            return UNKNOWN
        owner = typing.get_origin(value.type) or value.type
        if not is_class(owner) or not is_ours(owner):
            return UNKNOWN
        return self.attribute_of(node, owner)

    def attribute_of(self, node, owner):
        """Returns the value of an attribute of an object of one of our classes."""
        hints = _annotations(owner)
        value = inspect.getattr_static(owner, node.attr, UNKNOWN)
        if isinstance(value, property):
            return _annotated_value(_annotations(value.fget).get("return"), owner)
        if inspect.isfunction(value):
            return Method(value, owner)
        if node.attr in hints:
            return _annotated_value(hints[node.attr], owner)
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
        has_star = any(isinstance(argument, ast.Starred) for argument in node.args)
        has_double_star = named.pop(None, None) is not None
        try:
            bind = signature.bind_partial if has_star or has_double_star else signature.bind
            arguments = bind(*() if has_star else positional, **named).arguments
        except TypeError as error:
            self.report(node, str(error))
            return UNKNOWN
        for name, value in arguments.items():
            self.check_type(node, name, value, _annotations(function).get(name))
        if is_class(function):
            return Instance(function)
        return _annotated_value(
            _annotations(function).get("return"), owner or getattr(function, "__self__", None)
        )

    def check_type(self, node, name, value, annotation):
        """Reports an argument of one of our classes if an unrelated class of ours is expected."""
        if not isinstance(value, Instance) or not is_class(annotation) or not is_class(value.type):
            return
        types = value.type, annotation
        if not all(map(is_ours, types)) or getattr(annotation, "_is_protocol", False):
            return
        if not issubclass(*types) and not issubclass(*types[::-1]):
            problem = f"{name} is a {value.type.__name__}, expected {annotation.__name__}"
            self.report(node, problem)


def problems(blocks):
    """Returns a line for each fault in blocks of code that share a namespace."""
    body = [statement for block in blocks for statement in ast.parse(block).body]
    return PageCode(ast.Module(body, type_ignores=[])).problems
