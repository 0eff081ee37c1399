"""Prefill and decoding of the language model, for any model family.

Pure functions of (params, config, arrays): `config` is static under `jax.jit`, and the frozen
weights are an argument, never a closure. The language model of all families is `models.decoder`;
its shape is `config.text` and its weights are `params["language"]`. `assembly.assemble`
builds the rows. A pruner may drop more visual tokens at cuts between layers.
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
        taps: intermediate arrays of the stage before the cut that `drop` reads; see `OutputSpec`.
        rows: number of queries of "attention" taps: the last tokens of each row, at `last_slots`.
        renumber: whether the remaining tokens get the position ids 0, 1, 2, ...
        prunes_cache: whether the dropped tokens are also removed from the caches of all layers
            before the cut. If True, all earlier cuts must have `prunes_cache`.
        probe: [layers, e] vectors of one more token at the end of each row, which only the stage
            before the cut reads. Each layer first adds its vector to the hidden state of this
            token. The token is the query of "attention" and "scores" taps.
    """

    layer: int
    slots: int
    drop: Callable[[Sequence, dict[str, Array]], tuple[Sequence, Bool[Array, "b s"]]]
    taps: tuple[Tap, ...] = ()
    rows: int = 1
    renumber: bool = False
    prunes_cache: bool = False
    probe: Float[Array, "layers e"] | None = None


class PausedPrefill(NamedTuple):
    """State of a prefill that stopped at a cut, before the tokens are dropped.

    `prefill_to_cut` creates it, and `prefill` continues from it.

    Attributes:
        sequence: the rows at the cut, with all tokens.
        keep: [b, s] True = token that remains after the cut.
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
        A nested dict. Kernels are [in, out]; the weights of all layers are stacked along a leading
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
        A nested dict with the shape and dtype of each weight.
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
        cut: the place between layers to stop at, and the function that selects the tokens.
        first_layer: number of the first layer to run.
        room: number of free cache slots for new tokens. If `cut.prunes_cache`, the cache has no
            free slots, because `prefill` rebuilds the cache after the tokens are dropped.
        execution: how the layers are run.

    Returns:
        The rows at the cut, the mask of the remaining tokens, and the cache.

    Raises:
        ValueError: taps that the stage before the cut does not have.
    """
    rows, queries = sequence.rows, last_slots(sequence, cut.rows)
    if cut.probe is not None:
        rows, queries = with_probe(sequence, cut.probe), sequence.length[:, None]
    capacity = rows.hidden.shape[1] + (0 if cut.prunes_cache else room)
    spec = OutputSpec(capacity, cut.taps, queries)
    stage = decoder.run_layers(
        params["language"], config.text, rows, (first_layer, cut.layer), None, spec, execution
    )
    assert stage.cache is not None  # requested through `OutputSpec`
    cache = stage.cache._replace(length=sequence.length, next_position=sequence.next_position)
    hidden = stage.hidden[:, : sequence.hidden.shape[1]]  # without the slot of a probe
    sequence, keep = cut.drop(sequence._replace(hidden=hidden), stage.taps)
    return PausedPrefill(sequence, keep, cache)


def _drop_from_caches(
    caches: Ordered[Cache], paused: PausedPrefill, num_slots: int, room: int
) -> list[Cache]:
    """Removes the tokens that a cut drops from the caches of earlier layers.

    Args:
        caches: caches of the stages before the cut.
        paused: rows at the cut, with the mask of the remaining tokens.
        num_slots: number of slots for the remaining tokens.
        room: number of free slots for new tokens.

    Returns:
        The caches of the remaining tokens, with num_slots + room slots.
    """
    source, is_filled = kept_slots(paused.sequence, paused.keep, num_slots)

    def gather(vectors: Array) -> Array:
        # [layers, b, h_kv, slots, c]: the slots of the cache are axis 3.
        vectors = jnp.take_along_axis(vectors, source[None, :, None, :, None], axis=3)
        return jnp.pad(vectors, [(0, room if axis == 3 else 0) for axis in range(5)])

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
        max_new_tokens: number of free cache slots for new tokens. The cache does not store
            further tokens, so later tokens cannot attend to them.
        cuts: places between layers where tokens are dropped, in ascending order of layers. A stage
            is the span of layers between two cuts. Each stage has a separate row length and cache.
            The caller checks that the model has these layers.
        all_logits: whether to return the logits of all slots, not only of each row's last token.
        execution: how the layers are run.
        paused: result of `prefill_to_cut` for the first cut, to continue from there. None runs all
            layers.

    Returns:
        The logits, the cache or caches, and the rows after each cut.

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
        if cut.prunes_cache:
            caches = _drop_from_caches(caches, paused, cut.slots, max_new_tokens)
        sequence = compress(paused.sequence, paused.keep, cut.slots)
        sequence = renumber(sequence) if cut.renumber else sequence
        after_cuts.append(sequence)
        first_layer, paused = cut.layer, None
    spec = OutputSpec(sequence.hidden.shape[1] + max_new_tokens)
    last_span = first_layer, text.num_layers
    stage = decoder.run_layers(language, text, sequence.rows, last_span, None, spec, execution)
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
    """Runs the language model on one new token per row.

    Args:
        params: the model's weights.
        config: the model's shape.
        token: [b] ids of the new tokens.
        cache: the cache of all layers, or a tuple with the cache of each stage of consecutive
            layers; the row lengths of stages may differ. Donate the cache under jit, so that it is
            extended in place.
        execution: how the layers are run.

    Returns:
        [b, v] float32 logits of the next token, and the extended cache in the form of `cache`.
    """
    stage_caches = (cache,) if isinstance(cache, Cache) else tuple(cache)
    language = params["language"]
    hidden = decoder.embed(language, token[:, None])
    b, p = token.shape[0], config.position_axes
    valid = jnp.ones(hidden.shape[:2], bool)
    extended_caches, first_layer = [], 0
    for stage_cache in stage_caches:
        span = first_layer, first_layer + stage_cache.key.shape[0]
        position = jnp.broadcast_to(stage_cache.next_position[:, None, None], (b, p, 1))
        rows = Rows(hidden, position, valid)
        hidden, extended_cache, _ = decoder.run_layers(
            language, config.text, rows, span, stage_cache, execution=execution
        )
        extended_caches.append(extended_cache)
        first_layer = span[1]
    extended = extended_caches[0] if isinstance(cache, Cache) else tuple(extended_caches)
    return decoder.logits(language, config.text, hidden[:, 0]), extended
