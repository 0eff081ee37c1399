"""Types of a batch between its prompts and images and its first tokens.

Prompts, Images -> Batch -> PrefillInputs -> PrefillResult
"""

import dataclasses
import zlib
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.images import Clip, Pixels, join_images
from stepprune_jax.models.sequence import Clips, Kept, Sequence
from stepprune_jax.models.stack import Execution
from stepprune_jax.models.vlm import PausedPrefill
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.pruning import LayerCut, Pruner

# Temporal patches of videos that the tower encodes at once. More patches fill complete chunks.
CHUNK_PATCHES = 8


class Prompts(NamedTuple):
    """Prompts as padded arrays on the host, from `Request.prompts` or `encode_questions`.

    Attributes:
        ids: [q, l] right-padded ids, with -200 in place of an image or a video. In a prompt of
            Qwen3-VL, a video has one such id for each of its temporal patches.
        length: [q] number of ids.
        words: [q, w] right-padded ids of the user's words, for pruners that read text.
        num_words: [q] number of ids in each row of `words`.
        image_of: [q, j] row in `Images` of each image or video of a prompt; -1 for none.
        number: [q] number of each prompt in its data set, for error messages.
    """

    ids: Int[np.ndarray, "q l"]
    length: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q w"]
    num_words: Int[np.ndarray, "q"]
    image_of: Int[np.ndarray, "q j"]
    number: Int[np.ndarray, "q"]

    @property
    def has_image(self) -> Bool[np.ndarray, "q"]:
        """Mask of the prompts that have an image."""
        return self.image_of.max(axis=1, initial=-1) >= 0

    @property
    def num_text(self) -> Int[np.ndarray, "q"]:
        """Number of text tokens of each prompt."""
        return self.length - self.num_marks

    @property
    def num_marks(self) -> Int[np.ndarray, "q"]:
        """Number of ids of each prompt that stand for an image or a part of a video."""
        is_present = np.arange(self.ids.shape[1]) < self.length[:, None]
        return ((self.ids == IMAGE_TOKEN) & is_present).sum(axis=1)

    def take(self, rows: Int[np.ndarray, "r"]) -> "Prompts":
        """Returns the prompts at the given row indices."""
        return Prompts(*(array[rows] for array in self))


class Images(NamedTuple):
    """Images and videos before or after the tower.

    Attributes:
        grid: [i, 2] rows and columns of the patches; on the host. The grid of a video stacks the
            grids of its temporal patches from top to bottom.
        sizes: [i] number of visual tokens of each image; on the host.
        seed: [i] uint32 checksum of each image's pixels, for random numbers; on the host.
        pixels: [i, ...] result of the family's preprocessing; None after the tower. With videos,
            the first axis has a row for each image and for each temporal patch of a video.
        features: [i, n, w] visual tokens with their deep features appended, on the host or on
            devices. The tokens of a smaller image are a prefix of its row. None before the tower.
        taps: [i, ...] intermediate arrays of the tower for pruners; None before the tower.
        clips: [i] temporal patches of each image or video, on the host; None without videos.
    """

    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]
    seed: UInt32[np.ndarray, "i"]
    pixels: Pixels | None = None
    features: Float[AnyArray, "i n w"] | None = None
    taps: dict[Tap, Array] | None = None
    clips: Clips | None = None

    def take(self, rows: Int[np.ndarray, "k"]) -> "Images":
        """Returns the images and videos at the given rows, in this order."""
        pixel_rows = rows
        if self.clips is not None and self.pixels is not None:
            pixel_rows = self.clips.patch_rows(rows)
        return Images(
            grid=self.grid[rows],
            sizes=self.sizes[rows],
            seed=self.seed[rows],
            pixels=jax.tree.map(lambda leaf: leaf[pixel_rows], self.pixels),
            features=None if self.features is None else self.features[rows],
            taps=jax.tree.map(lambda leaf: leaf[rows], self.taps),
            clips=None if self.clips is None else self.clips.take(rows),
        )


