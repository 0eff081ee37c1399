"""The loss of the frozen language model on gated tokens, a few rows at a time.

The model is frozen, so all that its backward pass has to give is the gradient of each row's own
tokens. Value and gradient of a few rows are computed together, and only then those of the next:
what is stored is that of a few rows, nothing is computed twice, and on a CPU it stays in the cache.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.policy import Pruned


class Targets(NamedTuple):
    """Conversations as the language model reads them, and what it should say.

    Attributes:
        ids: the conversation with `IMAGE_TOKEN` at the image, right-padded.
        length: ids of each row.
        place: where, in the expanded sequence, each supervised token is predicted.
        target: the supervised tokens.
        supervised: True at real targets.
    """

    ids: Int[np.ndarray | Array, "b l"]
    length: Int[np.ndarray | Array, " b"]
    place: Int[np.ndarray | Array, "b k"]
    target: Int[np.ndarray | Array, "b k"]
    supervised: Bool[np.ndarray | Array, "b k"]


class Reading(NamedTuple):
    """How the frozen model is run; static.

    Attributes:
        model: its configuration.
        attention: "matmul", "xla" or "cudnn".
        remat: whether the backward pass recomputes blocks.
        rows: rows at a time; 0 for all at once.
        mesh: what rows are split over.
    """

    model: LlavaConfig
    attention: str = "matmul"
    remat: bool = False
    rows: int = 0
    mesh: Mesh | None = None


def map_rows(function: Callable[[Any], Any], reading: Reading, rows: Any) -> Any:
    """Applies a function of rows to a few rows at a time.

    Args:
        function: maps a tree of arrays [r, ...] to a tree of arrays [r, ...].
        reading: says how many rows at a time.
        rows: tree of arrays [b, ...]; b is a multiple of `reading.rows`.

    Returns:
        The results [b, ...] in the order of the rows.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    parts = count // reading.rows if reading.rows else 1
    if parts <= 1:
        return function(rows)

    def split(x):
        # Every device keeps a share of each part: rows i, i + parts, i + 2 parts, ... are one.
        return x.reshape(count // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(count, *x.shape[2:])

    def part(rows):
        return function(constrain_rows(reading.mesh, rows))

    return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, rows)))


def lm_loss(
    params: dict[str, Any], reading: Reading, tokens: Float[Array, "b n d"], targets: Targets
) -> Float[Array, ""]:
    """Language-modelling loss of visual tokens at full length and original positions.

    Differentiable with respect to the tokens alone.

    Args:
        params: the frozen model's weights.
        reading: how it is run.
        tokens: all N gated tokens of each image, in the tower's space.
        targets: conversations and what is supervised.

    Returns:
        Cross-entropy in nats, float32, averaged over the supervised tokens of the batch.
    """
    count = jnp.maximum(jnp.sum(targets.supervised), 1)
    return jnp.sum(_row_losses(reading, params, tokens, targets)) / count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(reading, params, tokens, targets):
    """Summed cross-entropy of each row, [b]."""
    return map_rows(
        lambda rows: _read(reading, params, *rows), reading, (tokens, Targets(*targets))
    )


def _losses_and_slopes(reading, params, tokens, targets):
    """The losses, and the gradient of each row's loss in its own tokens."""

    def part(rows):
        tokens, targets = rows
        losses, pull = jax.vjp(lambda t: _read(reading, params, t, targets), tokens)
        return losses, pull(jnp.ones_like(losses))[0]

    return map_rows(part, reading, (tokens, Targets(*targets)))


def _slopes_times(reading, slopes, weight):
    """Gradient of the tokens; the frozen weights and the targets have none."""
    return None, slopes * weight[:, None, None].astype(slopes.dtype), None


_row_losses.defvjp(_losses_and_slopes, _slopes_times)


def _read(reading: Reading, params, tokens, targets: Targets) -> Float[Array, " b"]:
    """Runs projector and language model over whole rows; summed cross-entropy of each."""
    b, n, _ = tokens.shape
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, n))
    return row_losses(params, reading, Pruned(index, tokens, index >= 0, index[:, 0] + n), targets)


def row_losses(
    params: dict[str, Any], reading: Reading, kept: Pruned, targets: Targets
) -> Float[Array, " b"]:
    """Cross-entropy of conversations of which the model sees some visual tokens alone.

    Args:
        params: the frozen model's weights.
        reading: how it is run; all rows at once.
        kept: visual tokens of each row, in the tower's space; read at their original positions.
        targets: conversations and what is supervised. `place` is counted as if as many visual
            tokens were there as `kept` has room for.

    Returns:
        In nats, float32, summed over each row's supervised tokens.
    """
    config, k = reading.model, kept.tokens.shape[1]
    grid = jnp.broadcast_to(jnp.array(config.grid, jnp.int32), (len(kept.index), 2))
    tokens = vlm.project(params, config, kept.tokens)
    visual = vlm.Visual(tokens, kept.valid, kept.index, kept.index, grid)
    sequence = vlm.assemble(
        params, config, targets.ids, targets.length,
        jax.tree.map(lambda part: part[:, None], visual),
        capacity=targets.ids.shape[1] - 1 + k,
    )  # fmt: skip
    embeddings = constrain_rows(reading.mesh, sequence.hidden)
    valid = jnp.arange(embeddings.shape[1]) < sequence.length[:, None]
    hidden = vlm.run_layers(
        params, config, embeddings, sequence.position, valid, 0, config.text.num_layers,
        attention=reading.attention, remat=reading.remat,
    ).hidden  # fmt: skip
    # The head runs at the supervised places only: on the whole sequence it would be the largest
    # array of the step.
    place = jnp.maximum(targets.place - (k - kept.count)[:, None], 0)
    hidden = jnp.take_along_axis(hidden, place[..., None], axis=1)
    log_prob = jax.nn.log_softmax(vlm.logits(params, config, hidden), axis=-1)
    found = jnp.take_along_axis(log_prob, targets.target[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(targets.supervised, found, 0), axis=1)
