"""Assembly of the language model's rows from text and kept visual tokens.

Pure functions of (params, backbone, arrays). Rows differ in length; padding is at the right end
only and never changes a result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models import decoder
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.sequence import POSITIONS, Clips, Kept, Sequence, split_deep
from stepprune_jax.models.stack import Params
from stepprune_jax.user_input import expect


class _Marks(NamedTuple):
    """Distribution of the kept tokens of images and videos over the sentinels of a row.

    A sentinel is the id -200. Each row has m slots for sentinels, more than it has sentinels.

    Attributes:
        mark: [b, j, k] number of the sentinel in the row of each kept token.
        rank: [b, j, k] number of kept tokens of the sentinel before each token.
        image_of: [b, m] number of the image or video of each sentinel; arbitrary for padding.
        num_kept: [b, m] number of kept tokens of each sentinel.
    """

    mark: Int[Array, "b j k"]
    rank: Int[Array, "b j k"]
    image_of: Int[Array, "b m"]
    num_kept: Int[Array, "b m"]


class _IdKinds(NamedTuple):
    """The kind of each id of the prompts.

    A sentinel is the id -200, which marks the place of an image.

    Attributes:
        is_text: [b, l] True = text token.
        is_image: [b, l] True = sentinel of an image that exists.
        image: [b, l] number of the sentinel's image in its row; 0 at other ids.
    """

    is_text: Bool[Array, "b l"]
    is_image: Bool[Array, "b l"]
    image: Int[Array, "b l"]


def assemble(
    params: Params,
    backbone: Backbone,
    ids: Int[Array, "b l"],
    text_length: Int[Array, "b"],
    kept: Kept,
    grid: Int[Array, "b j 2"],
    *,
    positions: str = "original",
    capacity: int | None = None,
    clips: Clips | None = None,
) -> Sequence:
    """Builds rows from text, with the kept tokens of each image in place of its sentinel.

    A sentinel is the id -200 in a prompt. The first sentinel of a row stands for the first image,
    and so on. Images without a sentinel and sentinels without an image are dropped. Axes: b
    prompts, l ids, j images per prompt, k kept tokens per image, s slots per row.

    Args:
        params: the model's weights.
        backbone: the model.
        ids: [b, l] token ids with -200 in place of an image; ids beyond `text_length` are ignored.
        text_length: [b] number of ids of each row, where a sentinel counts as one id.
        kept: [b, j] the projected tokens of each row's images, in the order of their sentinels.
        grid: [b, j, 2] int32 rows and columns of each unpruned image.
        positions: "original" gives each token the position id that it would have without pruning.
            "compact" numbers the remaining tokens 0, 1, 2, ...
        capacity: static length s of the rows. Longer rows are truncated at the right end. The
            default l + j * k holds every row.
        clips: [b, j] temporal patches of each image or video; None without videos. If the family
            has a sentinel for each temporal patch (`Backbone.MARKS_PATCHES`), the kept tokens must
            be in raster order.

    Returns:
        The rows before the first layer.

    Raises:
        ValueError: `positions` is neither "original" nor "compact".
    """
    expect("positions", positions, positions in POSITIONS, f"one of {', '.join(POSITIONS)}")
    (b, l), (j, k) = ids.shape, kept.tokens.shape[1:3]
    s = l + j * k if capacity is None else capacity
    marks = None
    if clips is None:
        kinds = _classify_ids(ids, text_length, j)
        num_kept = kept.valid.sum(-1, dtype=jnp.int32)
        text_slot, image_slot, total_length = _accumulate_widths(kinds, num_kept)
        visual_slot = image_slot[..., None] + jnp.arange(k)
    else:
        marks = _distribute_over_marks(backbone, kept, grid, clips, num_marks=l)
        kinds = _classify_ids(ids, text_length, l)
        text_slot, mark_slot, total_length = _accumulate_widths(kinds, marks.num_kept)
        visual_slot = _take_marks(mark_slot, marks.mark) + marks.rank
    if positions == "compact":
        text_position, visual_position = text_slot, visual_slot[:, :, None]
        next_position = total_length
    elif marks is not None and clips is not None:
        offset, extent = backbone.clip_positions(
            grid, kept.place, jnp.asarray(clips.frames), jnp.asarray(clips.interval)
        )
        extent = jnp.take_along_axis(extent, marks.image_of, axis=1)
        text_position, mark_start, next_position = _accumulate_widths(kinds, extent)
        visual_position = _take_marks(mark_start, marks.mark)[:, :, None] + offset
    else:
        offset, extent = backbone.image_positions(grid, kept.place)
        text_position, image_start, next_position = _accumulate_widths(kinds, extent)
        visual_position = image_start[..., None, None] + offset
    has_mark = jnp.arange(j) < kinds.is_image.sum(1)[:, None]
    if marks is not None:  # every image and video of a batch with videos has its sentinels
        has_mark = jnp.ones_like(has_mark)
    source = _source_of_slots(kinds, text_slot, visual_slot, kept.valid & has_mark[..., None], s)
    length = jnp.minimum(total_length, s).astype(jnp.int32)
    is_filled = jnp.arange(s) < length[:, None]

    text = decoder.embed(params["language"], ids)
    joined = kept.tokens.reshape(b, j * k, kept.tokens.shape[3]).astype(text.dtype)
    tokens, deep = split_deep(backbone.config, joined)
    hidden = jnp.concatenate([text, tokens], axis=1)
    hidden = jnp.take_along_axis(hidden, source[..., None], axis=1)
    num_axes = backbone.config.position_axes
    visual_position = jnp.broadcast_to(visual_position, (b, j, num_axes, k))
    position = _gather_positions(text_position, visual_position, source)
    position = jnp.where(is_filled[:, None], position, 0).astype(jnp.int32)
    no_image = jnp.full((b, l), -1, jnp.int32)
    image = jnp.broadcast_to(jnp.arange(j, dtype=jnp.int32)[:, None], (b, j, k))

    def gather_numbers(numbers: Int[Array, "b j k"]) -> Int[Array, "b s"]:
        """Gathers a number of each visual token; -1 at text and padding."""
        numbers = jnp.concatenate([no_image, numbers.reshape(b, j * k)], axis=1)
        return jnp.where(is_filled, jnp.take_along_axis(numbers, source, axis=1), -1)

    def gather_vectors(vectors: Array) -> Array:
        """Gathers a vector of each visual token; zeros at text and padding."""
        vectors = vectors.reshape(b, j * k, vectors.shape[-1])
        vectors = jnp.pad(vectors, ((0, 0), (l, 0), (0, 0)))
        return jnp.take_along_axis(vectors, source[..., None], axis=1)

    if deep is not None:  # padding slots read source 0, which is an id and has zeros here
        deep = gather_vectors(deep).reshape(
            b, s, backbone.config.num_deepstack_layers, text.shape[2]
        )
    # A truncated row continues after its last remaining token.
    next_position = jnp.where(total_length > s, position.max((1, 2)) + 1, next_position)
    return Sequence(
        hidden=jnp.where(is_filled[..., None], hidden, 0),
        position=position,
        length=length,
        next_position=next_position.astype(jnp.int32),
        image=gather_numbers(image),
        index=gather_numbers(kept.index),
        note=None if kept.note is None else gather_vectors(kept.note),
        grid=grid,
        deep=deep,
    )


def _distribute_over_marks(
    backbone: Backbone, kept: Kept, grid: Int[Array, "b j 2"], clips: Clips, num_marks: int
) -> _Marks:
    """Assigns the kept tokens of images and videos to the sentinels of their rows.

    Args:
        backbone: the model, which has one sentinel for a video or one for each temporal patch.
        kept: [b, j] kept tokens of each image and video, in raster order.
        grid: [b, j, 2] rows and columns of each unpruned image or video.
        clips: [b, j] temporal patches of each image and video.
        num_marks: static number m of slots for sentinels of a row.

    Returns:
        The sentinel of each kept token, and the tokens of each sentinel.
    """
    b, j, k = kept.place.shape
    marks_of_image = clips.frames if backbone.MARKS_PATCHES else jnp.minimum(clips.frames, 1)
    last_mark = jnp.cumsum(marks_of_image, axis=1)
    first_mark = last_mark - marks_of_image
    patch_size = jnp.maximum(grid.prod(-1) // jnp.maximum(clips.frames, 1), 1)
    patch = kept.place // patch_size[..., None] if backbone.MARKS_PATCHES else 0
    mark = jnp.where(kept.valid, first_mark[..., None] + patch, 0)
    mark_index = jnp.arange(num_marks)
    image_of = jnp.sum(mark_index[None, :, None] >= last_mark[:, None], axis=2, dtype=jnp.int32)
    num_kept = (
        jnp.zeros((b, num_marks), jnp.int32)
        .at[jnp.arange(b)[:, None, None], jnp.where(kept.valid, mark, num_marks)]
        .add(1, mode="drop")
    )
    # The tokens of an image are in the order of its sentinels.
    num_before = jnp.cumsum(num_kept, axis=1) - num_kept
    num_before_image = jnp.take_along_axis(num_before, jnp.minimum(first_mark, num_marks - 1), 1)
    rank = jnp.arange(k) - (_take_marks(num_before, mark) - num_before_image[..., None])
    return _Marks(mark, rank, jnp.minimum(image_of, j - 1), num_kept)


def _take_marks(numbers: Int[Array, "b m"], mark: Int[Array, "b j k"]) -> Int[Array, "b j k"]:
    """Returns the number that belongs to the sentinel of each kept token."""
    flat = jnp.take_along_axis(numbers, mark.reshape(len(mark), -1), axis=1)
    return flat.reshape(mark.shape)


def _classify_ids(ids: Array, text_length: Array, num_images: int) -> _IdKinds:
    """Classifies each id as text, as the sentinel of an image, or as neither."""
    is_present = jnp.arange(ids.shape[1]) < text_length[:, None]
    is_sentinel = (ids == IMAGE_TOKEN) & is_present
    image = jnp.cumsum(is_sentinel, axis=1) - 1
    is_image = is_sentinel & (image < num_images)
    return _IdKinds(is_present & ~is_sentinel, is_image, jnp.where(is_image, image, 0))


def _accumulate_widths(
    kinds: _IdKinds, image_width: Int[Array, "b j"]
) -> tuple[Int[Array, "b l"], Int[Array, "b j"], Int[Array, "b"]]:
    """Computes where each id of a row starts if images have different widths.

    Widths are slots, or position ids. A text token has width 1; padding has width 0.

    Args:
        kinds: the kind of each id.
        image_width: [b, j] width of each image.

    Returns:
        start: [b, l] sum of the widths before each id.
        image_start: [b, j] sum of the widths before the sentinel of each image.
        total: [b] sum of the widths of each row.
    """
    (b, j), (is_text, is_image, image) = image_width.shape, kinds
    width = is_text.astype(jnp.int32)
    if j:
        width = jnp.where(is_image, jnp.take_along_axis(image_width, image, axis=1), width)
    start = jnp.cumsum(width, axis=1) - width
    # Ids that are no sentinel write to the additional column j, which is removed.
    image_start = jnp.zeros((b, j + 1), jnp.int32)
    image_start = image_start.at[jnp.arange(b)[:, None], jnp.where(is_image, image, j)].set(start)
    return start, image_start[:, :j], width.sum(1)


def _gather_positions(
    text_position: Int[Array, "b l"],
    visual_position: Int[Array, "b j p k"],
    source: Int[Array, "b s"],
) -> Int[Array, "b p s"]:
    """Gathers the p position ids of the token in each slot.

    Args:
        text_position: [b, l] position of each id, the same on all p axes.
        visual_position: [b, j, p, k] positions of each kept visual token.
        source: [b, s] number of the token in each slot, from `_source_of_slots`.

    Returns:
        [b, p, s] position ids.
    """
    b, j, num_axes, k = visual_position.shape
    text_position = jnp.broadcast_to(text_position[:, None], (b, num_axes, text_position.shape[1]))
    visual_position = visual_position.swapaxes(1, 2).reshape(b, num_axes, j * k)
    position = jnp.concatenate([text_position, visual_position], axis=2)
    return jnp.take_along_axis(position, source[:, None], axis=2)


def _source_of_slots(
    kinds: _IdKinds,
    text_slot: Int[Array, "b l"],
    visual_slot: Int[Array, "b j k"],
    valid: Bool[Array, "b j k"],
    num_slots: int,
) -> Int[Array, "b s"]:
    """Inverts the map from tokens to slots.

    Args:
        kinds: the kind of each id.
        text_slot: [b, l] slot of each text token.
        visual_slot: [b, j, k] slot of each kept visual token.
        valid: [b, j, k] True = kept token of an image with a sentinel, False = padding.
        num_slots: number s of slots of a row; tokens at later slots are dropped.

    Returns:
        [b, s] number of the token that fills each slot: 0 to l - 1 for ids, then l to l + j * k - 1
        for visual tokens; 0 for slots without a token.
    """
    (b, l), (j, k) = text_slot.shape, valid.shape[1:]
    # Absent tokens get the slot `num_slots`, which does not exist, so the scatter drops them.
    visual_slot = jnp.where(valid, visual_slot, num_slots)
    text_slot = jnp.where(kinds.is_text, text_slot, num_slots)
    slot = jnp.concatenate([text_slot, visual_slot.reshape(b, j * k)], axis=1)
    sources = jnp.arange(l + j * k, dtype=jnp.int32)
    source = jnp.zeros((b, num_slots), jnp.int32)
    return source.at[jnp.arange(b)[:, None], slot].set(sources, mode="drop")
