"""The optimiser of a trained method: clipping, AdamW or Muon, and learning rate, as one chain."""

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
    """A field that holds the decay of a moment: at 1 its correction would divide by 0."""
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
        muon_lr: peak learning rate of Muon, used for matrices instead of AdamW; 0 for AdamW only.
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
    settings: OptimizerSettings, steps: int, step: Int[Array, ""] | int
) -> Float[Array, ""]:
    """Returns the learning rate of update `step`: linear from 0 over the warm-up, then a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.lr, settings.warmup, steps, settings.final_lr
    )
    return jnp.asarray(schedule(step), jnp.float32)


def make_optimizer(
    settings: OptimizerSettings, steps: int, method: Selector
) -> optax.GradientTransformationExtraArgs:
    """Builds the optimiser: AdamW, or Muon for matrices and AdamW for the rest.

    Its `update` takes the number of the update as `step`, because skipped updates count for the
    schedule, but leave the optimiser's state unchanged.
    """
    decay, clip = settings.weight_decay, optax.clip_by_global_norm(settings.clip)
    if method.clips_stop_apart:

        def label(params):
            own = mark_stop(method, params)
            return jax.tree.map(lambda stop: "stop" if stop else "others", own)

        clip = optax.partition({"stop": clip, "others": clip}, label)
    if not settings.muon_lr:
        adam = optax.scale_by_adam(settings.b1, settings.b2)
        return optax.chain(clip, adam, _descend(optax.add_decayed_weights(decay), settings, steps))
    muon = optax.contrib.muon(
        settings.muon_lr / settings.lr,
        weight_decay=decay,
        adam_b1=settings.b1,
        adam_b2=settings.b2,
        adam_learning_rate=1.0,
        adam_weight_decay=decay,
        muon_weight_dimension_numbers=_matrices,
    )
    return optax.chain(clip, muon, _descend(optax.scale(-1.0), settings, steps))


def mark_stop(method: Selector, params: Weights) -> PyTree:
    """Marks the weights of the stop itself with True."""
    return jax.tree_util.tree_map_with_path(lambda path, _: method.is_stop(path_name(path)), params)


def _descend(
    inner: optax.GradientTransformation, settings: OptimizerSettings, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Scales the result of `inner` by minus the learning rate of update `step`.

    The state is that of `inner`: an own count of updates would not advance at skipped ones.
    """

    def update(updates, state, params=None, *, step, **_):
        updates, state = inner.update(updates, state, params)
        rate = learning_rate(settings, steps, step)
        return jax.tree.map(lambda u: -(rate * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _matrices(params: Weights) -> PyTree:
    """Returns dimensions of the weights that map hidden states to hidden states, for Muon."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers() if leaf.ndim == 2 else None, params)
