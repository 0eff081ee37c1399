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
    """Returns a pruner without weights, of the method that a configuration belongs to."""
    pruner_type: Any = next(
        pruner_type
        for pruner_type in weighted().values()
        if pruner_type.config_type is type(config)
    )
    return pruner_type(config=config)


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
        budget: number of tokens to keep per image, or text for `Budget.parse`. With None, a policy
            uses its learned stop. For a mean budget, the stop bias comes from the policy's
            calibration.
        policy: a trained pruner from `load_policy`; None for a method without weights.
        stop_bias: number added to the policy's stop logits, in place of the stop bias in its file.
            The learned stop then ends the selection, and a mean budget only names the result.
        options: fields of the pruner by name; values may be text.

    Returns:
        The pruner, with the weights of `policy` if there is one.

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
    pruner_type = PRUNERS[name]
    if pruner_type.config_type is not None and policy is None:
        raise UserError(f"the pruner {name!r} is trained: it needs a policy (--policy)")
    if policy_method not in (None, name):
        raise UserError(f"the policy belongs to {policy_method!r}, not to {name!r}")
    budget = pruner_type.default_budget(options) if budget is None else Budget.parse(budget)
    pruner_type.require_kind(budget)  # raises if the pruner does not support this kind of budget
    fields = _read_fields(pruner_type, options)
    if stop_bias is not None:
        has_learned_stop = policy is not None and pruner_type.has_stop
        require(has_learned_stop, "a stop bias (--stop_bias) needs a policy (--policy) that stops")
        expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number (--stop_bias)")
    if policy is None:
        return pruner_type(budget=budget, **fields)
    if stop_bias is not None:
        learned_stop = Budget("adaptive") if budget.kind == "mean" else budget
        return policy.replace(budget=learned_stop, stop_bias=stop_bias, **fields)
    return policy.replace(**fields).with_budget(budget)


def read_options(source: str, texts: Iterable[str]) -> dict[str, str]:
    """Parses the options of a pruner from the command line, for `build_pruner`.

    Args:
        source: flag or setting that contains the options, for messages.
        texts: options as "KEY=VALUE".

    Returns:
        The values by key, still as text.

    Raises:
        ValueError: a text has another form, or a key is given twice.
    """
    options: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not key or not separator or key in options:
            raise UserError(f"{source}: {text!r}, expected KEY=VALUE, such as layer=3, once")
        options[key] = value
    return options


def _read_fields(pruner_type: type[Pruner], options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the options of a pruner to values of its fields.

    Args:
        pruner_type: the type of the pruner.
        options: values by field name; values may be text.

    Returns:
        The checked values by field name.

    Raises:
        ValueError: an option is unknown, or its value is not valid.
    """
    # Fields that all pruners share, such as the budget, are not options. `field.type` is a type and
    # not a string, because modules of pruners do not postpone annotations.
    shared_names = {field.name for field in dataclasses.fields(TrainedPruner)}
    types = {
        field.name: field.type
        for field in dataclasses.fields(pruner_type)
        if field.name not in shared_names
    }
    values = {}
    for name, option in options.items():
        if name not in types:
            names = ", ".join(sorted(types)) or "none"
            raise UserError(f"{pruner_type.name} has no option {name!r}; its options: {names}")
        value = read_value(option, types[name])
        values[name] = accepted(f"{pruner_type.name}: option {name}", value, types[name])
    return values
