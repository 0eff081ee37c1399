"""Inputs and results of pruning methods, and the counts of tokens that follow from a method."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from stepprune_jax.models.attention import Tap
from stepprune_jax.policy.jax_settings import THREEFRY


class PrunerInputs(NamedTuple):
    """Inputs of a pruner; a row is an (image, prompt) pair.

    Attributes:
        tokens: [r, n, d] visual tokens in raster order, before the projector; after the projector
            for pruners with `after_projector`.
        mask: [r, n] True = token, a prefix of each row; None if all rows have n tokens. Methods
            read the property `valid`, which is always an array. None lets `AllTokens` and policies
            omit operations that XLA would keep for an array of True.
        grid: [r, 2] int32 rows and columns of the image's patches.
        text: [r, l, e] word embeddings of the user's turns.
        text_valid: [r, l] True = word.
        number: [r] int32 number of the prompt in its data set.
        seed: [r] uint32 checksum of image and question: the seed of the row's random numbers.
        count: [r] int32 number of tokens to keep, where the budget is exact.
        taps: intermediates of the tower, in the order of `Pruner.taps`.
        deep: [r, n, D] DeepStack features of each token: vectors that later layers of the language
            model add to it. They are kept with the token and not compared. None for a model
            without DeepStack.
        frames: [r] int32 number of temporal patches of a video, 1 for an image; None without
            videos. The grid of a video stacks the grids of its temporal patches from top to bottom.
    """

    tokens: Float[Array, "r n d"]
    mask: Bool[Array, "r n"] | None
    grid: Int[Array, "r 2"]
    text: Float[Array, "r l e"]
    text_valid: Bool[Array, "r l"]
    number: Int[Array, "r"]
    seed: UInt32[Array, "r"]
    count: Int[Array, "r"]
    taps: tuple[Array, ...] = ()
    deep: Float[Array, "r n D"] | None = None
    frames: Int[Array, "r"] | None = None

    @property
    def num_frames(self) -> Int[Array, "r"]:
        """[r] number of temporal patches of each image or video, also without videos."""
        return jnp.ones_like(self.number) if self.frames is None else self.frames

    @property
    def valid(self) -> Bool[Array, "r n"]:
        """[r, n] True at tokens, which come first in each row; False at the padding after them."""
        return jnp.ones(self.tokens.shape[:2], bool) if self.mask is None else self.mask

    @property
    def whole(self) -> Float[Array, "r n w"]:
        """[r, n, w] tokens with appended DeepStack features; methods gather or average them."""
        if self.deep is None:
            return self.tokens
        return jnp.concatenate([self.tokens, self.deep], axis=2)

    def keys(self, seed: int) -> Key[Array, "r"]:
        """Returns a PRNG key for each row, from `seed` and the row's image and question."""
        key = jax.random.key(seed, impl=THREEFRY)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, self.seed)


class Ranking(NamedTuple):
    """An order of the tokens; selections are its prefixes.

    Attributes:
        order: [r, t] int32 indices of tokens in the order of selection.
        margin: [r, t] stop margins before each step, see `policy.count_at_bias`; None for a method
            without a learned stop.
    """

    order: Int[Array, "r t"]
    margin: Float[Array, "r t"] | None = None


class LayerCut(NamedTuple):
    """A place between layers where a pruner drops tokens.

    Attributes:
        layer: number of layers before the cut, at least 1.
        taps: intermediates of the language model that the selection depends on: of the layers since
            the previous cut, and the attention of the layer after this cut.
        rows: queries of "attention" and "scores" taps. "last": the prompt's last token, or the
            `LayerPruner.probe` after it. "text": the last tokens of each row, whose number is the
            length of the longest text; see `models.sequence.last_slots`.
        prunes_cache: whether the caches of the layers before the cut lose the dropped tokens.
    """

    layer: int
    taps: tuple[Tap, ...] = ()
    rows: str = "last"
    prunes_cache: bool = False


class Survivors(NamedTuple):
    """Number of tokens of an image that remain after a cut.

    Attributes:
        kept: number of tokens that were there before the cut.
        merged: number of tokens that dropped tokens were merged into.
    """

    kept: int
    merged: int = 0


class Schedule(NamedTuple):
    """Numbers of tokens of an image in the language model.

    Attributes:
        enter: tokens before the first layer; None if their number depends on more than the image's
            size.
        most: the largest number of tokens before the first layer.
        after: the tokens that remain after each cut.
    """

    enter: int | None
    most: int
    after: tuple[Survivors, ...] = ()

    @property
    def bound(self) -> int:
        """The number of tokens before the first layer, or its upper bound if it is unknown."""
        return self.most if self.enter is None else self.enter
