"""Sequences of text and visual tokens, for any model family: assemble, prefill, decode.

Everything is a pure function of (params, config, arrays); `config` is static under `jax.jit` and
the frozen weights are an argument, never a closure. Where images matter, the backbone stands in
place of its `config` (see `models.backbone`); the language model of all families is
`models.decoder`, its shape `config.text` and its weights `params["language"]`. Sequences may hold
any pruned visual tokens, and may be pruned again between layers: rows differ in length, and padding
is at the right end only and never changes a result.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.decoder import Cache, OutputSpec
from stepprune_jax.models.int8 import keep_as
from stepprune_jax.models.sequence import (
    POSITIONS,
    Rows,
    Sequence,
    compress,
    last_slots,
    remaining,
    renumber,
    split_deep,
    with_probe,
)
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.policy.jax_settings import jax_defaults
from stepprune_jax.user_input import expect


class Visual(NamedTuple):
    """The visual tokens of a batch, image by image, as they enter the language model.

    Attributes:
        tokens: [b, j, k, w] projected tokens of each row's images in order of their sentinels, each
            with its deep features behind it.
        valid: [b, j, k] True = token; a prefix of each image.
        index: [b, j, k] int32 index of each token among its image's n; -1 for merged and added
            tokens.
        place: [b, j, k] int32 index of the image token whose position ids each one has.
        grid: [b, j, 2] int32 rows and columns of each unpruned image.
        note: [b, j, k, w] values of each token for cuts; None if there are none.
    """

    tokens: Float[Array, "b j k w"]
    valid: Bool[Array, "b j k"]
    index: Int[Array, "b j k"]
    place: Int[Array, "b j k"]
    grid: Int[Array, "b j 2"]
    note: Float[Array, "b j k w"] | None = None


class Cut(NamedTuple):
    """A place between layers where visual tokens are dropped.

    Attributes:
        layer: number of layers run before the cut, at least 1.
        slots: static length of the rows after it.
        drop: maps the rows before it and the taps by name to the rows, whose visual tokens may have
            been merged, and the mask of slots that remain. Tokens that are not visual must remain.
        taps: intermediates of the stage before it that the choice depends on; see `OutputSpec`.
        rows: number of queries of "attention" taps: the last tokens of each row, at `last_slots`.
        renumber: whether remaining tokens get the position ids 0, 1, 2, ...
        forgets: whether the caches of all layers before it lose the dropped tokens, too; then every
            cut before it forgets.
        probe: [layers, e] vectors of a token behind each row, which only the stage before it has:
            one is added to its residual stream before each layer. The query of "attention" and
            "scores" taps is then its own.
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
    """Rows at a cut, before their tokens are dropped.

    Attributes:
        sequence: the rows.
        keep: [b, s] True = token that remains.
        cache: keys and values of the stage before the cut.
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
    """Draws weights of the whole model.

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


class _Places(NamedTuple):
    """Meaning of each id: a text token, a given image, or nothing."""

    text: Bool[Array, "b l"]
    shown: Bool[Array, "b l"]
    image: Int[Array, "b l"]


def _places(ids: Array, text_length: Array, num_images: int) -> _Places:
    """Identifies text, images and padding from the ids; `image` is 0 where there is none."""
    present = jnp.arange(ids.shape[1]) < text_length[:, None]
    sentinel = (ids == IMAGE_TOKEN) & present
    image = jnp.cumsum(sentinel, axis=1) - 1
    shown = sentinel & (image < num_images)
    return _Places(present & ~sentinel, shown, jnp.where(shown, image, 0))


def _starts(places: _Places, span: Int[Array, "b j"]) -> tuple[Array, Array, Array]:
    """Returns the starts of ids [b, l] and images [b, j], and the end [b], for image spans."""
    (b, j), (text, shown, image) = span.shape, places
    width = text.astype(jnp.int32)
    if j:
        width = jnp.where(shown, jnp.take_along_axis(span, image, axis=1), width)
    start = jnp.cumsum(width, axis=1) - width
    # Ids without an image write to slot j, which is cut off.
    of_image = jnp.zeros((b, j + 1), jnp.int32)
    of_image = of_image.at[jnp.arange(b)[:, None], jnp.where(shown, image, j)].set(start)[:, :j]
    return start, of_image, width.sum(1)