def read_media(
    backbone: Backbone, pixels_of_images: Ordered[Pixels], clips: Ordered[Clip | None]
) -> Images:
    """Builds `Images` of images and videos, before the tower.

    Args:
        backbone: the model.
        pixels_of_images: for each image or video, the result of `Backbone.preprocess` or
            `Clip.pixels`.
        clips: for each image or video, the video; None for an image.
    """
    if not any(clip is not None for clip in clips):
        return read_images(backbone, pixels_of_images)
    patches = [
        backbone.as_patch_of_clip(pixels) if clip is None else pixels
        for pixels, clip in zip(pixels_of_images, clips, strict=True)
    ]
    patch_grids = [np.asarray(backbone.grids(pixels), np.int32) for pixels in patches]
    frames = np.array([len(patch_grid) for patch_grid in patch_grids], np.int32)
    grid = np.stack([patch_grid[0] for patch_grid in patch_grids])
    grid[:, 0] *= frames
    intervals = [0.0 if clip is None else clip.interval for clip in clips]
    # A video is hashed as bytes, because its normalized pixels would take four times the memory.
    seeds = [
        read_images(backbone, [pixels]).seed[0]
        if clip is None
        else zlib.crc32(b"".join(map(bytes, jax.tree.leaves(pixels))))
        for pixels, clip in zip(pixels_of_images, clips, strict=True)
    ]
    return Images(
        grid=grid,
        sizes=np.asarray(backbone.num_tokens(grid), np.int32),
        seed=np.array(seeds, np.uint32),
        pixels=join_images(patches),
        clips=Clips(
            frames, np.array(intervals, np.float32), np.array([clip is not None for clip in clips])
        ),
    )


def join_media(backbone: Backbone, parts: Ordered[Images]) -> Images:
    """Joins images and videos of several requests, all before or all after the tower."""
    has_clips = any(part.clips is not None for part in parts)
    if has_clips:
        parts = [part if part.clips is not None else _as_clips(backbone, part) for part in parts]
    grid, sizes, seed = (
        np.concatenate(arrays) for arrays in zip(*(part[:3] for part in parts), strict=True)
    )
    clips = [part.clips for part in parts if part.clips is not None]
    return Images(
        grid=grid,
        sizes=sizes,
        seed=seed,
        pixels=join_images([part.pixels for part in parts]),
        features=join_images([part.features for part in parts]),
        taps=join_images([part.taps for part in parts]),
        clips=join_images(clips) if has_clips else None,
    )


def _as_clips(backbone: Backbone, images: Images) -> Images:
    """Returns images as videos of one temporal patch each, to join them with videos."""
    pixels = None if images.pixels is None else backbone.as_patch_of_clip(images.pixels)
    return images._replace(pixels=pixels, clips=Clips.of_images(len(images.grid)))


def read_images(backbone: Backbone, pixels_of_images: Ordered[Pixels]) -> Images:
    """Builds `Images` before the tower.

    Args:
        backbone: the model.
        pixels_of_images: for each image, the result of `Backbone.preprocess`.

    Returns:
        The images, with their grids, numbers of tokens and checksums.
    """
    pixels = join_images(pixels_of_images)
    grid = np.asarray(backbone.grids(pixels), np.int32)
    sizes = np.asarray(backbone.num_tokens(grid), np.int32)
    # Each image is hashed before it is padded to the batch, so a checksum does not depend on other
    # images. The normalized pixels are hashed, because the checksum seeds random numbers and the
    # published results used this seed.
    normalized = (jax.tree.leaves(backbone.normalise(image)) for image in pixels_of_images)
    checksums = [zlib.crc32(b"".join(map(bytes, leaves))) for leaves in normalized]
    return Images(grid, sizes, np.array(checksums, np.uint32), pixels)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a run of the model.

    Attributes:
        max_tokens: longest answer, in tokens.
        positions: position ids of kept tokens. "own" follows the program of the method's authors.
            "original" and "compact" are defined at `assembly.assemble`; "compact" also renumbers
            the tokens that remain after a pruner drops tokens between layers.
        context_limit: longest row, with the kept tokens in place of the images. Longer rows are
            truncated at the right end, with a warning. None selects the limit of the model's
            family.
        execution: how the layers of tower and language model are run.
    """

    max_tokens: int = 128
    positions: str = "own"
    context_limit: int | None = None
    execution: Execution = Execution()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a program of a batch; hashable.

    A program's plan sets only the fields that the program depends on, so that more batches share
    the program.

    Attributes:
        capacity: padded number of tokens kept of an image.
        is_projected: whether the kept tokens have passed the projector.
        slots: row length of each stage, a span of layers of the language model.
        cuts: places between the stages where the pruner drops tokens.
        text_slots: padded number of text tokens, for cuts that read all text; otherwise 0.
        positions: position ids of kept tokens, "original" or "compact".
        max_tokens: longest answer, in tokens.
        execution: how the layers are run.
        mesh: mesh of the weights; None on a single device.
    """

    capacity: int = 0
    is_projected: bool = False
    slots: tuple[int, ...] = ()
    cuts: tuple[LayerCut, ...] = ()
    text_slots: int = 0
    positions: str = "original"
    max_tokens: int = 1
    execution: Execution = Execution()
    mesh: Mesh | None = None


