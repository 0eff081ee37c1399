"""One update of the selector: frozen tower, soft selection, frozen language model, optimiser."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from stepprune_jax.models import decoder
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels
from stepprune_jax.models.sequence import split_deep
from stepprune_jax.models.stack import Params
from stepprune_jax.parallel.placement import constrain_replicated, constrain_rows
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.policy import FeatureStats, Inputs, Progress, Pruned, update_stats
from stepprune_jax.selectors import RlooSettings, Selector, rloo_loss
from stepprune_jax.selectors.base import Weights, nonzero_tokens
from stepprune_jax.selectors.rloo import SubsetRewards, subset_rewards
from stepprune_jax.training.language_loss import (
    ForwardOptions,
    Targets,
    answer_losses,
    lm_loss,
    map_rows,
)
from stepprune_jax.training.optimizer import (
    OptimizerSettings,
    learning_rate,
    make_optimizer,
    mark_stop,
)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything static about an update.

    Attributes:
        backbone: the frozen model.
        method: the method that is trained, without weights.
        steps: updates of the phase.
        optimizer: settings of the optimiser.
        text_gate_anneal: share of the steps over which g_txt rises from 0 to 1; 0 for a constant 1.
        forward: how the frozen model is run.
        policy_gradient: settings of the objective of sampled sets.
        weights: how the frozen model's matrices are kept, see `models.int8`.
    """

    backbone: Backbone
    method: Selector
    steps: int
    optimizer: OptimizerSettings
    text_gate_anneal: float
    forward: ForwardOptions
    policy_gradient: RlooSettings = RlooSettings()
    weights: str = "full"


class TrainingBatch(NamedTuple):
    """Rows of conversations with one image each.

    Attributes:
        pixels: images, after the family's preprocessing.
        text: the human words alone, right-padded.
        text_length: length of each row of text.
        targets: the conversations with their supervised tokens.
    """

    pixels: Pixels
    text: Int[np.ndarray | Array, "b t"]
    text_length: Int[np.ndarray | Array, " b"]
    targets: Targets


class State(NamedTuple):
    """State of training.

    Attributes:
        params: weights of the selector.
        optimizer: moments of AdamW.
        method: what the method carries from batch to batch, as of `Selector.init_state`.
        skipped: updates skipped because loss or gradient was not finite.
        skipped_in_row: length of the current run of skipped updates.
    """

    params: Weights
    optimizer: optax.OptState
    method: PyTree
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


def _optimizer(setup: StepConfig) -> optax.GradientTransformationExtraArgs:
    return make_optimizer(setup.optimizer, setup.steps, setup.method)


def init_state(key: Array, setup: StepConfig) -> State:
    """Draws the state before the first update; `key` is consumed."""
    params = setup.method.init_params(key)
    moments = _optimizer(setup).init(params)
    none = jnp.zeros((), jnp.int32)
    return State(params, moments, setup.method.init_state(), none, none)


def encode_rows(params: Params, setup: StepConfig, pixels: Pixels) -> Float[Array, "b n w"]:
    """Computes features of images, in passes of at most `forward.rows` rows."""

    def encode(pixels):
        execution = setup.forward.execution
        return setup.backbone.encode_image(params, pixels, execution=execution)[0]

    return constrain_rows(setup.forward.mesh, map_rows(encode, setup.forward, pixels))


def selector_inputs(params: Params, setup: StepConfig, batch: TrainingBatch) -> Inputs:
    """Computes features and question embeddings of a batch with the frozen model."""
    features = encode_rows(params, setup, batch.pixels)
    text = decoder.embed(params["language"], batch.text)
    mask = jnp.arange(batch.text.shape[1]) < batch.text_length[:, None]
    image_mask = None
    if setup.backbone.config.sizes_vary:
        count = setup.backbone.num_tokens(batch.targets.grid)
        image_mask = nonzero_tokens(features, jnp.arange(features.shape[1]) < count[:, None])
    tokens, deep = split_deep(setup.backbone.config, features)
    inputs = Inputs(tokens, text, image_mask, mask, deep=deep)
    return constrain_rows(setup.forward.mesh, inputs)


def _standardised(inputs: Inputs, stats: FeatureStats) -> Inputs:
    """Adds the statistics of the tokens with their deep features, where there are any."""
    if inputs.deep is None:
        return inputs._replace(stats=stats)
    own, deep = stats.split(inputs.image.shape[2])
    return inputs._replace(stats=own, deep_stats=deep)


