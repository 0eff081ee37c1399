"""Lists all pruners by name, and builds them from user input."""

import dataclasses
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints, overload

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.base import BUDGETS_PAGE, Pruner
from stepprune_jax.pruning.blind import Blind
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.cdpruner import CDPruner
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.clse import Clse
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.divprune import DivPrune
from stepprune_jax.pruning.downsample import Downsample
from stepprune_jax.pruning.evs import Evs
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.frames import Frames
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.hiprune import HiPrune
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.mmtok import MMTok
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.vcast import VCast
from stepprune_jax.pruning.vidcom2 import VidCom2
from stepprune_jax.pruning.visionzip import VisionZip
from stepprune_jax.selectors.autoselect import AutoSelect
from stepprune_jax.selectors.base import SelectorConfig, TrainedPruner
from stepprune_jax.selectors.glimpseprune import GlimpsePrune
from stepprune_jax.selectors.policy import Policy
from stepprune_jax.selectors.stepprune import StepPrune
from stepprune_jax.selectors.visionselector import VisionSelector
from stepprune_jax.settings import accepted, is_number, read_value
from stepprune_jax.user_input import UserError, expect, local_path, naming, nearest, require

# Commands, configurations and tables all read this list of names. `resolve_pruner` adds classes of
# the user.
PRUNERS: dict[str, type[Pruner]] = {
    kind.name: kind
    for kind in (
        AllTokens,
        Blind,
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
        MMTok,
        Frames,
        Evs,
        VidCom2,
        VCast,
        AutoSelect,
        VisionSelector,
        GlimpsePrune,
        StepPrune,
    )
}


# The value of `method` in lmms-eval that selects the method of the policy.
_RESERVED_NAMES = ("policy",)


class _UserClass(NamedTuple):
    """A class outside this package that `resolve_pruner` added to `PRUNERS`.

    Attributes:
        source: absolute path of the file, or name of the module, that contains the class.
        class_name: name of the class.
        digest: digest of the files that define the class and its base classes outside this package.
    """

    source: str
    class_name: str
    digest: str


# Classes of the user by the name of their method.
_USER_CLASSES: dict[str, _UserClass] = {}


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


@overload
def resolve_pruner(text: str) -> str: ...
@overload
def resolve_pruner(text: None) -> None: ...
def resolve_pruner(text: str | None) -> str | None:
    """Returns the name of a pruner. If the text refers to a class, adds the class to `PRUNERS`.

    Commands and configurations call this function with the text that their user wrote. It runs the
    file or imports the module that the text refers to, so a server must not call it for requests.

    Args:
        text: a name of `PRUNERS`, or "FILE.py:CLASS" or "package.module:CLASS" for a class that
            is not part of this package, or None. The folder of the file or the working directory is
            appended to Python's import path.

    Returns:
        The `name` of the class. Names of `PRUNERS`, other texts without a colon, and None are
        returned unchanged.

    Raises:
        UserError: there is no such class, its file has an error, or the class is not a pruner that
            commands can use.
    """
    if text is None or not (":" in text or text.endswith(".py")):
        return text
    source, _, class_name = text.rpartition(":")
    is_file = source.endswith(".py")
    is_valid_source = is_file or all(part.isidentifier() for part in source.split("."))
    if not (is_valid_source and class_name.isidentifier()):
        raise UserError(
            f"the pruner {text!r} is not a class, expected FILE.py:CLASS or package.module:CLASS"
        )
    path = local_path(source).resolve()
    source = str(path) if is_file else source
    for name, user_class in _USER_CLASSES.items():
        if (user_class.source, user_class.class_name) == (source, class_name):
            return name
    with naming(f"the pruner {text!r}"):
        module = _run_file(path) if is_file else _import_module(source)
        pruner_type = getattr(module, class_name, None)
        if not isinstance(pruner_type, type):
            hint = nearest(class_name, vars(module))
            raise UserError(f"there is no class {class_name} in {source}.{hint}")
        _check_user_class(pruner_type)
        user_class = _UserClass(source, class_name, _digest_sources(pruner_type))
    name = pruner_type.name
    PRUNERS[name], _USER_CLASSES[name] = pruner_type, user_class
    return name


def user_digest(name: str) -> str | None:
    """Returns the digest of the source of a class of the user, for files of answers.

    Args:
        name: name of a pruner.

    Returns:
        The digest of the source as it was when `resolve_pruner` ran it; None for a pruner of this
        package.
    """
    user_class = _USER_CLASSES.get(name)
    return None if user_class is None else user_class.digest


def _import_module(name: str) -> ModuleType:
    """Imports a module that is installed or in the working directory.

    Raises:
        UserError: there is no such module, or importing it fails.
    """
    _append_to_import_path(Path.cwd())
    importlib.invalidate_caches()  # The module may be newer than the caches.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(_locate(error)) from error
        raise UserError(f"there is no module {name}, installed or in {Path.cwd()}") from error
    except Exception as error:  # A module is a program, which may raise any type of error.
        raise UserError(_locate(error)) from error


