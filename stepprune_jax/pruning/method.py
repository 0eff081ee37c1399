"""The list of pruners, and their construction from a name, a budget, options and a policy."""

import ast
import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.autoselect import AutoSelect
from stepprune_jax.pruning.base import Pruner, Trained
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.stepprune import StepPrune
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.trained import Policy
from stepprune_jax.pruning.visionzip import VisionZip
from stepprune_jax.settings import is_number

# The only list of names, used by commands, configurations and tables.
PRUNERS: dict[str, type[Pruner]] = {
    kind.name: kind
    for kind in (
        AllTokens,
        Random,
        Grid,
        Cls,
        FastV,
        SparseVLM,
        SparseVLMv2,
        PyramidDrop,
        Dart,
        TopV,
        VisionZip,
        PruMerge,
        PruMergePlus,
        HoloV,
        AutoSelect,
        StepPrune,
    )
}


class Method(NamedTuple):
    """A pruner with its trained parameters.

    Attributes:
        pruner: the pruner.
        params: trained parameters: a `Trained`, or an empty tuple.
    """

    pruner: Pruner
    params: Trained | tuple[()] = ()


NO_PRUNING = Method(AllTokens())


def make_method(
    name: str | None = None,
    budget: Budget | int | str | None = None,
    *,
    policy: Policy | None = None,
    stop_bias: float | int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Method:
    """Builds a method from user input.

    Args:
        name: a name of `PRUNERS`; by default the policy's method, or "all" without a policy.
        budget: tokens to keep per image, or text for `Budget.parse`. Without one a policy stops by
            itself; for a mean budget, it does so at the stop bias of its calibration.
        policy: the policy of a trained method.
        stop_bias: number added to the policy's stop logits, instead of its own bias.
        options: fields of the pruner by name; values may be text.

    Returns:
        The method.

    Raises:
        TypeError: the policy is not a `Policy`.
        ValueError: an unknown name or option, a bad value, an unsupported kind of budget, or a
            policy that does not match the method.
    """
    if not isinstance(policy, Policy | None):
        raise TypeError(f"policy is {policy!r}, expected a Policy, such as load_policy returns")
    if name is None and policy is None and budget is not None:
        raise ValueError("a budget (--budget) needs a pruner (--pruner) or a policy (--policy)")
    if name is None:
        name = "all" if policy is None else _name_of(policy)
    if name not in PRUNERS:
        close = difflib.get_close_matches(name, PRUNERS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown pruner {name!r}, expected one of {', '.join(PRUNERS)}{hint}")
    kind = PRUNERS[name]
    if kind.config_type is not None and policy is None:
        raise ValueError(f"the pruner {name!r} is trained: it needs a policy (--policy)")
    if policy is not None and not isinstance(policy.config, kind.config_type or ()):
        raise ValueError(f"the policy belongs to {_name_of(policy)!r}, not to {name!r}")
    if stop_bias is not None and policy is None:
        raise ValueError("a stop bias (--stop_bias) needs a policy (--policy)")
    if stop_bias is not None and "own" not in kind.budgets:
        raise ValueError(f"{name} has no stop: a stop bias (--stop_bias) has no effect on it")
    if stop_bias is not None and not is_number(stop_bias):
        raise ValueError(f"stop_bias is {stop_bias!r}, expected a finite number (--stop_bias)")
    if budget is None and "own" in kind.budgets:
        budget = Budget("own")
    elif budget is None and kind.budgets != ("all",) and not {*kind.schedules} & {*(options or {})}:
        # All tokens only if requested.
        raise ValueError(_wrong_budget(kind, Budget()))
    elif not isinstance(budget, Budget):
        budget = Budget.parse(budget)
    if budget.kind not in kind.budgets:
        raise ValueError(_wrong_budget(kind, budget))
    fields = dict(options or {})
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - (known.keys() - {"budget", "config"}))
    if unknown:
        names = ", ".join(sorted(known.keys() - {"budget", "config"})) or "none"
        raise ValueError(f"{name} has no option {unknown[0]!r}; its options: {names}")
    fields = {key: _value(name, known[key], value) for key, value in fields.items()}
    if policy is None:
        return Method(kind(budget=budget, **fields))
    bias = policy.stop_bias if stop_bias is None else stop_bias
    if budget.kind == "mean" and stop_bias is None:
        bias = policy.bias_at(float(budget.value or 0))
    pruner = kind(budget=budget, **fields | {"config": policy.config})
    return Method(pruner, Trained(pruner.prepare(policy.params), policy.stats, bias))


def read_options(where: str, texts: Iterable[str]) -> dict[str, str]:
    """Reads options of a pruner, for `make_method`.

    Args:
        where: source of the options, for messages.
        texts: options as "KEY=VALUE".

    Returns:
        The values by key, as text.

    Raises:
        ValueError: a text has another form, or a key is given twice.
    """
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"{where}: {text!r}, expected KEY=VALUE such as layer=3")
        if key in options:
            raise ValueError(f"{where}: {key} is given twice")
        options[key] = value
    return options


def _name_of(policy: Policy) -> str:
    """Returns the name of a policy's pruner."""
    return next(
        name
        for name, kind in PRUNERS.items()
        if kind.config_type is not None and isinstance(policy.config, kind.config_type)
    )


def _wrong_budget(kind: type[Pruner], budget: Budget) -> str:
    """Returns a message about the expected budget."""
    if kind.name == "all":
        return f"budget is {budget}, but the pruner 'all' keeps every token: choose another one"
    if budget.kind == "all":
        if kind.config_type is not None and "own" not in kind.budgets:
            return f"{kind.name} has no learned stop: give a budget (--budget)"
        return f"the pruner {kind.name!r} needs a budget (--budget)"
    return f"{kind.name} does not support the budget {budget}, only {', '.join(kind.budgets)}"


def _value(name: str, field: dataclasses.Field, value: Any) -> Any:
    """Converts an option's value to the type of its field."""
    declared: Any = field.type  # not a string: these modules evaluate their annotations
    union = isinstance(declared, types.UnionType)
    expected, *none = typing.get_args(declared) if union else (declared,)
    if isinstance(value, str) and expected is not str:
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    if none and value is None:
        return None
    members = value if isinstance(value, list | tuple) else (value,)
    if not all(_fits(x) for x in members if isinstance(x, float | int)):
        raise ValueError(
            f"{name}: option {field.name} is {value!r}, expected a number that 32 bits hold"
        )
    if typing.get_origin(expected) is tuple:
        member = typing.get_args(expected)[0]
        if not isinstance(value, list | tuple) or not all(_is(member, x) for x in value):
            raise ValueError(
                f"{name}: option {field.name} is {value!r}, expected a list of {member.__name__}"
            )
        return tuple(map(member, value))
    if not _is(expected, value):
        raise ValueError(f"{name}: option {field.name} is {value!r}, expected {expected.__name__}")
    return expected(value)


def _is(expected: type, value: Any) -> bool:
    """Returns whether a value has a type; integers are numbers, booleans are not."""
    return type(value) is expected or (expected is float and type(value) is int)


def _fits(number: float | int) -> bool:
    """Returns whether a number is an int32, or finite as a float32."""
    return abs(number) < 1 << 31 if isinstance(number, int) else is_number(number)