def _norm_at_stop(method: Selector, grads: Weights) -> Float[Array, ""]:
    """Returns the norm of the gradient of the stop's own weights."""
    own = mark_stop(method, grads)
    stop = jax.tree.map(lambda leaf, own: leaf if own else None, grads, own)
    return optax.tree.norm(stop)


def _update(
    params: Params,
    state: State,
    stats: FeatureStats,
    batch: TrainingBatch,
    key: Array,
    step: Int[Array, ""],
    setup: StepConfig,
) -> tuple[State, dict[str, Array]]:
    """Performs update number `step`, from 0; returns the new state, and scalars of the old one."""
    inputs = selector_inputs(params, setup, batch)

    def gated_loss(tokens):
        return lm_loss(params, setup.backbone, setup.forward, tokens, batch.targets)

    sampled = setup.policy_gradient.samples
    loss = _set_losses(params, setup, batch) if sampled else gated_loss
    return learn(state, stats, inputs, loss, key, step, setup)


def _set_losses(
    params: Params, setup: StepConfig, batch: TrainingBatch
) -> Callable[[Pruned], Float[Array, "b g"]]:
    """Returns the function from sets of kept tokens to the mean loss of each answer."""

    def losses(kept):
        positions = setup.policy_gradient.positions
        return answer_losses(params, setup.backbone, setup.forward, kept, batch.targets, positions)

    return losses


def learn(
    state: State,
    stats: FeatureStats,
    inputs: Inputs,
    loss_fn: Callable[..., Array],
    key: Array,
    step: Int[Array, ""],
    setup: StepConfig,
) -> tuple[State, dict[str, Array]]:
    """Performs the selector's part of an update: everything but the frozen model.

    `loss_fn` is that of `Selector.loss` or of `rloo_loss`; the statistics are those of
    the tokens with their deep features.
    """
    share = step / setup.steps
    opening = setup.text_gate_anneal
    text_gate = jnp.minimum(1.0, share / opening) if opening else jnp.ones(())
    progress = Progress(share, text_gate, state.method)

    def loss(trained):
        draw_key, seen = jax.random.fold_in(key, step), _standardised(inputs, stats)
        method, sampled = setup.method.replace(params=trained), setup.policy_gradient
        if sampled.samples:
            value, aux = rloo_loss(method, sampled, draw_key, seen, loss_fn, progress=progress)
        else:
            value, aux = method.loss(draw_key, seen, loss_fn, progress)
        return value, jax.lax.stop_gradient(aux)

    (value, (metrics, carried)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    norm = optax.tree.norm(grads)
    updates, moments = _optimizer(setup).update(grads, state.optimizer, state.params, step=step)
    trained = optax.apply_updates(state.params, updates)
    good = jnp.isfinite(value) & jnp.isfinite(norm)
    skipped = {
        "skipped": state.skipped + (~good).astype(jnp.int32),
        "skipped_in_row": jnp.where(good, 0, state.skipped_in_row + 1),
    }
    new = state._replace(params=trained, optimizer=moments, method=carried)
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)._replace(**skipped)
    lr = learning_rate(setup.optimizer, setup.steps, step)
    scalars = {"loss": value, **metrics, "grad_norm": norm}
    scalars |= {"grad_norm_stop": _norm_at_stop(setup.method, grads)}
    scalars |= {"text_gate": text_gate, "lr": lr}
    # Replicated on each device as before; otherwise the next update would be another program.
    return constrain_replicated(setup.forward.mesh, (new, scalars | skipped))


def _gather_stats(
    params: Params,
    stats: FeatureStats,
    pixels: Pixels,
    tokens: Int[Array, " b"],
    setup: StepConfig,
) -> FeatureStats:
    """Extends feature statistics by a batch of images, each with `tokens` real tokens."""
    features = encode_rows(params, setup, pixels)
    real = nonzero_tokens(features, jnp.arange(features.shape[1]) < tokens[:, None])
    return update_stats(stats, features, real)


def _try_sets(
    params: Params,
    trained: Weights,
    stats: FeatureStats,
    batch: TrainingBatch,
    key: Array,
    setup: StepConfig,
) -> SubsetRewards:
    """Computes what sets of the policy as it is are worth on a batch; `key` is consumed."""
    inputs = _standardised(selector_inputs(params, setup, batch), stats)
    method, losses = setup.method.replace(params=trained), _set_losses(params, setup, batch)
    rewards = subset_rewards(method, setup.policy_gradient, key, inputs, losses)
    return constrain_replicated(setup.forward.mesh, rewards)


update = jit_for_weights(_update, ("setup",), ("state",))
gather_stats = jit_for_weights(_gather_stats, ("setup",))
measure_subset_gain = jit_for_weights(_try_sets, ("setup",))
