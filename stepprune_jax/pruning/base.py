"""One interface to every way of pruning: what a method sees, what it keeps, and where.

A `Pruner` is a frozen, hashable configuration with pure functions. It chooses before the language
model (`select`), between its layers (`cuts`, `drop`), or both. A `Ranker` puts tokens in an order
whose prefixes are its choices, so that one pass serves every budget. What a trained method has
learned comes as an argument. Nothing outside this package asks which method it runs.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.vlm import Sequence
from stepprune_jax.policy import FeatureStats
from stepprune_jax.pruning.budget import EXACT, Budget

# Position ids of kept tokens that a user may ask for; "own" is `own_positions`.
POSITIONS = (*vlm.POSITIONS, "own")


class View(NamedTuple):
    """What a pruner sees: one row is one (image, prompt).

    Attributes:
        tokens: [r, n, d] visual tokens before the projector, row by row of the image's grid; behind
            it for pruners that are `after_projector`.
        valid: [r, n] True = token, a prefix of each row; None where all are.
        grid: [r, 2] int32 rows and columns of the image's patches.
        text: [r, l, e] word embeddings of what the user said.
        text_valid: [r, l] True = word.
        number: [r] int32 number of the row in its set, for draws that depend on nothing else.
        count: [r] int32 tokens to keep, where the budget is exact.
        taps: intermediates of the tower, in the order of `Pruner.taps`.
    """

    tokens: Float[Array, "r n d"]
    valid: Bool[Array, "r n"] | None
    grid: Int[Array, "r 2"]
    text: Float[Array, "r l e"]
    text_valid: Bool[Array, "r l"]
    number: Int[Array, "r"]
    count: Int[Array, "r"]
    taps: tuple[Array, ...] = ()


class Kept(NamedTuple):
    """The tokens that enter the language model, padded to a static size; real ones come first.

    Attributes:
        index: [r, k] int32 index of each among the image's n; -1 for merged and added tokens, and
            in the padding.
        place: [r, k] int32 the token of the image whose position ids it has.
        tokens: [r, k, d] the tokens, of the same kind as those of the `View`; zero in the padding.
        valid: [r, k] True = token.
        count: [r] int32 their number.
        order: [r, t] int32 the indices in order of choice, -1 in the padding; None for a method
            that chooses a set.
    """

    index: Int[Array, "r k"]
    place: Int[Array, "r k"]
    tokens: Float[Array, "r k d"]
    valid: Bool[Array, "r k"]
    count: Int[Array, "r"]
    order: Int[Array, "r t"] | None = None


class Ranking(NamedTuple):
    """An order of the tokens; choices are its prefixes.

    Attributes:
        order: [r, t] int32 indices in order of choice.
        margin: [r, t] stop margins before each step, see `policy.count_at_bias`; None for a method
            without a learned stop.
    """

    order: Int[Array, "r t"]
    margin: Float[Array, "r t"] | None = None


class Trained(NamedTuple):
    """What a trained pruner has learned: the `params` of its functions.

    Attributes:
        weights: tree of arrays.
        stats: statistics of the features it was trained with, or None.
        stop_bias: added to the stop logits.
    """

    weights: dict[str, Any]
    stats: FeatureStats | None
    stop_bias: Any = 0.0


@dataclasses.dataclass(frozen=True)
class Pruner:
    """A way to prune; the base class keeps everything.

    Subclasses add their options as fields and override what they do otherwise.

    Attributes:
        budget: tokens to keep of each image.
    """

    budget: Budget = Budget()

    name: ClassVar[str]
    # What tables call it.
    label: ClassVar[str]
    # Kinds of budgets that it can keep.
    budgets: ClassVar[tuple[str, ...]] = ("all", *EXACT)
    # The class of a policy's configuration, for trained methods.
    config_type: ClassVar[type | None] = None
    # Raised when it keeps other tokens than before, so that answers are not mixed.
    version: ClassVar[int] = 1
    # Whether it looks at what the user said.
    reads_text: ClassVar[bool] = False
    # Whether it sees and returns projected tokens, in place of those before the projector.
    after_projector: ClassVar[bool] = False
    # Whether it is the unpruned model at a budget of all tokens.
    exact_when_full: ClassVar[bool] = True
    # Options that say how many tokens are left, so that no budget has to.
    schedules: ClassVar[tuple[str, ...]] = ()
    # Position ids of kept tokens in its authors' program, where a token has one; see
    # `own_positions`.
    positions: ClassVar[str] = "original"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Refuses what cannot work, before anything is loaded.

        Args:
            config: the model's.
            num_tokens: tokens of its largest image.

        Raises:
            ValueError: a budget that it cannot keep, or a model without what it needs.
        """
        del config
        if self.budget.kind not in self.budgets:
            raise ValueError(
                f"{self.name} cannot keep a budget of kind {self.budget.kind!r}; it can keep "
                f"{', '.join(self.budgets)}"
            )
        most = self.most(num_tokens)
        if self.budget.kind == "count" and self.budget.number > most:
            raise ValueError(
                f"budget is {self.budget.value}, expected an integer from 1 to {most}, as many as "
                f"{self.name} can keep of {num_tokens} visual tokens"
            )
        if self.budget.kind == "rate" and self.budget.exact_count(num_tokens) > most:
            raise ValueError(
                f"budget is {self.budget}, expected a share that is at most {most} of {num_tokens} "
                f"visual tokens, as many as {self.name} can keep"
            )

    def own_positions(self, config: ModelConfig) -> str:
        """Returns the position ids of kept tokens in its authors' program for such a model.

        They are those of `vlm.assemble`. Where a token has several ids, all programs keep them.
        """
        return self.positions if config.family.POSITION_AXES == 1 else "original"

    def most(self, num_tokens: int) -> int:
        """Returns the largest count that it can keep of an image of so many tokens."""
        return num_tokens

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Names the intermediates of the tower that it needs to see."""
        del config
        return ()

    def program(self) -> "Pruner":
        """Returns what its compiled program depends on: all but a number that it is given.

        `select` finds exact counts in the view, and `drop` has them as an argument, so that all
        counts share programs. A method whose shapes follow from the number returns itself.
        """
        return dataclasses.replace(self, budget=Budget()) if self.budget.kind in EXACT else self

    def prepare(self, weights: Any) -> Any:
        """Returns the weights of a policy as its programs read them; runs once, when it is loaded.

        Args:
            weights: as the policy's file has them.
        """
        return weights

    def select(self, params: Any, view: View, capacity: int) -> Kept:
        """Chooses the tokens that enter the language model.

        Args:
            params: what it has learned; a `Trained`, or an empty tuple.
            view: what it sees.
            capacity: static size of the result; at least every row's count.

        Returns:
            What is kept.
        """
        del params
        return keep_all(view, capacity)

    def entering(self, num_tokens: int) -> int | None:
        """Returns how many tokens of an image enter the language model; None if that depends."""
        count = self.budget.count(num_tokens)
        return None if count is None else min(count, self.most(num_tokens))

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple["LayerCut", ...]:
        """Names the layers of the language model before which it drops tokens.

        Args:
            config: the model's.
            num_tokens: tokens of its largest image.

        Returns:
            The cuts, from the first layer to the last.
        """
        del config, num_tokens
        return ()

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple["Survivors", ...]:
        """Says how many tokens of an image are left behind each cut.

        Args:
            config: the model's.
            num_tokens: tokens of the image that enter the language model.

        Returns:
            One for each of `cuts`.
        """
        del config, num_tokens
        return ()

    def layer_tokens(self, config: ModelConfig, num_tokens: int) -> list[int]:
        """Counts the tokens of an image that enter each layer of the language model.

        Args:
            config: the model's.
            num_tokens: tokens of the image; with a learned stop, those that it kept.

        Returns:
            A count for each layer, as `flops.llm_flops` takes them once the text is added.
        """
        entering = self.entering(num_tokens)
        entering = num_tokens if entering is None else entering
        cuts, counts = self.cuts(config, num_tokens), [entering] * config.text.num_layers
        for cut, left in zip(cuts, self.survivors(config, entering), strict=True):
            counts[cut.layer :] = [sum(left)] * (len(counts) - cut.layer)
        return counts


class LayerCut(NamedTuple):
    """A place between layers where a pruner drops tokens.

    Attributes:
        layer: layers run before it, at least 1.
        taps: intermediates of the language model that the choice depends on: of the layers since
            the cut before this one, and the attention of the layer behind it.
        rows: queries of "attention" taps: "last", that of the prompt's last token, or "text", those
            of as many last tokens as the longest text has, which are `vlm.last_slots`.
    """

    layer: int
    taps: tuple[Tap, ...] = ()
    rows: str = "last"


class Survivors(NamedTuple):
    """How many tokens of an image are left behind a cut.

    Attributes:
        kept: of those before it.
        merged: further ones, which dropped tokens were merged into.
    """

    kept: int
    merged: int = 0


class LayerPruner(Pruner, abc.ABC):
    """A pruner that lets all tokens into the language model, and drops some between its layers."""

    def entering(self, num_tokens: int) -> int:
        """Returns n: all tokens enter."""
        return num_tokens

    @abc.abstractmethod
    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Names the places; as in `Pruner`, but there is one at least."""

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple[Survivors, ...]:
        """Returns the budget, behind a single cut."""
        del config
        return (Survivors(self.budget.exact_count(num_tokens)),)

    @abc.abstractmethod
    def drop(
        self,
        params: Any,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Chooses what stays behind a cut.

        Args:
            params: what it has learned.
            cut: which one.
            sequence: the rows before it.
            taps: the cut's intermediates by name.
            count: [b, j] tokens of each image that stay, those that others are merged into not
                counted: `Survivors.kept`.

        Returns:
            The rows, whose visual tokens may have been merged, and which slots stay. Text stays.
        """


class Ranker(Pruner, abc.ABC):
    """A pruner that puts tokens in an order and keeps a prefix of it."""

    @abc.abstractmethod
    def rank(self, params: Any, view: View, steps: int) -> Ranking:
        """Puts the tokens of each row in an order.

        Args:
            params: what it has learned.
            view: what it sees.
            steps: static length of the order.

        Returns:
            The order, and stop margins if it has learned to stop.
        """

    def counts(
        self, params: Any, ranking: Ranking, exact: Int[ArrayLike, "r"]
    ) -> Int[ArrayLike, "r"]:
        """Returns how long a prefix of each row's order is kept; runs on the host.

        Args:
            params: what it has learned.
            ranking: the orders.
            exact: [r] what `entering` returned for each row's image, and the image's own number of
                tokens where a learned stop decides.

        Returns:
            [r] counts.
        """
        del params, ranking
        return exact

    def select(self, params: Any, view: View, capacity: int) -> Kept:
        """Keeps the first `view.count` tokens of the order, in raster order."""
        ranking = self.rank(params, view, capacity)
        return take_first(view.tokens, ranking.order, view.count, capacity)


def keep_all(view: View, capacity: int) -> Kept:
    """Keeps every token of each row.

    Args:
        view: the rows.
        capacity: static size of the result, at most n.

    Returns:
        The tokens, in their order.
    """
    r, n = view.tokens.shape[:2]
    count = jnp.full(r, n, jnp.int32) if view.valid is None else view.valid.sum(1, dtype=jnp.int32)
    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (r, n))
    if view.valid is None and capacity == n:
        return Kept(index, index, view.tokens, jnp.ones((r, n), bool), count)
    return take(view.tokens, index, count, capacity)


def take(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """Gathers the first `count` tokens of an order, in raster order.

    Args:
        tokens: [r, n, d] to gather from.
        order: [r, t] indices in order of choice; what lies behind the count does not matter.
        count: [r] how many of them.
        capacity: static size of the result.

    Returns:
        What is kept. A row that keeps more than `capacity` keeps its first choices.
    """
    n = tokens.shape[1]
    picks = order[:, :capacity]
    chosen = jnp.arange(picks.shape[1]) < count[:, None]
    index = jnp.where(chosen, picks, n)
    index = jnp.pad(index, ((0, 0), (0, capacity - index.shape[1])), constant_values=n)
    index = jnp.sort(index, axis=1).astype(jnp.int32)
    valid = index < n
    place = jnp.minimum(index, n - 1)
    kept = jnp.take_along_axis(tokens, place[..., None], axis=1)
    return Kept(
        index=jnp.where(valid, index, -1),
        place=jnp.where(valid, place, 0),
        tokens=jnp.where(valid[..., None], kept, 0),
        valid=valid,
        count=valid.sum(1, dtype=jnp.int32),
    )


def take_first(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """`take` of a ranking, whose order is part of the result."""
    kept = take(tokens, order, count, capacity)
    picks = order[:, :capacity]
    chosen = jnp.arange(picks.shape[1]) < kept.count[:, None]
    return kept._replace(order=jnp.where(chosen, picks, -1).astype(jnp.int32))


def by_score(scores: Float[Array, "r n"], valid: Bool[Array, "r n"] | None) -> Int[Array, "r n"]:
    """Orders tokens by score, best first, ties by position, padding last."""
    scores = scores.astype(jnp.float32)
    if valid is not None:
        scores = jnp.where(valid, scores, jnp.finfo(jnp.float32).min)
    return jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)


def keep_best(
    scores: Float[Array, "b s"], image: Int[Array, "b s"], count: Int[Array, "b j"]
) -> Bool[Array, "b s"]:
    """Keeps text, and of each image the tokens that score best.

    Args:
        scores: [b, s] of every slot of the rows; those of text do not matter.
        image: [b, s] which image of its row a slot belongs to; -1 for text.
        count: [b, j] how many tokens of each image stay.

    Returns:
        [b, s] True = stays. Ties go to the earlier token.
    """
    # Sorted by image, then by score: the rank within an image is the distance from its first.
    order = jnp.lexsort((-scores.astype(jnp.float32), image), axis=1)
    rank = jnp.argsort(order, axis=1)
    of_image = image[..., None] == jnp.arange(count.shape[1])
    earlier = jnp.cumsum(of_image.sum(1, dtype=jnp.int32), axis=1)
    text = jnp.sum(image < 0, axis=1, keepdims=True)
    first = jnp.concatenate([text, text + earlier[:, :-1]], axis=1)
    at = jnp.maximum(image, 0)
    within = rank - jnp.take_along_axis(first, at, axis=1)
    return (image < 0) | (within < jnp.take_along_axis(count, at, axis=1))


def evenly(pool: Bool[Array, "*r n"], wanted: Int[Array, "*r"]) -> Bool[Array, "*r n"]:
    """Picks tokens that lie evenly among those of a pool.

    Args:
        pool: [..., n] True = may be picked; m of them.
        wanted: [...] how many g to pick, at most m.

    Returns:
        [..., n] True = picked: the i-th is the floor(i m / g)-th of the pool.
    """
    number = jnp.cumsum(pool, axis=-1, dtype=jnp.int32)
    wanted, size = wanted[..., None], jnp.maximum(number[..., -1:], 1)
    # How many picks lie before the k-th of the pool: the i with floor(i m / g) < k.
    before, up_to = (-(-k * wanted // size) for k in (number - 1, number))
    return pool & (up_to > before)


def ranking_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block that tells which tokens matter, by its class token or without one.

    Args:
        config: the model's.
        name: of the pruner that needs it, for the message.

    Returns:
        The block.

    Raises:
        ValueError: the tower has neither a class token nor a block that offers what tokens receive.
    """
    received = config.received_block
    return tower_block(config, name) if received is None else received


def tower_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block whose output a model projects, if its class token ranks patches.

    Args:
        config: the model's.
        name: of the pruner that needs it, for the message.

    Returns:
        The block, as taps of kind "attention" and "keys" name it.

    Raises:
        ValueError: the tower has no class token, or no block attends before the features.
    """
    block = config.class_token_block
    if block is None:
        raise ValueError(f"{name}: the model's tower has no [CLS] attention to rank patches by")
    return block
