"""Variants of training as configurations: the default, ablations, baselines, and trials of each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.studies.scaling import ScaledGate
from stepprune_jax import configurations
from stepprune_jax.evaluation.names import DEFAULT
from stepprune_jax.pruners import PRUNERS
from stepprune_jax.trained import Policy
from stepprune_jax.training import Run
from stepprune_jax.user_input import UserError

_RATES = ("lr", "final_lr", "muon_lr")


class Variant(NamedTuple):
    """A variant of training a policy.

    Attributes:
        method: name in tables.
        argument: argument of the configuration file.
        changes: changes to the configuration, each "field=value".
        rates: factor on the configuration's learning rates.
        stop: whether its learned stop is evaluated, too.
        selector: its method, where the library has none of the name.
    """

    method: str
    argument: str = ""
    changes: tuple[str, ...] = ()
    rates: float = 1.0
    stop: bool = False
    selector: type[Policy] | None = None


# By their names on the command line.
VARIANTS = {
    "default": Variant(DEFAULT, stop=True),
    "literal": Variant("StepPrune literal", ":literal", stop=True),
    # With the text gate and the learning rates that serve it better: experiments/RESULTS.md.
    "autoselect": Variant(
        "AutoSelect-like", changes=("method=autoselect", "text_gate_anneal=0.1"), rates=0.5
    ),
    "causal": Variant("causal encoder", changes=("policy.encoder_attention=causal",)),
    "last": Variant("last step's score", changes=("policy.aggregation=last",)),
    "uniform": Variant("uniform score", changes=("policy.aggregation=uniform",)),
    "alive": Variant("undiscounted score", changes=("policy.aggregation=alive",)),
    "blind": Variant("no question", changes=("policy.text_width=0",)),
    "two_layers": Variant("two decoder layers", changes=("policy.decoder_layers=2",)),
    "straight_through": Variant(
        "straight-through estimator", changes=("policy.estimator=straight_through",)
    ),
    "scale_gate": Variant(
        ScaledGate.label, changes=(f"method={ScaledGate.name}",), selector=ScaledGate
    ),
    "aligned_stop": Variant("stop as a slot", changes=("policy.stop=aligned",), stop=True),
    "group2": Variant("2 tokens a step", changes=("policy.group=2",)),
    "group4": Variant("4 tokens a step", changes=("policy.group=4",)),
    "group8": Variant("8 tokens a step", changes=("policy.group=8",)),
}


def _scale_rates(factor: float) -> Callable[[Run], Run]:
    def change(run: Run) -> Run:
        rates = {f"optimizer.{name}": factor * getattr(run.optimizer, name) for name in _RATES}
        return run.replace(rates)

    return change


def _scale_temperature(factor: float) -> Callable[[Run], Run]:
    """Returns a change that scales the noise gate's temperature at the end of its annealing."""

    def change(run: Run) -> Run:
        name = {"autoselect": "temperature_end"}.get(run.method, "polarisation_temperature")
        group = {"autoselect": "autoselect"}.get(run.method, "policy")
        return run.replace({f"{group}.{name}": factor * getattr(getattr(run, group), name)})

    return change


def _loosen_bound(run: Run) -> Run:
    return run.replace({"optimizer.clip": 3 * run.optimizer.clip})


def _switch_text(run: Run) -> Run:
    return run.replace({"text_gate_anneal": 0.0 if run.text_gate_anneal else 0.1})


class Trial(NamedTuple):
    """A change that is tried on every variant alike, so that all have been tuned as much.

    Attributes:
        label: what it changes, for tables.
        change: returns the settings of a variant with the change.
    """

    label: str
    change: Callable[[Run], Run]


# By their names on the command line, after the variant's and "+".
TRIALS = {
    "slow": Trial("learning rates x 1/2", _scale_rates(0.5)),
    "fast": Trial("learning rates x 2", _scale_rates(2.0)),
    "hard": Trial("gate's temperature x 1/2", _scale_temperature(0.5)),
    "soft": Trial("gate's temperature x 2", _scale_temperature(2.0)),
    "loose": Trial("bound of the gradient x 3", _loosen_bound),
    "text": Trial("text gate open or closed at first, the other way", _switch_text),
}


class VariantConfig(NamedTuple):
    """A variant with its configuration.

    Attributes:
        key: name on the command line and of the run's folder.
        method: name in tables.
        config: its configuration.
    """

    key: str
    method: str
    config: Run


def variant_configs(
    config: str, keys: Sequence[str], changes: Sequence[str]
) -> list[VariantConfig]:
    """Loads the configurations of variants, and makes methods of their own known by name."""
    known = {key: (key, None) for key in VARIANTS}
    known |= {f"{key}+{trial}": (key, trial) for key in VARIANTS for trial in TRIALS}
    if not keys or len({*keys}) != len(keys) or any(key not in known for key in keys):
        raise UserError(
            f"--rows is {list(keys)}, expected distinct ones of {', '.join(VARIANTS)}, "
            f"alone or with one of +{', +'.join(TRIALS)}"
        )
    configs = []
    for key in keys:
        name, trial = known[key]
        variant = VARIANTS[name]
        if variant.selector is not None:
            PRUNERS[variant.selector.name] = variant.selector
        path, of_variant = f"{config}{variant.argument}", [*variant.changes]
        if variant.rates != 1:
            optimizer = configurations.load(path, of_variant).optimizer
            of_variant += [
                f"optimizer.{name}={variant.rates * getattr(optimizer, name)}" for name in _RATES
            ]
        loaded = configurations.load(path, [*of_variant, *changes])
        method = variant.method
        if trial is not None:
            loaded = TRIALS[trial].change(loaded)
            method = f"{method}, {TRIALS[trial].label}"
        configs.append(VariantConfig(key, method, loaded))
    return configs
