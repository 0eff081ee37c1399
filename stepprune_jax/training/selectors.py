"""The selectors that can be trained, StepPrune and a one-shot baseline, behind one interface."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from stepprune_jax import policy
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.parallel.sharding import path_name
from stepprune_jax.policy import FeatureStats, Inputs, PolicyConfig, Progress
from stepprune_jax.pruning import autoselect
from stepprune_jax.pruning.autoselect import AutoSelectConfig
from stepprune_jax.user_input import nearest

Selector = PolicyConfig | AutoSelectConfig

# Groups of gradients by their names in checkpoints, indexed by whether they are the stop's.
ORDER, STOP = "False", "True"

# Configuration class and group of the configuration of each method.
METHODS = {
    "stepprune": (PolicyConfig, "policy"),
    "autoselect": (AutoSelectConfig, "autoselect"),
}


def build(method: str, fields: Mapping[str, Any], model: ModelConfig) -> Selector:
    """Builds the configuration of the selector to be trained, its widths taken from the model.

    Args:
        method: a name of `METHODS`.
        fields: its group of the run's configuration; "text" is whether it reads the question.
        model: the frozen model.

    Returns:
        A `PolicyConfig` or an `AutoSelectConfig`.

    Raises:
        ValueError: an unknown field, or a value that the class rejects.
    """
    kind, group = METHODS[method]
    widths = {"feature_width", "text_width"}
    known = {field.name for field in dataclasses.fields(kind)} - widths | {"text"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"config.{group} has unknown field(s) {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))} (the widths of features and text are the model's)."
            f"{nearest(unknown[0], known)}"
        )
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    if model.sizes_vary and values.get("max_steps") is not None:
        raise ValueError(
            f"config.{group}.max_steps is {values['max_steps']!r}, expected None, half of each "
            "image's tokens: images of this model differ in their number"
        )
    text = values.pop("text", True)
    if not isinstance(text, bool):
        raise ValueError(f"config.{group}.text is {text!r}, expected True or False")
    budgets = values.get("random_budget", (0, 1))
    if len(budgets) != 2 or not all(isinstance(share, float | int) for share in budgets):
        raise ValueError(f"config.{group}.random_budget is {budgets!r}, expected two shares")
    text_width = model.text.hidden_size if text else 0
    return kind(feature_width=model.feature_width, text_width=text_width, **values)


def gradient_groups(selector: Selector) -> tuple[str, ...]:
    """Returns the groups of weights whose gradients are clipped separately.

    A hazard's gradients reach only its own weights, and their size must not affect the others.
    """
    apart = isinstance(selector, PolicyConfig) and selector.stop == "hazard"
    return (ORDER, STOP) if apart else (ORDER,)


def label_gradients(selector: Selector, params: Any) -> Any:
    """Labels each weight with its group of `gradient_groups`."""
    apart = STOP in gradient_groups(selector)
    return jax.tree.map(lambda own: STOP if own and apart else ORDER, stop_weights(params))


def stop_weights(params: Any) -> Any:
    """Marks the weights of the stop itself: the stop slot, and a hazard's layer."""

    def named(path, _):
        name = path_name(path)
        return "stop" in name or "hazard" in name

    return jax.tree_util.tree_map_with_path(named, params)


def init(key: Array, selector: Selector) -> dict[str, Any]:
    """Draws the trainable weights; `key` is consumed."""
    if isinstance(selector, PolicyConfig):
        return policy.init_policy(key, selector)
    return autoselect.init(key, selector)


def train_loss(
    params: dict[str, Any],
    selector: Selector,
    key: Array,
    inputs: Inputs,
    lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
    progress: Progress,
    stats: FeatureStats,
) -> tuple[Float[Array, ""], dict[str, Any]]:
    """Computes the loss of one batch.

    Args:
        params: the selector's weights; differentiate with respect to these alone.
        selector: its configuration.
        key: PRNG key; consumed.
        inputs: inputs of the selector.
        lm_loss_fn: maps gated tokens to the mean language-modelling loss.
        progress: schedules of the training so far.
        stats: statistics of the tower's features.

    Returns:
        The loss, and {"running_count": scalar, "metrics": scalars by name}.
    """
    inputs = inputs._replace(stats=stats)
    if isinstance(selector, PolicyConfig):
        loss, found = policy.train_loss(
            params, selector, key, inputs, lm_loss_fn, progress=progress
        )
        metrics, running_count = policy.policy_metrics(found), found.gated.running_count
    else:
        loss, gated = autoselect.train_loss(
            params, selector, key, inputs, lm_loss_fn, progress=progress
        )
        metrics = {"lm_loss": loss} | autoselect.metrics(gated, inputs.image_mask)
        running_count = progress.running_count
    return loss, jax.lax.stop_gradient({"metrics": metrics, "running_count": running_count})
