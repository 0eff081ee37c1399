"""The optimizer of a selector: clipping, AdamW or Muon, and learning rate, as one optax chain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from optax.contrib import MuonDimensionNumbers

from stepprune_jax.parallel.sharding import path_name
from stepprune_jax.selectors import Selector
from stepprune_jax.selectors.base import Weights
from stepprune_jax.settings import Settings, count, number, positive, setting


def _decay(default: float) -> Any:
    """Defines a field for the decay of a moment; below 1, because Adam divides by 1 - decay."""
    return setting(default, "a number from 0, below 1", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings, path="config.optimizer"):
    """The group `optimizer` of a configuration.

    Attributes:
        lr: peak learning rate.
        final_lr: learning rate at the end of the cosine.
        warmup: updates over which the learning rate rises from 0.
        weight_decay: weight decay of AdamW and Muon.
        clip: largest global norm of a group of gradients.
        b1: decay of the first moment.
        b2: decay of the second moment.
        muon_lr: peak learning rate of Muon, for matrices; 0 leaves all weights to AdamW.
    """

    lr: float = positive(1e-3)
    final_lr: float = number(1e-4)
    warmup: int = count(40, minimum=0)
    weight_decay: float = number(1e-4)
    clip: float = positive(1.0)
    b1: float = _decay(0.9)
    b2: float = _decay(0.999)
    muon_lr: float = number(0.015)


def learning_rate(
    settings: OptimizerSettings, num_steps: int, step: Int[Array, ""] | int
) -> Float[Array, ""]:
    """Computes the learning rate of an update: linear warm-up from 0, then a cosine.

    Args:
        settings: settings of the optimizer.
        num_steps: number of updates of the schedule.
        step: number of the update, counted from 0.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.lr, settings.warmup, num_steps, settings.final_lr
    )
    return jnp.asarray(schedule(step), jnp.float32)


def make_optimizer(
    settings: OptimizerSettings, num_steps: int, selector: Selector
) -> optax.GradientTransformationExtraArgs:
    """Builds the optimizer: AdamW, or Muon for matrices and AdamW for other weights.

    `update` of the optimizer takes the number of the update as the keyword `step`. So a skipped
    update, which leaves the optimizer's state unchanged, still advances the learning rate.

    Args:
        settings: settings of the optimizer.
        num_steps: number of updates, for the schedule of the learning rate.
        selector: the selector to train. If `clips_stop_apart`, the gradients of the weights of its
            learned stop are clipped separately.

    Returns:
        The chain of clipping, moments, weight decay and learning rate.
    """
    decay, clip = settings.weight_decay, optax.clip_by_global_norm(settings.clip)
    if selector.clips_stop_apart:

        def label_weights(params):
            is_stop = mark_stop(selector, params)
            return jax.tree.map(lambda stop: "stop" if stop else "others", is_stop)

        # Checkpoints contain these names.
        clip = optax.partition({"stop": clip, "others": clip}, label_weights)
    if not settings.muon_lr:
        adam = optax.scale_by_adam(settings.b1, settings.b2)
        descend = _descend(optax.add_decayed_weights(decay), settings, num_steps)
        return optax.chain(clip, adam, descend)
    muon = optax.contrib.muon(
        settings.muon_lr / settings.lr,
        weight_decay=decay,
        adam_b1=settings.b1,
        adam_b2=settings.b2,
        adam_learning_rate=1.0,
        adam_weight_decay=decay,
        muon_weight_dimension_numbers=_matrix_dimensions,
    )
    return optax.chain(clip, muon, _descend(optax.scale(-1.0), settings, num_steps))


def mark_stop(selector: Selector, params: Weights) -> PyTree:
    """Marks the weights that only the learned stop uses.

    Args:
        selector: the selector.
        params: weights of the selector, or their gradients.

    Returns:
        A tree of booleans with the structure of `params`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: selector.is_stop(path_name(path)), params
    )


def _descend(
    inner: optax.GradientTransformation, settings: OptimizerSettings, num_steps: int
) -> optax.GradientTransformationExtraArgs:
    """Appends multiplication by the negative learning rate to a transformation.

    `optax.scale_by_learning_rate` counts updates in its state, which does not advance at skipped
    updates. This function reads the number of the update from the keyword `step` of `update`.

    Args:
        inner: the transformation before the learning rate.
        settings: settings of the optimizer.
        num_steps: number of updates of the schedule.

    Returns:
        The transformation, with the state of `inner`.
    """

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, state, params)
        rate = learning_rate(settings, num_steps, extra_args["step"])
        return jax.tree.map(lambda leaf: -(rate * leaf).astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _matrix_dimensions(params: Any) -> Any:
    """Selects the weights for Muon: dimension numbers for matrices, None for other weights."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers() if leaf.ndim == 2 else None, params)