def assemble(
    params: Params,
    backbone: Backbone,
    ids: Int[Array, "b l"],
    text_length: Int[Array, "b"],
    visual: Visual,
    positions: str = "original",
    capacity: int | None = None,
) -> Sequence:
    """Puts each image's kept tokens in place of its sentinel, and pads at the right end.

    Args:
        params: the model's weights.
        backbone: the model.
        ids: [b, l] token ids with -200 in place of an image, right-padded with anything.
        text_length: [b] number of ids of each row, with sentinels counted as one.
        visual: the kept tokens.
        positions: "original": position ids of the sequence with all tokens of every image; text
            after an image continues from its full extent. "compact": 0, 1, 2, ... over the present
            tokens.
        capacity: static length s of the result; by default l + j * k, which always suffices. Longer
            rows are truncated at the right end.

    Returns:
        A `Sequence`. Images without a sentinel and sentinels without an image are dropped.

    Raises:
        ValueError: `positions` is neither of the two.
    """
    expect("positions", positions, positions in POSITIONS, f"one of {', '.join(POSITIONS)}")
    (b, l), (j, k) = ids.shape, visual.tokens.shape[1:3]
    s = l + j * k if capacity is None else capacity
    places = _places(ids, text_length, j)
    text_slot, image_slot, total = _starts(places, visual.valid.sum(-1, dtype=jnp.int32))
    visual_slot = image_slot[..., None] + jnp.arange(k)
    if positions == "compact":
        text_position, following = text_slot, total
        visual_position = visual_slot[:, :, None]
    else:
        offset, extent = backbone.image_positions(visual.grid, visual.place)
        text_position, image_start, following = _starts(places, extent)
        visual_position = image_start[..., None, None] + offset
    p = backbone.config.position_axes
    text_position = jnp.broadcast_to(text_position[:, None], (b, p, l))
    visual_position = jnp.broadcast_to(visual_position, (b, j, p, k))
    visual_position = visual_position.swapaxes(1, 2).reshape(b, p, j * k)
    used = jnp.arange(j) < places.shown.sum(1)[:, None]
    # Every source gets its target slot; absent ones get slot s, which is dropped.
    slot = jnp.concatenate(
        [
            jnp.where(places.text, text_slot, s),
            jnp.where(visual.valid & used[..., None], visual_slot, s).reshape(b, j * k),
        ],
        axis=1,
    )
    rows = jnp.arange(b)[:, None]
    sources = jnp.arange(l + j * k, dtype=jnp.int32)
    source = jnp.zeros((b, s), jnp.int32).at[rows, slot].set(sources, mode="drop")
    length = jnp.minimum(total, s).astype(jnp.int32)
    filled = jnp.arange(s) < length[:, None]
    text = decoder.embed(params["language"], ids)
    whole = visual.tokens.reshape(b, j * k, visual.tokens.shape[3]).astype(text.dtype)
    tokens, deep = split_deep(backbone.config, whole)
    tokens = jnp.concatenate([text, tokens], axis=1)
    hidden = jnp.take_along_axis(tokens, source[..., None], axis=1)
    position = jnp.concatenate([text_position, visual_position], axis=2)
    position = jnp.take_along_axis(position, source[:, None], axis=2)
    position = jnp.where(filled[:, None], position, 0).astype(jnp.int32)
    no_image = jnp.full((b, l), -1, jnp.int32)
    image = jnp.broadcast_to(jnp.arange(j, dtype=jnp.int32)[:, None], (b, j, k))

    def at_slots(part: Array) -> Array:
        part = jnp.concatenate([no_image, part.reshape(b, j * k)], axis=1)
        return jnp.where(filled, jnp.take_along_axis(part, source, axis=1), -1)

    def beside_text(part: Array) -> Array:
        part = part.reshape(b, j * k, part.shape[-1])
        part = jnp.pad(part, ((0, 0), (l, 0), (0, 0)))
        return jnp.take_along_axis(part, source[..., None], axis=1)

    if deep is not None:  # slots of the padding read the first id, behind which are zeros
        deep = beside_text(deep).reshape(b, s, backbone.config.num_deepstack_layers, text.shape[2])
    # A truncated row continues after its last remaining token.
    following = jnp.where(total > s, position.max((1, 2)) + 1, following)
    return Sequence(
        hidden=jnp.where(filled[..., None], hidden, 0),
        position=position,
        length=length,
        next_position=following.astype(jnp.int32),
        image=at_slots(image),
        index=at_slots(visual.index),
        note=None if visual.note is None else beside_text(visual.note),
        grid=visual.grid,
        deep=deep,
    )


def halt(
    params: Params,
    config: ModelConfig,
    sequence: Sequence,
    cut: Cut,
    first: int = 0,
    room: int = 0,
    execution: Execution = Execution(),
) -> PausedPrefill:
    """Runs the language model from layer `first` to a cut, with `room` in the cache for new tokens.

    A cache that forgets has none before it is compressed.
    """
    rows, queries = sequence.rows, last_slots(sequence, cut.rows)
    if cut.probe is not None:
        rows, queries = with_probe(sequence, cut.probe), sequence.length[:, None]
    wanted = OutputSpec(rows.hidden.shape[1] + room * (not cut.forgets), cut.taps, queries)
    stage = decoder.run_layers(
        params["language"], config.text, rows, (first, cut.layer), None, wanted, execution
    )
    assert stage.cache is not None  # requested through `OutputSpec`
    following = {"length": sequence.length, "next_position": sequence.next_position}
    hidden = stage.hidden[:, : sequence.hidden.shape[1]]
    sequence, keep = cut.drop(sequence._replace(hidden=hidden), stage.taps)
    return PausedPrefill(sequence, keep, stage.cache._replace(**following))


