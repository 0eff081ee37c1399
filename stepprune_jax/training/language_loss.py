"""The loss of the frozen language model on visual tokens, a few rows at a time.

The weights are frozen, so the backward pass returns only the gradient of the visual tokens. Loss
and gradient of a few rows are computed together, before the next rows. So the activations of
only a few rows are stored and nothing is computed twice.
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
from stepprune_jax.models.sequence import Clips, Kept
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.policy import Pruned, token_importance

# Arrays of a batch: numpy arrays on the host, jax arrays in a program, shapes in a dry run.
BatchArray = Any


class Targets(NamedTuple):
    """Tokenized conversations, and the tokens of the answers that are supervised.

    Axes: b conversations, l ids, k supervised tokens.

    Attributes:
        ids: ids of the conversation with `IMAGE_TOKEN` in place of the image, right-padded.
        length: number of ids in each row.
        place: index in `ids` of the id before each supervised token; the model predicts the token
            there.
        target: ids of the supervised tokens.
        supervised: True at real targets, False at padding.
        grid: rows and columns of each image's visual tokens. The grid of a video stacks the grids
            of its temporal patches from top to bottom.
        clips: temporal patches of each image or video; None for a batch without videos.
    """

    ids: Int[BatchArray, "b l"]
    length: Int[BatchArray, " b"]
    place: Int[BatchArray, "b k"]
    target: Int[BatchArray, "b k"]
    supervised: Bool[BatchArray, "b k"]
    grid: Int[BatchArray, "b 2"]
    clips: Clips | None = None


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
    """Applies a function to a few rows at a time, and joins the results.

    Args:
        function: maps a tree of arrays with a leading axis of rows to another such tree.
        options: has the number of rows per pass, and the mesh.
        rows: tree of arrays with a leading axis of rows.

    Returns:
        The results for all rows, in the order of `rows`.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    num_passes = num_rows // options.rows if options.rows else 1
    if num_passes <= 1:
        return function(rows)

    def split(x):
        # With n passes, pass i has the rows i, i + n, i + 2 n, ... Rows are sharded contiguously,
        # so each device has a share of the rows of every pass.
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

    The loss is differentiable only with respect to `tokens`.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        tokens: [b, n, w] visual tokens of each image before the projector, possibly gated.
        targets: the conversations.

    Returns:
        Mean cross-entropy in nats over the supervised tokens of the batch.
    """
    num_supervised = jnp.maximum(jnp.sum(targets.supervised), 1)
    return jnp.sum(_row_losses(backbone, options, params, tokens, targets)) / num_supervised


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row_losses(backbone, options, params, tokens, targets):
    """Computes the summed cross-entropy of each row, [b]."""

    def compute(rows):
        tokens, targets = rows
        return _all_token_losses(backbone, options, params, tokens, targets)

    return map_rows(compute, options, (tokens, targets))


def _row_losses_fwd(backbone, options, params, tokens, targets):
    """Computes the losses; the residuals are the gradients of each row's loss by its tokens."""

    def compute(rows):
        tokens, targets = rows
        losses, vjp = jax.vjp(
            lambda tokens: _all_token_losses(backbone, options, params, tokens, targets), tokens
        )
        return losses, vjp(jnp.ones_like(losses))[0]

    return map_rows(compute, options, (tokens, targets))


def _row_losses_bwd(backbone, options, token_grads, loss_grads):
    """Scales the gradients of the tokens; frozen weights and targets have no gradient."""
    return None, token_grads * loss_grads[:, None, None].astype(token_grads.dtype), None


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd)


def _all_token_losses(
    backbone: Backbone,
    options: ForwardOptions,
    params,
    tokens,
    targets: Targets,
    own_answer: bool = False,
) -> Float[Array, " b"]:
    """Computes the losses of `row_scores` for rows that keep all visual tokens."""
    b, n, _ = tokens.shape
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, n))
    num_tokens = jnp.asarray(backbone.num_tokens(targets.grid))
    kept = Pruned(index, tokens, index < num_tokens[:, None], num_tokens)
    losses, _ = row_scores(
        params, backbone, options, kept=kept, targets=targets, own_answer=own_answer
    )
    return losses


