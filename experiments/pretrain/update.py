"""One update of a stage: gradients of small pieces of a batch, on all cores, and the optimiser."""

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
    """State of a stage."""

    trained: PyTree
    moments: PyTree


class Recipe(NamedTuple):
    """Static part of a stage's update.

    Attributes:
        backbone: the model.
        steps: updates of the stage.
        lr: peak learning rate.
        micro_batch: rows of a piece of the batch.
        devices: number of devices that share the pieces.
        muon_lr: peak learning rate of Muon for matrices; 0 leaves all to AdamW.
        display: how images are shown to the language model.
    """

    backbone: Backbone
    steps: int
    lr: float
    micro_batch: int
    devices: int
    muon_lr: float = 0.0
    display: Display = Display()


def _matrices(params: PyTree) -> PyTree:
    """Returns which weights are maps between hidden states, in stacks of layers, for Muon."""

    def dimensions(path, leaf):
        kernel = jax.tree_util.keystr(path).endswith("['kernel']") and "head" not in path[-2].key
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if kernel else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Builds AdamW; with `muon_lr`, Muon for hidden matrices, which needs half the steps."""

    def rate(peak):
        warmup = min(50, recipe.steps // 4)
        return optax.warmup_cosine_decay_schedule(0, peak, warmup, recipe.steps, peak / 100)

    options = {"weight_decay": 0.02}
    if recipe.muon_lr:
        chosen = muon(
            rate(recipe.muon_lr),
            adam_learning_rate=rate(recipe.lr),
            adam_b2=0.98,
            adam_weight_decay=0.02,
            muon_weight_dimension_numbers=_matrices,
            **options,
        )
    else:
        chosen = optax.adamw(rate(recipe.lr), b2=0.98, **options)
    return optax.chain(optax.clip_by_global_norm(1.0), chosen)


def _accumulate(
    loss: Callable,
    trained: PyTree,
    frozen: PyTree,
    batch: PyTree,
    key: Array,
    micro_batch: int,
    devices: int,
) -> tuple[PyTree, dict[str, Array]]:
    """Averages gradient and scalars over small pieces of a batch, divided among all devices.

    Pieces that stay in a processor's cache are twice as fast as the whole batch at once, but too
    small for several cores; so every core is a device with its own pieces.
    """
    pieces = jax.tree.leaves(batch)[0].shape[0] // micro_batch
    cut = jax.tree.map(lambda x: x.reshape(pieces, micro_batch, *x.shape[1:]), batch)
    numbers = jnp.arange(pieces)

    def local(trained, frozen, cut, numbers, key):
        def piece(total, inputs):
            part, number = inputs
            value, grads = jax.value_and_grad(loss, has_aux=True)(
                trained, frozen, part, jax.random.fold_in(key, number)
            )
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, trained)
        total, (value, scalars) = jax.lax.scan(piece, zeros, (cut, numbers))
        total = jax.tree.map(lambda g: g / numbers.shape[0], total)
        scalars = jax.tree.map(lambda x: jnp.mean(x, axis=0), {"loss": value, **scalars})
        return jax.lax.pmean((total, scalars), "data")

    specs = (P(), P(), P("data"), P("data"), P())
    split = jax.shard_map(
        local, mesh=_mesh(devices), in_specs=specs, out_specs=P(), check_vma=False
    )
    return split(trained, frozen, cut, numbers, key)


def _mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",), axis_types=(AxisType.Auto,))


def everywhere(tree: PyTree, devices: int) -> PyTree:
    """Copies to the devices that share the work."""
    return jax.device_put(tree, NamedSharding(_mesh(devices), P()))


def start(recipe: Recipe, trained: PyTree) -> State:
    """Returns the state before the first update of some weights."""
    return State(trained, _optimizer(recipe).init(trained))


def _apply(recipe: Recipe, state: State, grads: PyTree) -> State:
    updates, moments = _optimizer(recipe).update(grads, state.moments, state.trained)
    return State(optax.apply_updates(state.trained, updates), moments)


def _tower_update(key, state: State, images: Images, labels, recipe: Recipe):
    """Updates the tower and its heads; the key is unused except for its devices."""

    def loss(trained, _, part, __):
        return tower_loss(trained, recipe.backbone, *part)

    grads, scalars = _accumulate(
        loss, state.trained, (), (images, labels), key, recipe.micro_batch, recipe.devices
    )
    return _apply(recipe, state, grads), scalars


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
    """Updates the weights in `state`; `params` are the other weights, possibly none.

    The key comes first, as it determines the devices.
    """
    labels, tokens = words

    def loss(trained, frozen, part, piece_key):
        images, rows, mentions, labels = part
        params, prefix, tokens = frozen
        named = [Words(labels[name], tokens[name]) for name in sorted(tokens)]
        piece = Exchanges(images, Packed(prefix, *rows), mentions, named)
        return language_loss(trained, params, recipe.backbone, piece_key, piece, recipe.display)

    frozen = (params, packed.prefix, tokens)
    batch = (images, tuple(packed[1:]), mentions, labels)
    grads, scalars = _accumulate(
        loss, state.trained, frozen, batch, key, recipe.micro_batch, recipe.devices
    )
    return _apply(recipe, state, grads), scalars


tower_update = jit_for_weights(_tower_update, ("recipe",), ("state",))
language_update = jit_for_weights(_language_update, ("recipe",), ("state",))
