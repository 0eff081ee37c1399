"""All pruners by name, and how one is built from what commands, files and requests say."""

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

# The only list of names, used by commands, configurations and tables.
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
    """Returns those of `PRUNERS` that can be trained."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, Policy)}


def weighted() -> dict[str, type[TrainedPruner]]:
    """Returns those of `PRUNERS` that have weights."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, TrainedPruner)}


def selector_of(config: SelectorConfig) -> Any:
    """Returns the method that a configuration belongs to, without weights."""
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
        name: a name of `PRUNERS`; by default the policy's method, or "all" without a policy.
        budget: tokens to keep per image, or text for `Budget.parse`. Without one a policy stops by
            itself; for a mean budget, it does so at the stop bias of its calibration.
        policy: a trained method, from `load_policy`.
        stop_bias: number added to the policy's stop logits, instead of its own bias. The policy
            then stops by itself, also with a mean budget, which is only a label.
        options: fields of the pruner by name; values may be text.

    Returns:
        The pruner.

    Raises:
        TypeError: the policy is none.
        ValueError: an unknown name or option, a bad value, an unsupported kind of budget, or a
            policy that does not match the method.
    """
    if not isinstance(policy, TrainedPruner | None):
        raise TypeError(f"policy is {policy!r}, expected a policy, such as load_policy returns")
    own, options = None if policy is None else policy.name, options or {}
    needs = f"a budget (--budget) needs a pruner (--pruner) or a policy (--policy); {BUDGETS_PAGE}"
    require(name is not None or own is not None or budget is None, needs)
    if name is None:
        name = own or "all"
    if name not in PRUNERS:
        hint = nearest(name, PRUNERS)
        raise UserError(f"unknown pruner {name!r}, expected one of {', '.join(PRUNERS)}.{hint}")
    kind = PRUNERS[name]
    has_weights = kind.config_type is None or policy is not None
    require(has_weights, f"the pruner {name!r} is trained: it needs a policy (--policy)")
    require(own in (None, name), f"the policy belongs to {own!r}, not to {name!r}")
    budget = kind.default_budget(options) if budget is None else Budget.parse(budget)
    kind.require_kind(budget)
    fields = _read_fields(kind, options)
    if stop_bias is not None:
        stops = policy is not None and kind.has_stop
        require(stops, "a stop bias (--stop_bias) needs a policy (--policy) that stops")
        expect("stop_bias", stop_bias, is_number(stop_bias), "a finite number (--stop_bias)")
    if policy is None:
        return kind(budget=budget, **fields)
    if stop_bias is not None:
        learned_stop = Budget("own") if budget.kind == "mean" else budget
        return policy.replace(budget=learned_stop, stop_bias=stop_bias, **fields)
    return policy.replace(**fields).with_budget(budget)


def read_options(where: str, texts: Iterable[str]) -> dict[str, str]:
    """Reads options of a pruner, for `build_pruner`.

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
        require(once, f"{where}: {text!r}, expected KEY=VALUE, such as layer=3, once")
        options[key] = value
    return options


def _read_fields(kind: type[Pruner], options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts options, which may be text, to the types of a pruner's fields."""
    # The types are no strings: these modules evaluate their annotations.
    base = {field.name for field in dataclasses.fields(TrainedPruner)}  # the budget among them
    known = {x.name: x.type for x in dataclasses.fields(kind) if x.name not in base}
    values = {}
    for name, given in options.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UserError(f"{kind.name} has no option {name!r}; its options: {names}")
        value = read_value(given, known[name])
        values[name] = accepted(f"{kind.name}: option {name}", value, known[name])
    return values
