"""Variants of training: the default, its ablations and baselines, as configurations."""

from collections.abc import Sequence
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from stepprune_jax import configurations
from stepprune_jax.evaluation.names import DEFAULT


class Variant(NamedTuple):
    """A variant of training a policy.

    Attributes:
        method: name in tables.
        argument: argument of the configuration file.
        changes: changes to the configuration, each "field=value".
    """

    method: str
    argument: str = ""
    changes: tuple[str, ...] = ()


# By their names on the command line.
VARIANTS = {
    "default": Variant(DEFAULT),
    "literal": Variant("StepPrune literal", ":literal"),
    # With the opening of the text gate that serves it better: docs/experiments.md.
    "autoselect": Variant("AutoSelect-like", changes=("method=autoselect", "text_gate_anneal=0.1")),
    "causal": Variant("causal encoder", changes=("policy.encoder_attention=causal",)),
    "last": Variant("last step's score", changes=("policy.aggregation=last",)),
    "uniform": Variant("uniform score", changes=("policy.aggregation=uniform",)),
    "alive": Variant("undiscounted score", changes=("policy.aggregation=alive",)),
    "blind": Variant("no question", changes=("policy.text=False",)),
    "two_layers": Variant("two decoder layers", changes=("policy.decoder_layers=2",)),
    "group2": Variant("2 tokens a step", changes=("policy.group=2",)),
    "group4": Variant("4 tokens a step", changes=("policy.group=4",)),
    "group8": Variant("8 tokens a step", changes=("policy.group=8",)),
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
    config: ConfigDict


def load_config(path: str, changes: Sequence[str] = ()) -> ConfigDict:
    """Loads a configuration file like a command's `--config`.

    Args:
        path: path or name of the configuration; an argument may follow a colon.
        changes: changes, each "field=value", as in `--config.field=value`.

    Returns:
        The configuration.

    Raises:
        FileNotFoundError: no such file or name.
        ValueError: a change to an unknown field, or of another type.
    """
    path = configurations.find(path)
    for change in changes:
        if "=" not in change:
            raise ValueError(f"--set {change!r}: expected FIELD=VALUE")
    arguments = ["", f"--config={path}", *(f"--config.{change}" for change in changes)]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", flag_values=values, sys_argv=arguments, lock_config=False
    )
    try:
        values(arguments)
    except flags.Error as error:
        raise ValueError(str(error).replace("flag --config.", "--set ")) from error
    except AttributeError as error:
        raise ValueError(f"--set: the configuration has no field {error}") from error
    return values["config"].value


def variant_configs(
    config: str, keys: Sequence[str], changes: Sequence[str]
) -> list[VariantConfig]:
    """Loads the configurations of variants.

    Args:
        config: name or path of the default configuration.
        keys: names of `VARIANTS`.
        changes: changes to each of them, as in `load_config`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an unknown or repeated variant, or a bad change.
    """
    unknown = [key for key in keys if key not in VARIANTS]
    if unknown or not keys or len({*keys}) != len(keys):
        raise ValueError(f"--rows is {list(keys)}, expected distinct ones of {', '.join(VARIANTS)}")
    configs = []
    for key in keys:
        variant = VARIANTS[key]
        loaded = load_config(f"{config}{variant.argument}", [*variant.changes, *changes])
        configs.append(VariantConfig(key, variant.method, loaded))
    return configs
