"""Construction of pruners from a name, a budget, options and a policy."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.base import Pruner, Trained
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.policy import Policy
from stepprune_jax.pruning.registry import PRUNERS
from stepprune_jax.settings import accepted, is_number, read_value
from stepprune_jax.user_input import check, expect, nearest


class Method(NamedTuple):
    """A pruner with its trained parameters.

    Attributes:
        pruner: the pruner.
        params: trained parameters: a `Trained`, or an empty tuple.
    """

    pruner: Pruner
    params: Trained | tuple[()] = ()


NO_PRUNING = Method(AllTokens())
_WHICH = "docs/pruners.md compares methods and budgets, under 'Choosing one'"


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
    own, options = None if policy is None else policy.method, options or {}
    needs = f"a budget (--budget) needs a pruner (--pruner) or a policy (--policy); {_WHICH}"
    check((name is not None or own is not None or budget is None, needs))
    if name is None:
        name = own or "all"
    if name not in PRUNERS:
        hint = nearest(name, PRUNERS)
        raise ValueError(f"unknown pruner {name!r}, expected one of {', '.join(PRUNERS)}.{hint}")
    kind = PRUNERS[name]
    if budget is None and "own" in kind.budgets:
        budget = Budget("own")
    # All tokens only if requested.
    counted = budget is not None or kind.budgets == ("all",) or {*kind.schedules} & {*options}
    has_weights = kind.config_type is None or policy is not None
    check(
        (has_weights, f"the pruner {name!r} is trained: it needs a policy (--policy)"),
        (own in (None, name), f"the policy belongs to {own!r}, not to {name!r}"),
        (bool(counted), f"the pruner {name!r} needs a budget (--budget); {_WHICH}"),
    )
    budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
    kind.require_kind(budget)
    fields = _read_fields(kind, options)
    if stop_bias is not None:
        stops = policy is not None and kind.has_stop
        check((stops, "a stop bias (--stop_bias) needs a policy (--policy) that stops"))
        expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number (--stop_bias)")
    if policy is None:
        return Method(kind(budget=budget, **fields))
    bias = policy.stop_bias if stop_bias is None else stop_bias
    if budget.kind == "mean" and stop_bias is None:
        bias = policy.bias_at(float(budget.number))
    pruner = dataclasses.replace(policy.pruner, budget=budget, **fields)
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
        key, _, value = text.partition("=")
        once = bool(key) and "=" in text and key not in options
        check((once, f"{where}: {text!r}, expected KEY=VALUE, such as layer=3, once"))
        options[key] = value
    return options


def _read_fields(kind: type[Pruner], options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts options, which may be text, to the types of a pruner's fields."""
    # The types are no strings: these modules evaluate their annotations.
    known = {x.name: x.type for x in dataclasses.fields(kind) if x.name not in ("budget", "config")}
    values = {}
    for name, given in options.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{kind.name} has no option {name!r}; its options: {names}")
        value = read_value(given, known[name])
        values[name] = accepted(f"{kind.name}: option {name}", value, known[name])
    return values