def own_answer_importance(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    *,
    tokens: Float[Array, "b n w"],
    mean: Float[Array, "w"],
    targets: Targets,
) -> Float[Array, "b n"]:
    """Computes how much each visual token contributes to the frozen model's own answers.

    At each supervised place, the answer is the token that the model finds most probable. The
    annotated tokens are read only as the text before the place.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        tokens: [b, n, w] visual tokens of each image before the projector.
        mean: [w] mean of the tokens over training images.
        targets: the conversations.

    Returns:
        [b, n] importance of each token, from one backward pass; see `policy.token_importance`.
    """

    def compute(rows):
        tokens, targets = rows

        def losses(tokens):
            return _all_token_losses(backbone, options, params, tokens, targets, own_answer=True)

        return token_importance(losses, tokens, mean)

    return map_rows(compute, options, (tokens, targets))


def row_scores(
    params: Params,
    backbone: Backbone,
    options: ForwardOptions,
    *,
    kept: Pruned,
    targets: Targets,
    positions: str = "original",
    own_answer: bool = False,
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """Computes how well the frozen model predicts answers from the kept visual tokens.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        kept: kept tokens of each row's image, before the projector.
        targets: the conversations.
        positions: position ids of the kept tokens, as in `assembly.assemble`.
        own_answer: whether the model's most probable tokens replace the supervised tokens.

    Returns:
        losses: [b] summed cross-entropy of the supervised tokens of each row, in nats.
        is_correct: [b] True = each supervised token of the row is the most probable token.
    """
    k = kept.tokens.shape[1]
    tokens = backbone.project(params, kept.tokens)
    visual = Kept(kept.index, kept.index, tokens, kept.valid, kept.count)
    sequence = assemble(
        params,
        backbone,
        targets.ids,
        targets.length,
        jax.tree.map(lambda array: array[:, None], visual),  # one image per row
        targets.grid[:, None],
        positions=positions,
        capacity=targets.ids.shape[1] - 1 + k,
        clips=jax.tree.map(lambda array: array[:, None], targets.clips),
    )
    hidden, deep = constrain_rows(options.mesh, (sequence.hidden, sequence.deep))
    sequence = sequence._replace(hidden=hidden, deep=deep)
    layers = (0, backbone.config.text.num_layers)
    language = params["language"]
    stage = decoder.run_layers(
        language, backbone.config.text, sequence.rows, layers, execution=options.execution
    )
    # The head runs only at the slots that predict supervised tokens. The logits of all slots would
    # be the largest array of the update. The kept tokens replace the ids of the image or video, so
    # later ids move by the difference.
    num_marks = jnp.ones_like(kept.count)
    if targets.clips is not None and backbone.MARKS_PATCHES:
        num_marks = jnp.asarray(targets.clips.frames)
    slot = jnp.maximum(targets.place + (kept.count - num_marks)[:, None], 0)
    hidden = jnp.take_along_axis(stage.hidden, slot[..., None], axis=1)
    log_prob = jax.nn.log_softmax(decoder.logits(language, backbone.config.text, hidden), axis=-1)
    most_probable = jnp.argmax(log_prob, axis=-1)
    target = most_probable if own_answer else targets.target
    target_log_prob = jnp.take_along_axis(log_prob, target[..., None], axis=-1)[..., 0]
    losses = -jnp.sum(jnp.where(targets.supervised, target_log_prob, 0), axis=1)
    return losses, jnp.all((most_probable == target) | ~targets.supervised, axis=1)


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

    A pass runs all g subsets of `options.rows` conversations. Without a backward pass, it needs no
    more memory than a pass of `lm_loss`.

    Args:
        params: weights of the frozen model.
        backbone: the frozen model.
        options: how the frozen model is run.
        kept: the subsets; leaves are [b, g, ...].
        targets: the conversations.
        positions: position ids of the kept tokens, as in `assembly.assemble`.

    Returns:
        [b, g] mean cross-entropy in nats over the supervised tokens of each conversation.
    """
    g = kept.count.shape[1]
    num_supervised = jnp.maximum(1, jnp.sum(targets.supervised, axis=1, keepdims=True))

    def compute(rows):
        subsets, targets = rows
        # [rows, g, ...] to [rows * g, ...]: each subset becomes a row of the model.
        subsets = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), subsets)
        targets = jax.tree.map(lambda x: jnp.repeat(x, g, axis=0), targets)
        losses, _ = row_scores(
            params, backbone, options, kept=subsets, targets=targets, positions=positions
        )
        return losses.reshape(-1, g)

    return map_rows(compute, options, (kept, targets)) / num_supervised