def _forget(caches: Ordered[Cache], halted: PausedPrefill, slots: int, room: int) -> list[Cache]:
    """Returns caches of the kept tokens alone, with `room` for new ones."""
    source, filled = remaining(halted.sequence, halted.keep, slots)

    def left(part: Array) -> Array:
        part = jnp.take_along_axis(part, source[:, None, :, None][None], axis=3)
        return jnp.pad(part, [(0, room if axis == 3 else 0) for axis in range(5)])

    length = filled.sum(1, dtype=jnp.int32)
    return [x._replace(key=left(x.key), value=left(x.value), length=length) for x in caches]


def prefill(
    params: Params,
    config: ModelConfig,
    sequence: Sequence,
    max_new_tokens: int,
    cuts: Ordered[Cut] = (),
    all_logits: bool = False,
    execution: Execution = Execution(),
    halted: PausedPrefill | None = None,
) -> Prefill:
    """Runs the language model over a sequence and fills a cache.

    Args:
        params: the model's weights.
        config: the model's shape.
        sequence: result of `assemble`.
        max_new_tokens: slots to leave free in the cache; a token generated beyond them would not
            be seen by later ones.
        cuts: places between layers where tokens are dropped, in ascending order of layers. Each
            stage between them has its own length and its own cache. The caller checks that the
            model has these layers.
        all_logits: whether to return logits of all slots, not only of each row's last token.
        execution: how the layers are run.
        halted: result of `halt` for the first of the cuts, if it has been reached before.

    Returns:
        A `Prefill`.

    Raises:
        ValueError: taps that the stage before a cut does not have.
    """
    caches, after, first = [], [], 0
    language, text = params["language"], config.text

    for cut in cuts:
        if halted is None:
            halted = halt(params, config, sequence, cut, first, max_new_tokens, execution)
        caches.append(halted.cache)
        if cut.forgets:
            caches = _forget(caches, halted, cut.slots, max_new_tokens)
        sequence = compress(halted.sequence, halted.keep, cut.slots)
        sequence = renumber(sequence) if cut.renumber else sequence
        after.append(sequence)
        first, halted = cut.layer, None
    wanted = OutputSpec(sequence.hidden.shape[1] + max_new_tokens)
    span = first, text.num_layers
    stage = decoder.run_layers(language, text, sequence.rows, span, None, wanted, execution)
    assert stage.cache is not None  # requested through `OutputSpec`
    caches.append(stage.cache._replace(next_position=sequence.next_position))
    hidden = stage.hidden
    if not all_logits:
        last = jnp.maximum(sequence.length - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    cache = tuple(caches) if cuts else caches[0]
    return Prefill(decoder.logits(language, text, hidden), cache, tuple(after))


def decode_step(
    params: Params,
    config: ModelConfig,
    token: Int[Array, "b"],
    cache: Cache | tuple[Cache, ...],
    execution: Execution = Execution(),
) -> tuple[Float[Array, "b v"], Cache | tuple[Cache, ...]]:
    """Reads one token per row and returns the logits of the next.

    Args:
        params: the model's weights.
        config: the model's shape.
        token: [b] ids.
        cache: the cache of all layers, or a tuple of caches of consecutive stages, whose rows may
            have kept different numbers of tokens. Donate it under jit: it is extended in place.
        execution: how the layers are run.

    Returns:
        [b, v] float32 logits and the extended cache, of the same kind.
    """
    stages = (cache,) if isinstance(cache, Cache) else tuple(cache)
    language = params["language"]
    hidden = decoder.embed(language, token[:, None])
    b, p = token.shape[0], config.position_axes
    valid = jnp.ones(hidden.shape[:2], bool)
    extended, first = [], 0
    for stage in stages:
        last = first + stage.key.shape[0]
        position = jnp.broadcast_to(stage.next_position[:, None, None], (b, p, 1))
        rows = Rows(hidden, position, valid)
        hidden, stage, _ = decoder.run_layers(
            language, config.text, rows, (first, last), stage, execution=execution
        )
        extended.append(stage)
        first = last
    result = extended[0] if isinstance(cache, Cache) else tuple(extended)
    return decoder.logits(language, config.text, hidden[:, 0]), result
