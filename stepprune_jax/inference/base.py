"""Types of a batch on its way from prompts and images to answers."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.images import Pixels, join_images
from stepprune_jax.models.stack import Execution
from stepprune_jax.models.vlm import PausedPrefill
from stepprune_jax.pruning import Kept, LayerCut, Pruner


class Prompts(NamedTuple):
    """A set of prompts in the form that programs read; arrays are on the host.

    Attributes:
        ids: [q, l] right-padded ids, with -200 in place of an image.
        length: [q] number of ids.
        words: [q, w] ids of the user's words, for pruners that read them.
        num_words: [q] number of these.
        image_of: [q, j] row of each of its images in the `Images`; -1 for none.
        number: [q] number of each prompt in its set, by which messages name it.
    """

    ids: Int[np.ndarray, "q l"]
    length: Int[np.ndarray, "q"]
    words: Int[np.ndarray, "q w"]
    num_words: Int[np.ndarray, "q"]
    image_of: Int[np.ndarray, "q j"]
    number: Int[np.ndarray, "q"]

    @property
    def has_image(self) -> Bool[np.ndarray, "q"]:
        """Mask of the prompts that show an image."""
        return (self.image_of >= 0).any(axis=1)

    def take(self, rows: Int[np.ndarray, "r"]) -> "Prompts":
        """Returns some of the prompts."""
        return Prompts(*(part[rows] for part in self))


class Images(NamedTuple):
    """A set of images, before or after the tower.

    Attributes:
        grid: [i, 2] rows and columns of the patches; on the host.
        sizes: [i] tokens of each image; on the host.
        seed: [i] uint32 checksum of each image's pixels, for random draws; on the host.
        pixels: [i, ...] result of the family's preprocessing; None after the tower.
        features: [i, n, w] visual tokens, with their deep features behind them, on the host or on
            devices; a smaller image's are a prefix of its row. None before the tower.
        taps: [i, ...] intermediates of the tower for pruners; None before the tower.
    """

    grid: Int[np.ndarray, "i 2"]
    sizes: Int[np.ndarray, "i"]
    seed: UInt32[np.ndarray, "i"]
    pixels: Pixels | None = None
    features: Float[Array, "i n w"] | None = None
    taps: dict[Tap, Array] | None = None


def read_images(backbone: Backbone, parts: Sequence[Pixels]) -> Images:
    """Builds `Images` from the results of the family's preprocessing, one for each image."""
    pixels = join_images(parts)
    grid = np.asarray(backbone.grids(pixels), np.int32)
    sizes = np.asarray(backbone.num_tokens(grid), np.int32)
    # An image is checked before it is padded to the others, so that these change nothing; as the
    # tower sees it, not as bytes, because the draws of all published rows follow from that.
    seen = (jax.tree.leaves(backbone.normalise(part)) for part in parts)
    checks = [zlib.crc32(b"".join(map(bytes, leaves))) for leaves in seen]
    return Images(grid, sizes, np.array(checks, np.uint32), pixels)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How the model is run.

    Attributes:
        max_tokens: longest answer, in tokens.
        positions: position ids of kept tokens: "own", as in the program of the method's authors,
            or "original" or "compact", see `vlm.assemble`. "compact" renumbers the remaining tokens
            after each cut between layers.
        context_limit: longest row after expansion, with the kept tokens; longer ones are truncated
            at the right end, with a warning. None for that of the model's family.
        execution: how the layers of tower and language model are run.
    """

    max_tokens: int = 128
    positions: str = "own"
    context_limit: int | None = None
    execution: Execution = Execution()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a batch; hashable, and so the key of its compiled programs.

    A program's plan sets only what the program depends on, so that others share it.
    """

    capacity: int = 0  # padded number of tokens kept of an image
    projected: bool = False  # whether the kept tokens are
    slots: tuple[int, ...] = ()  # length of the rows of each stage of the language model
    cuts: tuple[LayerCut, ...] = ()  # between the stages
    text: int = 0  # padded number of text tokens, for cuts that read all of them
    positions: str = "original"
    max_tokens: int = 1
    execution: Execution = Execution()
    mesh: Mesh | None = None


class Pairs(NamedTuple):
    """The (image, prompt) pairs of a batch, which are the rows of a pruner."""

    images: Pixels  # [i, ...] the distinct images: pixels, or features [i, n, w] if there are taps
    taps: tuple[Array, ...] | None  # [i, ...] in the order of `Pruner.taps`
    image: Int[Array, "r"]  # row of its image
    grid: Int[Array, "r 2"]
    size: Int[Array, "r"] | None  # tokens of its image; None where all have n
    words: Int[Array, "r w"]
    num_words: Int[Array, "r"]
    number: Int[Array, "r"]  # number of its prompt
    seed: UInt32[Array, "r"]  # seed of its random draws
    count: Int[Array, "r"]  # tokens to keep if known, otherwise all


class PromptLayout(NamedTuple):
    """Prompts with the places of their images."""

    ids: Int[Array, "b l"]
    length: Int[Array, "b"]
    pair: Int[Array, "b j"]  # row of each image in `Pairs`
    shown: Bool[Array, "b j"]  # True = image
    grid: Int[Array, "b j 2"]
    counts: tuple[Int[Array, "b j"], ...] = ()  # tokens that remain after each cut


class Batch(NamedTuple):
    """A batch that is ready for its last program before decoding, `programs.begin`."""

    plan: Plan
    pruner: Pruner | None  # `Pruner.program`, if that program reads it
    tokens: (
        Kept | Pairs | PausedPrefill
    )  # the kept tokens, what to choose them from, or rows at a cut
    texts: PromptLayout
    visual_tokens: Int[np.ndarray, "b"]  # of each row before pruning
    kept: Int[np.ndarray, "b"]  # of these after the last cut


class Decoding(NamedTuple):
    """Decoding state of a batch.

    Attributes:
        cache: keys and values of everything but the last token.
        token: [b] last token; not in the cache yet.
        finished: [b] True = a stop id was generated; later tokens are not recorded.
        finite: [b] False = the logits of a token were not finite, which also finishes the row.
        count: [b] tokens generated, including the stop id.
        key: [b] PRNG keys, one per row, so that draws do not depend on the rest of the batch; None
            if nothing is drawn.
        step: number of the next step; the prefill was step 0.
        tokens: [b, max_tokens] int32 the answers, padded with -1.
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


class Places(NamedTuple):
    """The tokens in the rows of a stage; the fields are those of `models.sequence.Sequence`."""

    image: Int[Array, "b s"]
    index: Int[Array, "b s"]
    position: Int[Array, "b p s"]
    length: Int[Array, "b"]


class Trace(NamedTuple):
    """Record of a prefill.

    Attributes:
        logits: [b, v] float32 at each prompt's last token.
        stages: the rows that enter the language model, then those after each cut.
        order: [b, j, t] int32 tokens of each image kept before the language model, in order of
            choice, -1 in the padding; None for a method that chooses a set.
    """

    logits: Float[Array, "b v"]
    stages: tuple[Places, ...]
    order: Int[Array, "b j t"] | None = None


class PrefillResult(NamedTuple):
    """A batch after its first tokens."""

    state: Decoding
    trace: Trace
    visual_tokens: Int[np.ndarray, "b"]  # of each row before pruning, over all its images
    kept: Int[np.ndarray, "b"]  # of these after the last cut