class Pairs(NamedTuple):
    """The (image, prompt) pairs of a batch: the arrays that `programs.select` reads.

    Attributes:
        pixels: [i, ...] the distinct images, or the images and temporal patches of videos; None
            after the tower.
        features: [i, n, w] visual tokens of the distinct images; None before the tower.
        taps: [i, ...] intermediate arrays in the order of `Pruner.taps`; empty before the tower.
        image: [r] row of each pair's image in `pixels` or `features`.
        grid: [r, 2] rows and columns of the image's patches.
        size: [r] number of tokens of the image; None if every image has n tokens.
        words: [r, w] right-padded ids of the user's words.
        num_words: [r] number of ids in each row of `words`.
        number: [r] number of the prompt in its data set.
        seed: [r] seed of the row's random numbers.
        count: [r] number of tokens to keep if the image's size decides it, otherwise the size.
        token_of: [i, n] index of each visual token among all tokens of the tower, -1 in the
            padding, to join the temporal patches of videos; None without videos.
        frames: [r] number of temporal patches; None without videos.
    """

    pixels: Pixels | None
    features: Float[Array, "i n w"] | None
    taps: tuple[Array, ...]
    image: Int[Array, "r"]
    grid: Int[Array, "r 2"]
    size: Int[Array, "r"] | None
    words: Int[Array, "r w"]
    num_words: Int[Array, "r"]
    number: Int[Array, "r"]
    seed: UInt32[Array, "r"]
    count: Int[Array, "r"]
    token_of: Int[Array, "i n"] | None = None
    frames: Int[Array, "r"] | None = None


class PromptLayout(NamedTuple):
    """Prompts with the places of their images: the arrays that `programs.prefill` reads.

    Attributes:
        ids: [b, l] right-padded ids, with -200 in place of an image.
        length: [b] number of ids.
        pair: [b, j] row in the kept tokens of each image of a prompt.
        has_image: [b, j] True = image.
        grid: [b, j, 2] rows and columns of the image's patches.
        counts: for each cut between layers, [b, j] number of tokens of each image that remain,
            without merged tokens.
        clips: [b, j] temporal patches of each image or video; None without videos.
    """

    ids: Int[Array, "b l"]
    length: Int[Array, "b"]
    pair: Int[Array, "b j"]
    has_image: Bool[Array, "b j"]
    grid: Int[Array, "b j 2"]
    counts: tuple[Int[Array, "b j"], ...] = ()
    clips: Clips | None = None


class PairPlan(NamedTuple):
    """The pairs of a batch on the host, and how many tokens of each a pruner may keep.

    Attributes:
        image: [r] row of each pair's image in the images.
        prompt: [r] row of each pair's prompt in the batch.
        pair: [b, j] pair of each image of each prompt.
        has_image: [b, j] True = image.
        size: [r] number of tokens of each pair's image.
        counts: [r] number of tokens to keep if the size decides it, otherwise the size.
        n: padded number of tokens of an image.
        capacity: padded number of tokens to keep; an upper bound where a learned stop decides.
        sizes: padded numbers to choose from, ascending.
    """

    image: Int[np.ndarray, "r"]
    prompt: Int[np.ndarray, "r"]
    pair: Int[np.ndarray, "b j"]
    has_image: Bool[np.ndarray, "b j"]
    size: Int[np.ndarray, "r"]
    counts: Int[np.ndarray, "r"]
    n: int = 0
    capacity: int = 0
    sizes: Ordered[int] = ()


