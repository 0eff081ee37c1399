"""The loss of the frozen language model on visual tokens, a few rows at a time.

The weights are frozen, so the backward pass returns the gradient of each row's tokens only. Value
and gradient of a few rows are computed together, before the next rows. So only a few rows are
stored, nothing is computed twice, and on a CPU the data stay in the cache.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from stepprune_jax.models import decoder
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.sequence import Kept
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.policy import Pruned

# Arrays of a batch: numpy arrays on the host, jax arrays in a program, shapes in a dry run.
BatchArray = Any


class Targets(NamedTuple):
    """Conversations as the language model reads them, and their supervised tokens.

    Attributes:
        ids: ids of the conversation with `IMAGE_TOKEN` in place of the image, right-padded.
        length: number of ids in each row.
        place: index of the id before each supervised token, where the token is predicted.
        target: ids of the supervised tokens.
        supervised: True at real targets, False at padding.
        grid: rows and columns of each image's visual tokens.
    """

    ids: Int[BatchArray, "b l"]
    length: Int[BatchArray, " b"]
    place: Int[BatchArray, "b k"]
    target: Int[BatchArray, "b k"]
    supervised: Bool[BatchArray, "b k"]
    grid: Int[BatchArray, "b 2"]


class ForwardOptions(NamedTuple):
    """Options of running the frozen model. Static, because compiled programs depend on them.

    Attributes:
        execution: how the layers are run.
        rows: rows per pass; 0 runs all rows in one pass.
        mesh: mesh that rows are split over; None for a single device.
    """

    execution: Execution = Execution()
    rows: int = 0
    mesh: Mesh | None = None


def map_rows(function: Callable[[PyTree], PyTree], options: ForwardOptions, rows: PyTree) -> PyTree:
    """Applies a function of rows to `options.rows` rows at a time, and joins the results."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    num_passes = num_rows // options.rows if options.rows else 1
    if num_passes <= 1:
        return function(rows)

    def split(x):
        # Every device keeps a share of each pass. With n passes, rows i, i + n, i + 2 n, ... are
        # the rows of pass i.
        return x.reshape(num_rows // num_passes, num_passes, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(num_rows, *x.shape[2:])

    def run_pass(rows):
        return function(constrain_rows(options.mesh, rows))

    return jax.tree.map(join, jax.lax.map(run_pass, jax.tree.map(split, rows)))


def lm_loss(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    tokens: Float[Array, "b n w"],
    targets: Targets,
) -> Float[Array, ""]:
    """Computes the mean loss of the supervised tokens, given all visual tokens of each image.

    The visual tokens keep their positions. The loss is differentiable with respect to `tokens`
    only.
    """
    count = jnp.maximum(jnp.sum(targets.supervised), 1)
    return jnp.sum(_row_losses(backbone, options, params, tokens, targets)) / count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row_losses(backbone, options, params, tokens, targets):
    """Computes the summed cross-entropy of each row, [b]."""

    def compute(rows):
        tokens, targets = rows
        return _all_token_losses(backbone, options, params, tokens, targets)

    return map_rows(compute, options, (tokens, targets))


def _row_losses_fwd(backbone, options, params, tokens, targets):
    """Returns the losses, and the gradient of each row's loss with respect to the row's tokens."""

    def compute(rows):
        tokens, targets = rows
        losses, vjp = jax.vjp(
            lambda tokens: _all_token_losses(backbone, options, params, tokens, targets), tokens
        )
        return losses, vjp(jnp.ones_like(losses))[0]

    return map_rows(compute, options, (tokens, targets))


def _row_losses_bwd(backbone, options, token_grads, loss_grads):
    """Returns the gradient of the tokens. Frozen weights and targets have no gradient."""
    return None, token_grads * loss_grads[:, None, None].astype(token_grads.dtype), None


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd)


def _all_token_losses(
    backbone: Backbone, options: ForwardOptions, params, tokens, targets: Targets
) -> Float[Array, " b"]:
    """Computes the losses of `row_scores` for rows with all visual tokens."""
    b, n, _ = tokens.shape
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, n))
    count = jnp.asarray(backbone.num_tokens(targets.grid))
    kept = Pruned(index, tokens, index < count[:, None], count)
    return row_scores(params, backbone, options, kept=kept, targets=targets)[0]


def row_scores(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    *,
    kept: Pruned,
    targets: Targets,
    positions: str = "original",
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """Computes how well the model predicts conversations with kept visual tokens.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        kept: kept tokens of each row's image, before the projector.
        targets: the conversations.
        positions: position ids of the kept tokens, as in `assembly.assemble`.

    Returns:
        The summed cross-entropy of each row in nats, and whether every supervised token of the row
        is the most probable token at its place.
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
    layers = (0, backbone.config.text.num_layers)
    language = params["language"]
    stage = decoder.run_layers(
        language, backbone.config.text, sequence.rows, layers, execution=options.execution
    )
    # The head runs only at the supervised places. On all places its result would be the largest
    # array of the update.
    place = jnp.maximum(targets.place + kept.count[:, None] - 1, 0)
    hidden = jnp.take_along_axis(stage.hidden, place[..., None], axis=1)
    log_prob = jax.nn.log_softmax(decoder.logits(language, backbone.config.text, hidden), axis=-1)
    target_log_prob = jnp.take_along_axis(log_prob, targets.target[..., None], axis=-1)[..., 0]
    is_right = jnp.argmax(log_prob, axis=-1) == targets.target
    losses = -jnp.sum(jnp.where(targets.supervised, target_log_prob, 0), axis=1)
    return losses, jnp.all(is_right | ~targets.supervised, axis=1)


def answer_losses(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    *,
    kept: Pruned,
    targets: Targets,
    positions: str = "original",
) -> Float[Array, "b g"]:
    """Computes the mean loss of each conversation's answer, given each of g subsets of tokens.

    There is no backward pass. So all subsets of `options.rows` conversations need no more memory
    than `lm_loss` needs for `options.rows` conversations.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        kept: the subsets; leaves are [b, g, ...].
        targets: the conversations.
        positions: position ids of the kept tokens, as in `vlm.assemble`.
    """
    g = kept.count.shape[1]
    count = jnp.maximum(1, jnp.sum(targets.supervised, axis=1, keepdims=True))

    def compute(rows):
        subsets, targets = rows
        subsets = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), subsets)
        targets = jax.tree.map(lambda x: jnp.repeat(x, g, axis=0), targets)
        losses, _ = row_scores(
            params, backbone, options, kept=subsets, targets=targets, positions=positions
        )
        return losses.reshape(-1, g)

    return map_rows(compute, options, (kept, targets)) / count
