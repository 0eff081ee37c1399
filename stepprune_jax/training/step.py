"""One update of the selector: frozen tower, selection, frozen language model, optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from stepprune_jax.inference.base import CHUNK_PATCHES
from stepprune_jax.inference.programs import join_tokens
from stepprune_jax.models import decoder
from stepprune_jax.models.images import Pixels
from stepprune_jax.models.sequence import split_deep
from stepprune_jax.models.stack import Params
from stepprune_jax.parallel.placement import (
    constrain_replicated,
    constrain_rows,
    place_rows,
    row_count,
)
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.policy import FeatureStats, Inputs, Progress, Pruned, update_stats
from stepprune_jax.selectors import Aux, Policy
from stepprune_jax.selectors.base import Weights, nonzero_tokens
from stepprune_jax.selectors.rloo import SubsetRewards, subset_rewards
from stepprune_jax.training.language_loss import (
    BatchArray,
    Targets,
    answer_losses,
    lm_loss,
    map_rows,
    own_answer_importance,
)
from stepprune_jax.training.objectives import ModelLoss, RlooObjective
from stepprune_jax.training.optimizer import learning_rate, make_optimizer, mark_stop
from stepprune_jax.training.step_config import StepConfig


class TrainingBatch(NamedTuple):
    """Rows of conversations with one image or video each.

    Attributes:
        pixels: images, after the model family's preprocessing.
        text: ids of the user's words, without the answers, right-padded.
        text_length: number of ids in each row of `text`.
        targets: the conversations with their supervised tokens.
        token_of: index of each visual token of a row among the tokens of all temporal patches in
            `pixels`, -1 in the padding; None for a batch without videos, whose `pixels` have one
            image for each row.
    """

    pixels: Pixels
    text: Int[BatchArray, "b t"]
    text_length: Int[BatchArray, " b"]
    targets: Targets
    token_of: Int[BatchArray, "b n"] | None = None


def place_batch(mesh: Mesh | None, batch: TrainingBatch, num_rows: int) -> TrainingBatch:
    """Places a batch on a mesh; see `place_rows`.

    Args:
        mesh: the mesh; None returns the batch unchanged.
        batch: the rows of the batch that this process builds.
        num_rows: number of rows over all processes.
    """
    num_local_patches = jax.tree.leaves(batch.pixels)[0].shape[0]
    num_patches = num_local_patches * num_rows // len(batch.text_length)
    pixels = place_rows(mesh, batch.pixels, num_patches)
    return place_rows(mesh, batch._replace(pixels=None), num_rows)._replace(pixels=pixels)


class State(NamedTuple):
    """State of training.

    Attributes:
        params: weights of the selector.
        optimizer: state of the optimizer.
        method: state of the objective, from `Selector.init_state` and later from `Aux.state`.
        skipped: number of updates skipped because loss or gradient was not finite.
        skipped_in_row: number of consecutive skipped updates up to now.
    """

    params: Weights
    optimizer: optax.OptState
    method: PyTree
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


def _make_optimizer(config: StepConfig) -> optax.GradientTransformationExtraArgs:
    return make_optimizer(config.phase.optimizer, config.phase.num_steps, config.selector)


def init_state(key: Array, config: StepConfig) -> State:
    """Initializes the state of training with random weights.

    Args:
        key: PRNG key; consumed.
        config: static part of the updates.
    """
    params = config.selector.init_params(key)
    optimizer_state = _make_optimizer(config).init(params)
    zero = jnp.zeros((), jnp.int32)
    return State(params, optimizer_state, config.selector.init_state(), zero, zero)


def encode_rows(
    params: Params,
    config: StepConfig,
    pixels: Pixels,
    token_of: Int[Array, "b n"] | None = None,
) -> Float[Array, "b n w"]:
    """Runs the frozen vision tower over images, a few rows at a time.

    Args:
        params: weights of the frozen model.
        config: static part of the update, with the number of rows per pass.
        pixels: preprocessed images, or temporal patches of videos.
        token_of: for a batch with videos, the index of each token of a row among the tokens of all
            temporal patches, -1 in the padding.

    Returns:
        [b, n, w] visual tokens before the projector, with their deep features appended.
    """

    def encode(pixels):
        execution = config.forward.execution
        return config.backbone.encode_image(params, pixels, execution=execution)[0]

    options = config.forward
    if token_of is None:
        return constrain_rows(options.mesh, map_rows(encode, options, pixels))
    chunk = CHUNK_PATCHES * row_count(options.mesh)
    features = map_rows(encode, options._replace(rows=chunk), pixels)
    return constrain_rows(options.mesh, join_tokens(features, token_of))


def selector_inputs(params: Params, config: StepConfig, batch: TrainingBatch) -> Inputs:
    """Computes the inputs of the selector with the frozen model.

    Args:
        params: weights of the frozen model.
        config: static part of the update.
        batch: the rows of the update.

    Returns:
        Image features, word embeddings of the questions, and masks of padding. There is no mask of
        images whose tokens are all real.
    """
    features = encode_rows(params, config, batch.pixels, batch.token_of)
    text = decoder.embed(params["language"], batch.text)
    text_mask = jnp.arange(batch.text.shape[1]) < batch.text_length[:, None]
    image_mask = None
    if config.backbone.config.sizes_vary:
        num_tokens = config.backbone.num_tokens(batch.targets.grid)
        is_real = jnp.arange(features.shape[1]) < num_tokens[:, None]
        image_mask = nonzero_tokens(features, is_real)
    tokens, deep = split_deep(config.backbone.config, features)
    inputs = Inputs(tokens, text, image_mask, text_mask, deep=deep)
    return constrain_rows(config.forward.mesh, inputs)


def _with_stats(inputs: Inputs, stats: FeatureStats) -> Inputs:
    """Adds the feature statistics to the inputs of a selector.

    Args:
        inputs: inputs of the selector.
        stats: statistics of the token features, then of the deep features.
    """
    if inputs.deep is None:
        return inputs._replace(stats=stats)
    token_stats, deep_stats = stats.split(inputs.image.shape[2])
    return inputs._replace(stats=token_stats, deep_stats=deep_stats)


def _stop_gradient_norm(selector: Policy, grads: Weights) -> Float[Array, ""]:
    """Returns the gradient norm of the weights that only the learned stop uses."""
    is_stop = mark_stop(selector, grads)
    return optax.tree.norm(jax.tree.map(lambda leaf, stop: leaf if stop else None, grads, is_stop))


def _make_model_loss(params: Params, config: StepConfig, batch: TrainingBatch) -> ModelLoss:
    """Returns functions that compute losses of the frozen language model on a batch."""
    frozen_model, targets = (params, config.backbone, config.forward), batch.targets

    def of_gated_tokens(tokens):
        return lm_loss(*frozen_model, tokens, targets)

    def of_subsets(kept, positions):
        return answer_losses(*frozen_model, kept=kept, targets=targets, positions=positions)

    def importance(inputs):
        mean = inputs.stats.mean
        if inputs.deep_stats is not None:
            mean = jnp.concatenate([mean, inputs.deep_stats.mean])
        tokens = inputs.with_deepstack
        return own_answer_importance(*frozen_model, tokens=tokens, mean=mean, targets=targets)

    return ModelLoss(of_gated_tokens, of_subsets, importance)


def _update(
    params: Params,
    state: State,
    stats: FeatureStats,
    batch: TrainingBatch,
    *,
    key: Array,
    step: Int[Array, ""],
    config: StepConfig,
) -> tuple[State, dict[str, Array]]:
    """Updates the selector's weights on one batch.

    Args:
        params: weights of the frozen model.
        state: state of training.
        stats: statistics of the features: token features, then deep features.
        batch: the rows of the update.
        key: PRNG key of the phase; `step` is folded in.
        step: number of earlier updates of the phase.
        config: static part of the update.

    Returns:
        The new state, and the metrics of the update.
    """
    inputs = selector_inputs(params, config, batch)
    model_loss = _make_model_loss(params, config, batch)
    return learn(
        state, stats, inputs=inputs, model_loss=model_loss, key=key, step=step, config=config
    )


def learn(
    state: State,
    stats: FeatureStats,
    *,
    inputs: Inputs,
    model_loss: ModelLoss,
    key: Array,
    step: Int[Array, ""],
    config: StepConfig,
) -> tuple[State, dict[str, Array]]:
    """Updates the selector's weights, given the outputs of the frozen tower.

    An update is skipped if its loss or its gradient is not finite: the weights, the optimizer and
    the state of the objective then do not change.

    Args:
        state: state of training.
        stats: statistics of the features: token features, then deep features.
        inputs: inputs of the selector, from `selector_inputs`.
        model_loss: losses of the frozen language model on the batch.
        key: PRNG key of the phase; `step` is folded in.
        step: number of earlier updates of the phase.
        config: static part of the update.

    Returns:
        The new state, and the metrics of the update.
    """
    phase = config.phase
    share = step / phase.num_steps
    text_gate = phase.objective.text_gate(share)
    progress = Progress(share, text_gate, state.method)

    def loss_fn(weights: Weights) -> tuple[Float[Array, ""], Aux]:
        step_key, inputs_with_stats = jax.random.fold_in(key, step), _with_stats(inputs, stats)
        selector = config.selector.replace(params=weights)
        loss, aux = phase.objective.loss(
            selector, step_key, inputs_with_stats, model_loss, progress
        )
        return loss, jax.lax.stop_gradient(aux)

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grad_norm = optax.tree.norm(grads)
    updates, optimizer_state = _make_optimizer(config).update(
        grads, state.optimizer, state.params, step=step
    )
    weights = optax.apply_updates(state.params, updates)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    counters = {
        "skipped": state.skipped + (~is_finite).astype(jnp.int32),
        "skipped_in_row": jnp.where(is_finite, 0, state.skipped_in_row + 1),
    }
    new_state = state._replace(params=weights, optimizer=optimizer_state, method=aux.state)
    new_state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new_state, state)
    new_state = new_state._replace(**counters)
    metrics = {
        "loss": loss,
        **aux.metrics,
        "grad_norm": grad_norm,
        "grad_norm_stop": _stop_gradient_norm(config.selector, grads),
        "text_gate": text_gate,
        "lr": learning_rate(phase.optimizer, phase.num_steps, step),
        **counters,
    }
    # The state stays replicated on all devices. With another sharding, the next update would need
    # another compilation.
    return constrain_replicated(config.forward.mesh, (new_state, metrics))


def _gather_stats(
    params: Params,
    stats: FeatureStats,
    pixels: Pixels,
    num_tokens: Int[Array, " b"],
    config: StepConfig,
) -> FeatureStats:
    """Adds the tokens of a batch of images to feature statistics.

    Args:
        params: weights of the frozen model.
        stats: statistics of earlier batches.
        pixels: preprocessed images.
        num_tokens: [b] number of tokens of each image, without padding; 0 for images that pad the
            batch.
        config: static part of the updates.

    Returns:
        The statistics with the batch.
    """
    features = encode_rows(params, config, pixels)
    is_real = jnp.arange(features.shape[1]) < num_tokens[:, None]
    return update_stats(stats, features, nonzero_tokens(features, is_real))


def _measure_subset_gain(
    params: Params,
    weights: Weights,
    stats: FeatureStats,
    batch: TrainingBatch,
    key: Array,
    *,
    config: StepConfig,
) -> SubsetRewards:
    """Computes the rewards of subsets that the selector samples with its current weights.

    Args:
        params: weights of the frozen model.
        weights: weights of the selector.
        stats: statistics of the features.
        batch: conversations.
        key: PRNG key; consumed.
        config: static part of an update whose objective is an `RlooObjective`.

    Returns:
        The reward of each subset.
    """
    inputs = _with_stats(selector_inputs(params, config, batch), stats)
    selector = config.selector.replace(params=weights)
    objective, model_loss = config.phase.objective, _make_model_loss(params, config, batch)
    assert isinstance(objective, RlooObjective)

    def losses(kept: Pruned) -> Float[Array, "b g"]:
        return model_loss.of_subsets(kept, objective.settings.positions)

    rewards = subset_rewards(selector, objective.settings, key, inputs, losses)
    return constrain_replicated(config.forward.mesh, rewards)


# Untyped, because they have attributes of `jax.jit` such as `trace`.
update: Any = jit_for_weights(_update, ("config",), ("state",))
gather_stats: Any = jit_for_weights(_gather_stats, ("config",))
measure_subset_gain: Any = jit_for_weights(_measure_subset_gain, ("config",))
