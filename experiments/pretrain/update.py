"""One update of a stage: the gradient, in small pieces on all cores, and the optimizer."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree
from optax.contrib import MuonDimensionNumbers, muon

from experiments.pretrain.images import Images
from experiments.pretrain.language import Display, Exchanges, Words, language_loss
from experiments.pretrain.mentions import PlacedMentions
from experiments.pretrain.packing import Packed
from experiments.pretrain.tower import tower_loss
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.parallel.programs import jit_for_weights


class State(NamedTuple):
    """State of a stage: the trained weights, and the state of the optimizer."""

    trained: PyTree
    moments: PyTree


class Recipe(NamedTuple):
    """The static arguments of a stage's update.

    Attributes:
        backbone: the model.
        steps: number of updates of the stage.
        lr: peak learning rate of AdamW.
        micro_batch: rows of a piece of the batch.
        devices: number of devices that share the pieces.
        muon_lr: peak learning rate of Muon for matrices; 0 trains all weights with AdamW.
        display: how the language model sees images.
    """

    backbone: Backbone
    steps: int
    lr: float
    micro_batch: int
    devices: int
    muon_lr: float = 0.0
    display: Display = Display()


def _matrices(params: PyTree) -> PyTree:
    """Returns the dimensions of kernels between hidden states, which Muon trains, or None."""

    def dimensions(path, leaf):
        kernel = jax.tree_util.keystr(path).endswith("['kernel']") and "head" not in path[-2].key
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if kernel else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Builds AdamW, or Muon for matrices and AdamW for all other weights.

    Muon needs half the number of updates.
    """

    def rate(peak):
        warmup = min(50, recipe.steps // 4)
        return optax.warmup_cosine_decay_schedule(0, peak, warmup, recipe.steps, peak / 100)

    options = {"weight_decay": 0.02}
    if recipe.muon_lr:
        optimizer = muon(
            rate(recipe.muon_lr),
            adam_learning_rate=rate(recipe.lr),
            adam_b2=0.98,
            adam_weight_decay=0.02,
            muon_weight_dimension_numbers=_matrices,
            **options,
        )
    else:
        optimizer = optax.adamw(rate(recipe.lr), b2=0.98, **options)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def average_gradients(
    loss: Callable,
    trained: PyTree,
    frozen: PyTree,
    batch: PyTree,
    key: Array,
    micro_batch: int,
    devices: int,
) -> tuple[PyTree, dict[str, Array]]:
    """Averages gradient and scalars over small pieces of a batch, on several devices.

    A piece that fits into a processor's cache is twice as fast as a large batch, but too small for
    several cores. Therefore each core is a device that computes some of the pieces.

    Args:
        loss: (trained, frozen, piece, key) -> loss, scalars.
        trained: weights of the gradient.
        frozen: other arguments of the loss.
        batch: arrays with a leading axis of rows.
        key: random key.
        micro_batch: rows of a piece.
        devices: number of devices.
    """
    num_pieces = jax.tree.leaves(batch)[0].shape[0] // micro_batch
    pieces = jax.tree.map(lambda x: x.reshape(num_pieces, micro_batch, *x.shape[1:]), batch)
    numbers = jnp.arange(num_pieces)

    def device_mean(trained, frozen, pieces, numbers, key):
        def add_piece(total, inputs):
            piece, number = inputs
            value, grads = jax.value_and_grad(loss, has_aux=True)(
                trained, frozen, piece, jax.random.fold_in(key, number)
            )
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, trained)
        total, (value, scalars) = jax.lax.scan(add_piece, zeros, (pieces, numbers))
        total = jax.tree.map(lambda g: g / numbers.shape[0], total)
        scalars = jax.tree.map(lambda x: jnp.mean(x, axis=0), {"loss": value, **scalars})
        return jax.lax.pmean((total, scalars), "data")

    specs = (P(), P(), P("data"), P("data"), P())
    mean = jax.shard_map(
        device_mean, mesh=_mesh(devices), in_specs=specs, out_specs=P(), check_vma=False
    )
    return mean(trained, frozen, pieces, numbers, key)


def _mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",), axis_types=(AxisType.Auto,))


def replicate(tree: PyTree, devices: int) -> PyTree:
    """Copies arrays to all devices of the stage."""
    return jax.device_put(tree, NamedSharding(_mesh(devices), P()))


def init_state(recipe: Recipe, trained: PyTree) -> State:
    """Returns the state before the first update."""
    return State(trained, _optimizer(recipe).init(trained))


def apply_gradients(recipe: Recipe, state: State, grads: PyTree) -> State:
    """Returns the state after an update with these gradients."""
    updates, moments = _optimizer(recipe).update(grads, state.moments, state.trained)
    return State(optax.apply_updates(state.trained, updates), moments)


def _tower_update(key, state: State, images: Images, labels, recipe: Recipe):
    """Updates the tower and its heads. The key only determines the devices."""

    def loss(trained, _, piece, __):
        return tower_loss(trained, recipe.backbone, *piece)

    grads, scalars = average_gradients(
        loss, state.trained, (), (images, labels), key, recipe.micro_batch, recipe.devices
    )
    return apply_gradients(recipe, state, grads), scalars


def _language_update(
    key,
    state: State,
    params,
    images: Images,
    packed: Packed,
    mentions: PlacedMentions | None,
    words,
    recipe: Recipe,
):
    """Updates the weights in `state`. `params` are the frozen weights.

    The key is the first argument because it determines the devices.
    """
    labels, tokens = words

    def loss(trained, frozen, piece, piece_key):
        images, rows, mentions, labels = piece
        params, prefix, tokens = frozen
        words = [Words(labels[name], tokens[name]) for name in sorted(tokens)]
        exchanges = Exchanges(images, Packed(prefix, *rows), mentions, words)
        display = recipe.display
        return language_loss(trained, params, recipe.backbone, piece_key, exchanges, display)

    frozen = (params, packed.prefix, tokens)
    batch = (images, tuple(packed[1:]), mentions, labels)
    grads, scalars = average_gradients(
        loss, state.trained, frozen, batch, key, recipe.micro_batch, recipe.devices
    )
    return apply_gradients(recipe, state, grads), scalars


tower_update = jit_for_weights(_tower_update, ("recipe",), ("state",))
language_update = jit_for_weights(_language_update, ("recipe",), ("state",))
