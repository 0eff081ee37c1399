"""Prefill and decoding of the language model, for any model family.

Pure functions of (params, config, arrays): `config` is static under `jax.jit`, and the frozen
weights are an argument, never a closure. The language model of all families is `models.decoder`;
its shape is `config.text` and its weights are `params["language"]`. Rows come from
`assembly.assemble`, and may lose visual tokens again at cuts between layers.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.decoder import Cache, OutputSpec
from stepprune_jax.models.int8 import keep_as
from stepprune_jax.models.sequence import (
    Rows,
    Sequence,
    compress,
    kept_slots,
    last_slots,
    renumber,
    with_probe,
)
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.policy.jax_settings import jax_defaults


class Cut(NamedTuple):
    """A place between layers where visual tokens are dropped.

    Attributes:
        layer: number of layers before the cut, at least 1.
        slots: static length of the rows after the cut.
        drop: maps the rows before the cut and the taps by name to the rows, whose visual tokens may
            have been merged, and to the mask of slots that remain. Text must remain.
        taps: intermediates of the stage before the cut that `drop` reads; see `OutputSpec`.
        rows: number of queries of "attention" taps: the last tokens of each row, at `last_slots`.
        renumber: whether the remaining tokens get the position ids 0, 1, 2, ...
        forgets: whether the caches of all layers before the cut lose the dropped tokens. Then all
            earlier cuts must have `forgets`.
        probe: [layers, e] vectors of a token that only the stage before the cut has, at the end of
            each row. One vector is added to the residual stream of the token before each layer. The
            token is then the query of "attention" and "scores" taps.
    """

    layer: int
    slots: int
    drop: Callable[[Sequence, dict[str, Array]], tuple[Sequence, Bool[Array, "b s"]]]
    taps: tuple[Tap, ...] = ()
    rows: int = 1
    renumber: bool = False
    forgets: bool = False
    probe: Float[Array, "layers e"] | None = None


class PausedPrefill(NamedTuple):
    """A prefill at a cut, before the tokens are dropped.

    Attributes:
        sequence: the rows at the cut.
        keep: [b, s] True = token that remains.
        cache: keys and values of the layers before the cut.
    """

    sequence: Sequence
    keep: Bool[Array, "b s"]
    cache: Cache


class Prefill(NamedTuple):
    """Result of `prefill`.

    Attributes:
        logits: float32, [b, v] at each row's last token, or [b, s, v] if all were requested.
        cache: keys and values of all layers, with room for new tokens; with cuts, a tuple with the
            cache of each stage.
        cuts: the rows after each cut.
    """

    logits: Float[Array, "b *s v"]
    cache: Cache | tuple[Cache, ...]
    cuts: tuple[Sequence, ...] = ()


def init_params(key: Array, backbone: Backbone, dtype: DTypeLike = jnp.float32) -> Params:
    """Initializes random weights of a model.

    Args:
        key: PRNG key; consumed.
        backbone: the model.
        dtype: dtype of every leaf.

    Returns:
        A plain nested dict; kernels are [in, out], weights of layers are stacked along a leading
        axis.
    """
    params = backbone.init_params(key)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@jax_defaults()
def abstract_params(
    backbone: Backbone, dtype: DTypeLike = jnp.bfloat16, weights: str = "full"
) -> Params:
    """Returns the tree of `init_params` as `jax.ShapeDtypeStruct`s, without allocating arrays.

    Args:
        backbone: the model.
        dtype: dtype of every leaf.
        weights: "full", or "int8" for the language model's matrices, see `models.int8`.

    Returns:
        The tree.
    """
    full = jax.eval_shape(lambda: init_params(jax.random.key(0), backbone, dtype))
    return keep_as(weights, full)


def prefill_to_cut(
    params: Params,
    config: ModelConfig,
    sequence: Sequence,
    cut: Cut,
    *,
    first_layer: int = 0,
    room: int = 0,
    execution: Execution = Execution(),
) -> PausedPrefill:
    """Runs the language model from a layer to a cut, and selects the tokens that remain.

    Args:
        params: the model's weights.
        config: the model's shape.
        sequence: the rows before `first_layer`.
        cut: the cut.
        first_layer: the first layer to run.
        room: free slots of the cache for new tokens. A cut with `forgets` gets none here, because
            its caches are rebuilt after the tokens are dropped.
        execution: how the layers are run.

    Returns:
        The rows at the cut.

    Raises:
        ValueError: taps that the stage before the cut does not have.
    """
    rows, queries = sequence.rows, last_slots(sequence, cut.rows)
    if cut.probe is not None:
        rows, queries = with_probe(sequence, cut.probe), sequence.length[:, None]
    spec = OutputSpec(rows.hidden.shape[1] + room * (not cut.forgets), cut.taps, queries)
    stage = decoder.run_layers(
        params["language"], config.text, rows, (first_layer, cut.layer), None, spec, execution
    )
    assert stage.cache is not None  # requested through `OutputSpec`
    cache = stage.cache._replace(length=sequence.length, next_position=sequence.next_position)
    hidden = stage.hidden[:, : sequence.hidden.shape[1]]
    sequence, keep = cut.drop(sequence._replace(hidden=hidden), stage.taps)
    return PausedPrefill(sequence, keep, cache)


def _drop_from_caches(
    caches: Ordered[Cache], paused: PausedPrefill, num_slots: int, room: int
) -> list[Cache]:
    """Returns caches of the remaining tokens, with `room` free slots for new tokens."""
    source, is_filled = kept_slots(paused.sequence, paused.keep, num_slots)

    def gather(part: Array) -> Array:
        part = jnp.take_along_axis(part, source[:, None, :, None][None], axis=3)
        return jnp.pad(part, [(0, room if axis == 3 else 0) for axis in range(5)])

    length = is_filled.sum(1, dtype=jnp.int32)
    return [
        cache._replace(key=gather(cache.key), value=gather(cache.value), length=length)
        for cache in caches
    ]


def prefill(
    params: Params,
    config: ModelConfig,
    sequence: Sequence,
    max_new_tokens: int,
    cuts: Ordered[Cut] = (),
    *,
    all_logits: bool = False,
    execution: Execution = Execution(),
    paused: PausedPrefill | None = None,
) -> Prefill:
    """Runs the language model over rows and fills a cache.

    Args:
        params: the model's weights.
        config: the model's shape.
        sequence: the rows before the first layer, from `assembly.assemble`.
        max_new_tokens: free slots of the cache for new tokens. Tokens beyond them are not seen by
            later tokens.
        cuts: places between layers where tokens are dropped, in ascending order of layers. Each
            stage between two cuts has its own row length and its own cache. The caller checks that
            the model has these layers.
        all_logits: whether to return the logits of all slots, not only of each row's last token.
        execution: how the layers are run.
        paused: result of `prefill_to_cut` for `sequence` and the first cut, which is then not run
            again.

    Returns:
        A `Prefill`.

    Raises:
        ValueError: taps that the stage before a cut does not have.
    """
    caches, after_cuts, first_layer = [], [], 0
    language, text = params["language"], config.text

    for cut in cuts:
        if paused is None:
            paused = prefill_to_cut(
                params,
                config,
                sequence,
                cut,
                first_layer=first_layer,
                room=max_new_tokens,
                execution=execution,
            )
        caches.append(paused.cache)
        if cut.forgets:
            caches = _drop_from_caches(caches, paused, cut.slots, max_new_tokens)
        sequence = compress(paused.sequence, paused.keep, cut.slots)
        sequence = renumber(sequence) if cut.renumber else sequence
        after_cuts.append(sequence)
        first_layer, paused = cut.layer, None
    spec = OutputSpec(sequence.hidden.shape[1] + max_new_tokens)
    span = first_layer, text.num_layers
    stage = decoder.run_layers(language, text, sequence.rows, span, None, spec, execution)
    assert stage.cache is not None  # requested through `OutputSpec`
    caches.append(stage.cache._replace(next_position=sequence.next_position))
    hidden = stage.hidden
    if not all_logits:
        last = jnp.maximum(sequence.length - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    cache = tuple(caches) if cuts else caches[0]
    return Prefill(decoder.logits(language, text, hidden), cache, tuple(after_cuts))


def decode_step(
    params: Params,
    config: ModelConfig,
    token: Int[Array, "b"],
    cache: Cache | tuple[Cache, ...],
    execution: Execution = Execution(),
) -> tuple[Float[Array, "b v"], Cache | tuple[Cache, ...]]:
    """Runs one token per row and returns the logits of the next token.

    Args:
        params: the model's weights.
        config: the model's shape.
        token: [b] ids.
        cache: the cache of all layers, or a tuple of caches of consecutive stages, whose rows may
            differ in length. Donate it under jit: it is extended in place.
        execution: how the layers are run.

    Returns:
        [b, v] float32 logits, and the extended cache: one cache or a tuple, as given.
    """
    stages = (cache,) if isinstance(cache, Cache) else tuple(cache)
    language = params["language"]
    hidden = decoder.embed(language, token[:, None])
    b, p = token.shape[0], config.position_axes
    valid = jnp.ones(hidden.shape[:2], bool)
    extended, first_layer = [], 0
    for stage in stages:
        span = first_layer, first_layer + stage.key.shape[0]
        position = jnp.broadcast_to(stage.next_position[:, None, None], (b, p, 1))
        rows = Rows(hidden, position, valid)
        hidden, stage, _ = decoder.run_layers(
            language, config.text, rows, span, stage, execution=execution
        )
        extended.append(stage)
        first_layer = span[1]
    result = extended[0] if isinstance(cache, Cache) else tuple(extended)
    return decoder.logits(language, config.text, hidden[:, 0]), result
