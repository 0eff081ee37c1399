"""Lists all pruners by name, and builds them from user input."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.base import BUDGETS_PAGE, Pruner
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.cdpruner import CDPruner
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.clse import Clse
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.divprune import DivPrune
from stepprune_jax.pruning.downsample import Downsample
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.hiprune import HiPrune
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.visionzip import VisionZip
from stepprune_jax.selectors.autoselect import AutoSelect
from stepprune_jax.selectors.base import SelectorConfig, TrainedPruner
from stepprune_jax.selectors.glimpseprune import GlimpsePrune
from stepprune_jax.selectors.policy import Policy
from stepprune_jax.selectors.stepprune import StepPrune
from stepprune_jax.selectors.visionselector import VisionSelector
from stepprune_jax.settings import accepted, is_number, read_value
from stepprune_jax.user_input import UserError, expect, nearest, require

# Commands, configurations and tables all read this list of names.
PRUNERS: dict[str, type[Pruner]] = {
    kind.name: kind
    for kind in (
        AllTokens,
        Random,
        Grid,
        Downsample,
        Cls,
        FastV,
        Clse,
        SparseVLM,
        SparseVLMv2,
        PyramidDrop,
        Dart,
        TopV,
        VisionZip,
        PruMerge,
        PruMergePlus,
        HoloV,
        HiPrune,
        DivPrune,
        CDPruner,
        AutoSelect,
        VisionSelector,
        GlimpsePrune,
        StepPrune,
    )
}


def trainable() -> dict[str, type[Policy]]:
    """Returns the pruners that can be trained, by name."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, Policy)}


def weighted() -> dict[str, type[TrainedPruner]]:
    """Returns the pruners with weights, by name."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, TrainedPruner)}


def selector_of(config: SelectorConfig) -> Any:
    """Returns the pruner that a configuration belongs to, without weights."""
    kind: Any = next(kind for kind in weighted().values() if kind.config_type is type(config))
    return kind(config=config)


def build_pruner(
    name: str | None = None,
    budget: Budget | int | str | None = None,
    *,
    policy: TrainedPruner | None = None,
    stop_bias: float | int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Pruner:
    """Builds a pruner from user input.

    Args:
        name: a name of `PRUNERS`; None selects the policy's method, or "all" without a policy.
        budget: tokens to keep per image, or text for `Budget.parse`. With None, a policy uses its
            learned stop. For a mean budget, the stop bias comes from the policy's calibration.
        policy: a trained pruner, from `load_policy`.
        stop_bias: number added to the policy's stop logits instead of the policy's own bias. The
            policy then uses its learned stop, and a mean budget is only a label.
        options: fields of the pruner by name; values may be text.

    Returns:
        The pruner.

    Raises:
        TypeError: `policy` has another type.
        ValueError: the name or an option is unknown, a value is bad, the pruner does not support
            the budget, or the policy belongs to another pruner.
    """
    if not isinstance(policy, TrainedPruner | None):
        raise TypeError(f"policy is {policy!r}, expected a policy, such as load_policy returns")
    policy_method, options = None if policy is None else policy.name, options or {}
    if name is None and policy is None and budget is not None:
        raise UserError(
            "a budget (--budget) needs a pruner (--pruner) or a policy (--policy); " + BUDGETS_PAGE
        )
    if name is None:
        name = policy_method or "all"
    if name not in PRUNERS:
        hint = nearest(name, PRUNERS)
        raise UserError(f"unknown pruner {name!r}, expected one of {', '.join(PRUNERS)}.{hint}")
    kind = PRUNERS[name]
    if kind.config_type is not None and policy is None:
        raise UserError(f"the pruner {name!r} is trained: it needs a policy (--policy)")
    if policy_method not in (None, name):
        raise UserError(f"the policy belongs to {policy_method!r}, not to {name!r}")
    budget = kind.default_budget(options) if budget is None else Budget.parse(budget)
    kind.require_kind(budget)
    fields = _read_fields(kind, options)
    if stop_bias is not None:
        can_stop = policy is not None and kind.has_stop
        require(can_stop, "a stop bias (--stop_bias) needs a policy (--policy) that stops")
        expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number (--stop_bias)")
    if policy is None:
        return kind(budget=budget, **fields)
    if stop_bias is not None:
        learned_stop = Budget("adaptive") if budget.kind == "mean" else budget
        return policy.replace(budget=learned_stop, stop_bias=stop_bias, **fields)
    return policy.replace(**fields).with_budget(budget)


def read_options(source: str, texts: Iterable[str]) -> dict[str, str]:
    """Parses options of a pruner, for `build_pruner`.

    Args:
        source: source of the options, for messages.
        texts: options as "KEY=VALUE".

    Returns:
        The values as text by key.

    Raises:
        ValueError: a text has another form, or a key is given twice.
    """
    options = {}
    for text in texts:
        key, _, value = text.partition("=")
        is_new_pair = bool(key) and "=" in text and key not in options
        require(is_new_pair, f"{source}: {text!r}, expected KEY=VALUE, such as layer=3, once")
        options[key] = value
    return options


def _read_fields(kind: type[Pruner], options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts options, which may be text, to the types of a pruner's fields."""
    # Fields that all pruners share, such as the budget, are not options. `field.type` is a type and
    # not a string, because modules of pruners do not postpone annotations.
    shared = {field.name for field in dataclasses.fields(TrainedPruner)}
    types = {x.name: x.type for x in dataclasses.fields(kind) if x.name not in shared}
    values = {}
    for name, option in options.items():
        if name not in types:
            names = ", ".join(sorted(types)) or "none"
            raise UserError(f"{kind.name} has no option {name!r}; its options: {names}")
        value = read_value(option, types[name])
        values[name] = accepted(f"{kind.name}: option {name}", value, types[name])
    return values