def _run_file(path: Path) -> ModuleType:
    """Runs a Python file as a module, once in a process.

    Args:
        path: absolute path of the file.

    Raises:
        UserError: there is no such file, or running it fails.
    """
    # The digest keeps files of the same name in different folders apart.
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    _append_to_import_path(path.parent)
    module = ModuleType(module_name)
    module.__file__ = str(path)
    # The decorator `dataclass` looks up the module of a class in `sys.modules`.
    sys.modules[module_name] = module
    try:
        # An import would write bytecode, and could read bytecode of an older version of the file.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Exception as error:  # The file is a program, which may raise any type of error.
        del sys.modules[module_name]
        raise UserError(_locate(error)) from error
    return module


def _append_to_import_path(folder: Path) -> None:
    """Makes the modules of a folder importable. Installed modules of the same name come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _locate(error: Exception) -> str:
    """Describes an error of a user's module: the file, the line, and the error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    import_files = (__file__, importlib.__file__)
    # The first of these frames is the statement at the top level of the user's module that failed.
    places = [
        f"{frame.filename}, line {frame.lineno}: "
        for frame in frames
        if frame.filename not in import_files and not frame.filename.startswith("<frozen")
    ]
    return f"{''.join(places[:1])}{type(error).__name__}: {error}"


def _check_user_class(pruner_type: type) -> None:
    """Checks that commands can use a class of the user as a pruner.

    Raises:
        UserError: the class does not fulfil a requirement, or another pruner has its name or label.
    """
    class_name = pruner_type.__name__
    if not issubclass(pruner_type, Pruner):
        raise UserError(
            f"{class_name} is not a pruner, expected a subclass of Ranker, Pruner or LayerPruner "
            "of stepprune_jax.pruning"
        )
    if "__dataclass_params__" not in vars(pruner_type):  # A base class may be a dataclass.
        raise UserError(
            f"{class_name} is not a frozen dataclass, expected @dataclasses.dataclass(frozen=True) "
            "above the class"
        )
    missing_methods = sorted(getattr(pruner_type, "__abstractmethods__", ()))
    if missing_methods:
        raise UserError(f"{class_name} does not define {', '.join(missing_methods)}")
    name = getattr(pruner_type, "name", None)
    if not isinstance(name, str):
        raise UserError(f"{class_name} has no name, expected one such as name = 'my_method'")
    # Commas, semicolons, spaces, "@" and "=" separate names from other text in settings.
    is_valid = bool(re.fullmatch("[a-z][a-z0-9_-]*", name)) and name not in _RESERVED_NAMES
    expect(f"{class_name}.name", name, is_valid, "lower-case letters, digits, _ and -")
    label = pruner_type.label
    is_valid = isinstance(label, str) and bool(label.strip()) and "," not in label
    expect(f"{class_name}.label", label, is_valid, "a text without commas")
    for other_name, other_type in PRUNERS.items():
        other = "another class" if other_name in _USER_CLASSES else "a built-in pruner"
        if name == other_name:
            raise UserError(f"{class_name}.name is {name!r}, the name of {other}; choose another")
        if label.lower() == other_type.label.lower():
            raise UserError(
                f"{class_name}.label is {label!r}, the label of {other}; choose another"
            )
    try:
        option_types(pruner_type)
    except NameError as error:
        raise UserError(f"the type of an option of {class_name} is unknown: {error}") from error


def _digest_sources(pruner_type: type[Pruner]) -> str:
    """Returns a digest of the files that define a class and its base classes outside this package.

    A change of a base class may change answers as well.
    """
    files = {
        inspect.getfile(base)
        for base in pruner_type.__mro__
        if issubclass(base, Pruner) and not base.__module__.startswith(f"{__package__}.")
    }
    contents = [Path(file).read_bytes() for file in sorted(files)]
    return hashlib.sha256(b"\n".join(contents)).hexdigest()[:16]


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


def option_types(pruner_type: type[Pruner]) -> dict[str, Any]:
    """Returns the types of a pruner's options by name.

    The options are the fields that its base class `Pruner` or `TrainedPruner` does not have, such
    as the budget.
    """
    base_type = TrainedPruner if issubclass(pruner_type, TrainedPruner) else Pruner
    shared_names = {field.name for field in dataclasses.fields(base_type)}
    types = get_type_hints(pruner_type)
    names = [field.name for field in dataclasses.fields(pruner_type)]
    return {name: types[name] for name in names if name not in shared_names}


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
    types = option_types(pruner_type)
    values = {}
    for name, option in options.items():
        if name not in types:
            names = ", ".join(sorted(types)) or "none"
            raise UserError(f"{pruner_type.name} has no option {name!r}; its options: {names}")
        value = read_value(option, types[name])
        values[name] = accepted(f"{pruner_type.name}: option {name}", value, types[name])
    return values