class RankedPairs(NamedTuple):
    """Pairs whose tokens are already in an order: the arrays that `programs.run_take` reads.

    Attributes:
        features: [r, n, w] visual tokens of each pair's image.
        order: [r, t] indices of the tokens in the order of selection.
        counts: [r] number of tokens to take from the order.
    """

    features: Float[AnyArray, "r n w"]
    order: Int[AnyArray, "r t"]
    counts: Int[AnyArray, "r"]


class Batch(NamedTuple):
    """A batch before its selection, from `plan.plan_batch`.

    Attributes:
        prompts: the prompts; on the host.
        options: how the model is run.
        width: number of slots of a row for text; None pads rows to a bucket.
        pruner: the pruner; `AllTokens` for a batch without images.
        pairing: the (image, prompt) pairs and their counts of tokens; on the host.
        grid: [r, 2] rows and columns of each pair's image; on the host.
        source: the arrays that give the kept tokens: `Pairs` for the pruner to select from,
            `RankedPairs` for a given order, or `Kept` for a batch without images.
        clips: [r] temporal patches of each pair's image or video, on the host; None without videos.
    """

    prompts: Prompts
    options: RunOptions
    width: int | None
    pruner: Pruner
    pairing: PairPlan
    grid: Int[np.ndarray, "r 2"]
    source: Pairs | RankedPairs | Kept
    clips: Clips | None = None

    @property
    def selects_in_prefill(self) -> bool:
        """Whether one program runs the tower, the selection and the prefill."""
        has_pixels = isinstance(self.source, Pairs) and self.source.features is None
        return has_pixels and self.pruner.budget.is_exact


class PrefillInputs(NamedTuple):
    """A batch with the shapes of its prefill, from `pipeline.prepare_prefill`.

    Attributes:
        pruner: the pruner.
        plan: static part of the prefill.
        layout: the prompts with the places of their images.
        tokens: the visual input of the program: `Pairs` if the program also runs the selection, the
            `Kept` tokens after the selection, or the state of the language model at a cut whose
            selection decides the number of tokens.
        visual_tokens: [b] visual tokens of each row before pruning, over all its images.
        num_kept: [b] visual tokens of each row after the last cut.
    """

    pruner: Pruner
    plan: Plan
    layout: PromptLayout
    tokens: Pairs | Kept | PausedPrefill
    visual_tokens: Int[np.ndarray, "b"]
    num_kept: Int[np.ndarray, "b"]


class Decoding(NamedTuple):
    """Decoding state of a batch.

    Attributes:
        cache: keys and values of all tokens but the last.
        token: [b] last token; not in the cache yet.
        finished: [b] True = a stop id was generated; later tokens are not recorded.
        finite: [b] False = the logits of a token were not finite, which also finishes the row.
        count: [b] tokens generated, including the stop id.
        key: [b] PRNG keys, one per row, so that sampling does not depend on other rows; None for
            greedy decoding.
        step: number of the next step; the prefill was step 0.
        tokens: [b, max_tokens] int32 ids of the answers, padded with -1.
        seen: [b, v] True at tokens of prompt and answer; None without a repetition penalty.
    """

    cache: Cache | tuple[Cache, ...]
    token: Int[Array, "b"]
    finished: Bool[Array, "b"]
    finite: Bool[Array, "b"]
    count: Int[Array, "b"]
    key: Array | None
    step: Int[Array, ""]
    tokens: Int[Array, "b max_tokens"]
    seen: Bool[Array, "b v"] | None = None


class Trace(NamedTuple):
    """Record of a prefill.

    Attributes:
        logits: [b, v] float32 at each prompt's last token.
        stages: the rows before the first layer, then the rows after each cut, from
            `Sequence.without_values`.
        order: [b, j, t] int32 indices of the tokens of each image that enter the language model, in
            the order of selection, -1 in the padding; None for a method that selects a set.
    """

    logits: Float[Array, "b v"]
    stages: tuple[Sequence, ...]
    order: Int[Array, "b j t"] | None = None


class PrefillResult(NamedTuple):
    """A batch after its first tokens.

    Attributes:
        state: the decoding state.
        trace: the record of the prefill.
        visual_tokens: [b] visual tokens of each row before pruning, over all its images.
        kept: [b] visual tokens of each row after the last cut.
    """

    state: Decoding
    trace: Trace
    visual_tokens: Int[np.ndarray, "b"]
    kept: Int[np.ndarray, "b"]
