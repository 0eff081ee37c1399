"""One update of the selector: frozen tower, soft selection, frozen language model, AdamW."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from optax.contrib import MuonDimensionNumbers

from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.parallel import sharding
from stepprune_jax.parallel.placement import constrain_rows, constrain_whole, jit_for_weights
from stepprune_jax.policy import FeatureStats, update_stats
from stepprune_jax.training import selectors
from stepprune_jax.training.language_loss import Reading, Targets, lm_loss, map_rows
from stepprune_jax.training.selectors import Inputs, Progress, Selector


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything static about the step.

    Attributes:
        model: the frozen model.
        selector: what is trained.
        steps: updates of the whole run.
        lr: peak learning rate.
        final_lr: learning rate at the end of the cosine.
        warmup: updates over which it rises from 0.
        weight_decay: of AdamW.
        clip: largest global norm of the gradient.
        b1: decay of the first moment.
        b2: decay of the second moment.
        muon_lr: peak learning rate of Muon for matrices, in place of AdamW; 0 leaves all to AdamW.
        text_gate_anneal: share of all steps over which g_txt rises from 0 to 1; 0: it is 1.
        attention: "matmul", "xla" or "cudnn" in tower and language model.
        remat: whether the backward pass recomputes the language model's blocks.
        frozen_rows: rows that the frozen model runs at a time; 0 for the whole batch.
    """

    model: LlavaConfig
    selector: Selector
    steps: int
    lr: float = 1e-3
    final_lr: float = 1e-4
    warmup: int = 40
    weight_decay: float = 1e-4
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    muon_lr: float = 0.0
    text_gate_anneal: float = 0.1
    attention: str = "matmul"
    remat: bool = False
    frozen_rows: int = 0

    def reading(self, mesh: Mesh | None) -> Reading:
        """How the frozen model is run."""
        return Reading(self.model, self.attention, self.remat, self.frozen_rows, mesh)


class Batch(NamedTuple):
    """Rows of conversations with one image each.

    Attributes:
        pixels: normalised images.
        text: the human words alone, right-padded.
        text_length: of each row.
        targets: the conversations, and what is supervised in them.
    """

    pixels: Float[np.ndarray | Array, "b 3 H W"]
    text: Int[np.ndarray | Array, "b t"]
    text_length: Int[np.ndarray | Array, " b"]
    targets: Targets


