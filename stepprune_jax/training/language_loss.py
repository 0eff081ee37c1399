"""The loss of the frozen language model on gated tokens, a few rows at a time.

The model is frozen, so its backward pass only has to return the gradient with respect to each row's
tokens. Value and gradient of a few rows are computed together before those of the next rows: only a
few rows are stored, nothing is computed twice, and on a CPU the data stay in the cache.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from stepprune_jax.models import decoder
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.sequence import Kept
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.policy import Pruned


class Targets(NamedTuple):
    """Conversations as the language model reads them, and their supervised tokens.

    Attributes:
        ids: the conversation with `IMAGE_TOKEN` at the image, right-padded.
        length: number of ids of each row.
        place: index of the id before each supervised token, where it is predicted.
        target: the supervised tokens.
        supervised: True at real targets.
        grid: rows and columns of each image's visual tokens.
    """

    ids: Int[np.ndarray | Array, "b l"]
    length: Int[np.ndarray | Array, " b"]
    place: Int[np.ndarray | Array, "b k"]
    target: Int[np.ndarray | Array, "b k"]
    supervised: Bool[np.ndarray | Array, "b k"]
    grid: Int[np.ndarray | Array, "b 2"]


class ForwardOptions(NamedTuple):
    """How the frozen model is run; static.

    Attributes:
        execution: how its layers are run.
        rows: rows per pass; 0 for all at once.
        mesh: mesh over which rows are split.
    """

    execution: Execution = Execution()
    rows: int = 0
    mesh: Mesh | None = None


def map_rows(function: Callable[[PyTree], PyTree], options: ForwardOptions, rows: PyTree) -> PyTree:
    """Applies a function of rows to a few rows at a time."""
    count = jax.tree.leaves(rows)[0].shape[0]
    parts = count // options.rows if options.rows else 1
    if parts <= 1:
        return function(rows)

    def split(x):
        # Every device keeps a share of each part: rows i, i + parts, i + 2 parts, ... are a part.
        return x.reshape(count // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(count, *x.shape[2:])

    def part(rows):
        return function(constrain_rows(options.mesh, rows))

    return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, rows)))


def lm_loss(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    tokens: Float[Array, "b n w"],
    targets: Targets,
) -> Float[Array, ""]:
    """Computes the language-modelling loss of visual tokens at full length and original positions.

    Differentiable with respect to the tokens alone.
    """
    count = jnp.maximum(jnp.sum(targets.supervised), 1)
    return jnp.sum(_row_losses(backbone, options, params, tokens, targets)) / count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row_losses(backbone, options, params, tokens, targets):
    """Sums the cross-entropy of each row, [b]."""

    def part(rows):
        tokens, targets = rows
        return _whole_rows(backbone, options, params, tokens, targets)

    return map_rows(part, options, (tokens, targets))


def _row_losses_fwd(backbone, options, params, tokens, targets):
    """Returns the losses, and the gradient of each row's loss with respect to its tokens."""

    def part(rows):
        tokens, targets = rows
        losses, pull = jax.vjp(lambda t: _whole_rows(backbone, options, params, t, targets), tokens)
        return losses, pull(jnp.ones_like(losses))[0]

    return map_rows(part, options, (tokens, targets))


def _row_losses_bwd(backbone, options, slopes, weight):
    """Returns the gradient of the tokens; frozen weights and targets have none."""
    return None, slopes * weight[:, None, None].astype(slopes.dtype), None


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd)


def _whole_rows(
    backbone: Backbone, options: ForwardOptions, params, tokens, targets: Targets
) -> Float[Array, " b"]:
    """Computes the losses of `row_scores` for rows with all N tokens."""
    b, n, _ = tokens.shape
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, n))
    count = backbone.num_tokens(targets.grid)
    pruned = Pruned(index, tokens, index < count[:, None], count)
    return row_scores(params, backbone, options, pruned, targets)[0]


def row_scores(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    kept: Pruned,
    targets: Targets,
    positions: str = "original",
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """Computes the cross-entropy of conversations with some of their visual tokens.

    Also whether every target is the most probable token at its place. Position ids are those of
    `assembly.assemble`.
    """
    k = kept.tokens.shape[1]
    tokens = backbone.project(params, kept.tokens)
    visual = Kept(kept.index, kept.index, tokens, kept.valid, kept.count)
    sequence = assemble(
        params,
        backbone,
        targets.ids,
        targets.length,
        jax.tree.map(lambda part: part[:, None], visual),
        targets.grid[:, None],
        positions=positions,
        capacity=targets.ids.shape[1] - 1 + k,
    )
    hidden, deep = constrain_rows(options.mesh, (sequence.hidden, sequence.deep))
    sequence = sequence._replace(hidden=hidden, deep=deep)
    span = (0, backbone.config.text.num_layers)
    language = params["language"]
    stage = decoder.run_layers(
        language, backbone.config.text, sequence.rows, span, execution=options.execution
    )
    # The head runs at the supervised places only: on the whole sequence it would be the largest
    # array of the step.
    place = jnp.maximum(targets.place + kept.count[:, None] - 1, 0)
    hidden = jnp.take_along_axis(stage.hidden, place[..., None], axis=1)
    log_prob = jax.nn.log_softmax(decoder.logits(language, backbone.config.text, hidden), axis=-1)
    target_log_prob = jnp.take_along_axis(log_prob, targets.target[..., None], axis=-1)[..., 0]
    right = jnp.argmax(log_prob, axis=-1) == targets.target
    losses = -jnp.sum(jnp.where(targets.supervised, target_log_prob, 0), axis=1)
    return losses, jnp.all(right | ~targets.supervised, axis=1)


def answer_losses(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    kept: Pruned,
    targets: Targets,
    positions: str = "original",
) -> Float[Array, "b g"]:
    """Computes the mean cross-entropy of each conversation's targets from g sets of its tokens.

    The leaves of `kept` are [b, g, ...]. Without a backward pass, all sets of `options.rows`
    conversations fit where a gated one does.
    """
    g = kept.count.shape[1]
    count = jnp.maximum(1, jnp.sum(targets.supervised, axis=1, keepdims=True))

    def part(rows):
        sets, of = rows
        sets = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sets)
        of = jax.tree.map(lambda x: jnp.repeat(x, g, axis=0), of)
        losses, _ = row_scores(params, backbone, options, sets, of, positions)
        return losses.reshape(-1, g)

    return map_rows(part, options, (kept, targets)) / count