class State(NamedTuple):
    """What training changes.

    Attributes:
        params: weights of the selector.
        optimizer: moments of AdamW.
        running_count: running mean of K.
        skipped: updates left out because loss or gradient was not finite.
        skipped_in_row: of these, how many came one after another up to now.
    """

    params: Any
    optimizer: Any
    running_count: Float[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


def _optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW, or Muon for matrices and AdamW for the rest, but for the learning rate of AdamW."""
    clip = optax.clip_by_global_norm(setup.clip)
    if getattr(setup.selector, "stop", None) == "hazard":
        # Of the stop by itself: its gradients reach nothing else, nor shall their size.
        clip = optax.partition({True: clip, False: clip}, _is_stop)
    if not setup.muon_lr:
        adam = optax.scale_by_adam(setup.b1, setup.b2)
        return optax.chain(clip, adam, optax.add_decayed_weights(setup.weight_decay))
    decay = setup.weight_decay
    muon = optax.contrib.muon(
        setup.muon_lr / setup.lr, weight_decay=decay, adam_b1=setup.b1, adam_b2=setup.b2,
        adam_learning_rate=1.0, adam_weight_decay=decay, muon_weight_dimension_numbers=_matrices,
    )  # fmt: skip
    return optax.chain(clip, muon, optax.scale(-1.0))


def _matrices(params: Any) -> Any:
    """Which weights are maps between hidden states: those that Muon turns."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers() if leaf.ndim == 2 else None, params)


def learning_rate(setup: Setup, step: Int[Array, ""] | int) -> Float[Array, ""]:
    """The learning rate of update `step`: linear from 0 over the warm-up, then a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, setup.lr, setup.warmup, setup.steps, setup.final_lr
    )
    return jnp.asarray(schedule(step), jnp.float32)


def init_state(key: Array, setup: Setup) -> State:
    """The state before the first update; `key` is consumed."""
    params = selectors.init(key, setup.selector)
    moments = _optimizer(setup).init(params)
    none = jnp.zeros((), jnp.int32)
    return State(params, moments, jnp.zeros(()), none, none)


def encode_rows(
    params: dict[str, Any], setup: Setup, pixels: Float[Array, "b 3 H W"], mesh: Mesh | None
) -> Float[Array, "b n d"]:
    """Features of images, as many at a time as the frozen model may run."""

    def encode(pixels):
        return vlm.encode_image(params, setup.model, pixels, attention=setup.attention)[0]

    return constrain_rows(mesh, map_rows(encode, setup.reading(mesh), pixels))


def selector_inputs(
    params: dict[str, Any], setup: Setup, batch: Batch, mesh: Mesh | None = None
) -> Inputs:
    """Features and question of a batch, from the frozen model.

    Args:
        params: the frozen model's weights.
        setup: the static part.
        batch: the batch.
        mesh: what rows are split over.

    Returns:
        What the selector sees: nothing of it depends on an answer.
    """
    features = encode_rows(params, setup, batch.pixels, mesh)
    text = vlm.embed_text(params, setup.model, batch.text)
    mask = jnp.arange(batch.text.shape[1]) < batch.text_length[:, None]
    return Inputs(*constrain_rows(mesh, (features, text, mask)))


def _is_stop(params: Any) -> Any:
    """Which weights are the stop's own: the stop slot, and a hazard's layer."""

    def named(path, _):
        name = sharding.path_name(path)
        return "stop" in name or "hazard" in name

    return jax.tree_util.tree_map_with_path(named, params)


def _norm_at_stop(grads: Any) -> Float[Array, ""]:
    """Norm of the gradient of the stop's own weights."""
    stop = jax.tree.map(lambda leaf, own: leaf if own else None, grads, _is_stop(grads))
    return optax.tree.norm(stop)


def _update(
    params: dict[str, Any],
    state: State,
    stats: FeatureStats,
    batch: Batch,
    key: Array,
    step: Int[Array, ""],
    setup: Setup,
    mesh: Mesh | None,
) -> tuple[State, dict[str, Array]]:
    """Update number `step`, counted from 0; the new state, and scalars of the old one."""
    inputs = selector_inputs(params, setup, batch, mesh)

    def loss(tokens):
        return lm_loss(params, setup.reading(mesh), tokens, batch.targets)

    return learn(state, stats, inputs, loss, key, step, setup, mesh)


def learn(
    state: State,
    stats: FeatureStats,
    inputs: Inputs,
    lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
    key: Array,
    step: Int[Array, ""],
    setup: Setup,
    mesh: Mesh | None = None,
) -> tuple[State, dict[str, Array]]:
    """The selector's part of an update: everything but the frozen model.

    Args:
        state: before it.
        stats: of the tower's features.
        inputs: what the selector sees.
        lm_loss_fn: maps gated tokens to the mean language-modelling loss.
        key: of the run.
        step: number of the update, from 0.
        setup: the static part.
        mesh: what rows are split over.

    Returns:
        The new state, and scalars of the old one.
    """
    share = step / setup.steps
    opening = setup.text_gate_anneal
    text_gate = jnp.minimum(1.0, share / opening) if opening else jnp.ones(())
    progress = Progress(share, text_gate, state.running_count)

    def loss(trained):
        seen = {}

        def of_tokens(tokens):
            seen["lm_loss"] = lm_loss_fn(tokens)
            return seen["lm_loss"]

        value, found = selectors.train_loss(
            trained, setup.selector, jax.random.fold_in(key, step), inputs, of_tokens, progress,
            stats,
        )  # fmt: skip
        return value, found | seen

    (value, found), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    norm, lr = optax.tree.norm(grads), learning_rate(setup, step)
    directions, moments = _optimizer(setup).update(grads, state.optimizer, state.params)
    trained = jax.tree.map(lambda p, d: p - (lr * d).astype(p.dtype), state.params, directions)
    good = jnp.isfinite(value) & jnp.isfinite(norm)
    new = (trained, moments, found["running_count"])
    kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, tuple(state[:3]))
    skipped = {
        "skipped": state.skipped + (~good).astype(jnp.int32),
        "skipped_in_row": jnp.where(good, 0, state.skipped_in_row + 1),
    }
    scalars = {"loss": value, "lm_loss": found["lm_loss"], **found["metrics"], "grad_norm": norm}
    scalars |= {"grad_norm_stop": _norm_at_stop(grads), "text_gate": text_gate, "lr": lr}
    # Whole on each device, as it came: else the next update would be another program.
    return constrain_whole(mesh, (State(*kept, **skipped), scalars | skipped))


def _gather_stats(
    params: dict[str, Any],
    stats: FeatureStats,
    pixels: Float[Array, "b 3 H W"],
    real: Bool[Array, " b"],
    setup: Setup,
    mesh: Mesh | None,
) -> FeatureStats:
    """Statistics of features, extended by a batch of images of which only the `real` ones count."""
    features = encode_rows(params, setup, pixels, mesh)
    return update_stats(stats, features, jnp.broadcast_to(real[:, None], features.shape[:2]))


update = jit_for_weights(_update, ("setup", "mesh"), ("state",))
gather_stats = jit_for_weights(_gather_stats, ("setup", "mesh"))
