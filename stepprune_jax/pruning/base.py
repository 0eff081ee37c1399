"""The interface of all pruning methods: what a method sees, what it keeps, and where.

A `Pruner` is a frozen, hashable configuration with pure functions. It chooses before the language
model (`select`), between its layers (`cuts`, `drop`), or both. A `Ranker` puts tokens in an order
whose prefixes are its choices, so that one pass serves every budget. The trained parameters of a
method are arguments. No code outside this package depends on which method it runs.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap, map_queries
from stepprune_jax.models.vlm import Sequence
from stepprune_jax.policy import FeatureStats
from stepprune_jax.pruning.budget import EXACT, Budget

# Choices of position ids for kept tokens; "own" is `own_positions`.
POSITIONS = (*vlm.POSITIONS, "own")


class View(NamedTuple):
    """Inputs of a pruner; a row is an (image, prompt) pair.

    Attributes:
        tokens: [r, n, d] visual tokens in raster order, before the projector; after it for pruners
            that are `after_projector`.
        valid: [r, n] True = token, a prefix of each row; None where all are.
        grid: [r, 2] int32 rows and columns of the image's patches.
        text: [r, l, e] word embeddings of the user's turns.
        text_valid: [r, l] True = word.
        number: [r] int32 number of the row in its set, the seed of its random draws.
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
        place: [r, k] int32 index of the image token whose position ids it has.
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
    """Parameters of a trained pruner: the `params` of its functions.

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
    """Base class of pruning methods, which keeps everything.

    Subclasses add their options as fields and override the methods in which they differ.

    Attributes:
        budget: tokens to keep per image.
    """

    budget: Budget = Budget()

    name: ClassVar[str]
    # Its name in tables.
    label: ClassVar[str]
    # Supported kinds of budgets.
    budgets: ClassVar[tuple[str, ...]] = ("all", *EXACT)
    # The class of a policy's configuration, for trained methods.
    config_type: ClassVar[type | None] = None
    # Incremented when the choice of tokens changes, so that answers are not mixed.
    version: ClassVar[int] = 1
    # Whether it reads the user's text.
    reads_text: ClassVar[bool] = False
    # Whether it sees and returns projected tokens instead of those before the projector.
    after_projector: ClassVar[bool] = False
    # Whether a budget of all tokens gives the unpruned model.
    exact_when_full: ClassVar[bool] = True
    # Options that set the number of tokens in place of a budget.
    schedules: ClassVar[tuple[str, ...]] = ()
    # Position ids of kept tokens in the authors' program, for models with one id per token; see
    # `own_positions`.
    positions: ClassVar[str] = "original"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Checks budget, options and model before anything is loaded.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Raises:
            ValueError: an unsupported budget or option, or a model that lacks an intermediate.
        """
        del config
        if self.budget.kind not in self.budgets:
            raise ValueError(
                f"{self.name} does not support a budget of kind {self.budget.kind!r}, only "
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
        """Returns how the authors' program sets the position ids of kept tokens for such a model.

        The values are those of `vlm.assemble`. Where a token has several ids, all programs keep
        them.
        """
        return self.positions if config.family.POSITION_AXES == 1 else "original"

    def most(self, num_tokens: int) -> int:
        """Returns the largest count it can keep of an image with `num_tokens` tokens."""
        return num_tokens

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the intermediates of the tower that it needs."""
        del config
        return ()

    def program(self) -> "Pruner":
        """Returns the pruner without its exact count, on which no compiled program depends.

        `select` reads exact counts from the view, and `drop` takes them as an argument, so that all
        counts share programs. A method whose shapes depend on the count returns itself.
        """
        return dataclasses.replace(self, budget=Budget()) if self.budget.kind in EXACT else self

    def prepare(self, weights: Any) -> Any:
        """Returns the weights of a policy as its programs read them; runs once, when it is loaded.

        Args:
            weights: weights as in the policy's file.
        """
        return weights

    def select(self, params: Any, view: View, capacity: int) -> Kept:
        """Chooses the tokens that enter the language model.

        Args:
            params: trained parameters: a `Trained`, or an empty tuple.
            view: inputs of the pruner.
            capacity: static size of the result; at least every row's count.

        Returns:
            The kept tokens.
        """
        del params
        return keep_all(view, capacity)

    def entering(self, num_tokens: int) -> int | None:
        """Returns how many tokens of an image enter the language model; None if data-dependent."""
        count = self.budget.count(num_tokens)
        return None if count is None else min(count, self.most(num_tokens))

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple["LayerCut", ...]:
        """Returns the layers of the language model before which it drops tokens.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Returns:
            The cuts, from the first layer to the last.
        """
        del config, num_tokens
        return ()

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple["Survivors", ...]:
        """Returns how many tokens of an image remain after each cut.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image that enter the language model.

        Returns:
            One entry for each of `cuts`.
        """
        del config, num_tokens
        return ()

    def layer_tokens(self, config: ModelConfig, num_tokens: int) -> list[int]:
        """Counts the tokens of an image that enter each layer of the language model.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image; with a learned stop, those kept.

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
        layer: number of layers before it, at least 1.
        taps: intermediates of the language model that the choice depends on: of the layers since
            the previous cut, and the attention of the layer after it.
        rows: queries of "attention" taps: "last", that of the prompt's last token, or "text", as
            many last tokens as the longest text has, which are `vlm.last_slots`.
    """

    layer: int
    taps: tuple[Tap, ...] = ()
    rows: str = "last"


class Survivors(NamedTuple):
    """Number of tokens of an image that remain after a cut.

    Attributes:
        kept: tokens kept of those before it.
        merged: additional tokens that dropped ones were merged into.
    """

    kept: int
    merged: int = 0


class LayerPruner(Pruner, abc.ABC):
    """A pruner that passes all tokens to the language model and drops some between its layers."""

    def entering(self, num_tokens: int) -> int:
        """Returns n: all tokens enter."""
        return num_tokens

    @abc.abstractmethod
    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cuts; as in `Pruner`, but at least one."""

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple[Survivors, ...]:
        """Returns the budget, after a single cut."""
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
        """Chooses the tokens that remain after a cut.

        Args:
            params: trained parameters.
            cut: the cut.
            sequence: the rows before it.
            taps: the cut's intermediates by name.
            count: [b, j] tokens to keep of each image, not counting merged ones: `Survivors.kept`.

        Returns:
            The rows, whose visual tokens may have been merged, and which slots remain; text always
            does.
        """


class Ranker(Pruner, abc.ABC):
    """A pruner that puts tokens in an order and keeps a prefix of it."""

    @abc.abstractmethod
    def rank(self, params: Any, view: View, steps: int) -> Ranking:
        """Puts the tokens of each row in an order.

        Args:
            params: trained parameters.
            view: inputs of the pruner.
            steps: static length of the order.

        Returns:
            The order, and the margins of a learned stop.
        """

    def counts(
        self, params: Any, ranking: Ranking, exact: Int[ArrayLike, "r"]
    ) -> Int[ArrayLike, "r"]:
        """Returns the length of the prefix kept of each row's order; runs on the host.

        Args:
            params: trained parameters.
            ranking: the orders.
            exact: [r] result of `entering` for each row's image, or the image's number of tokens
                where a learned stop decides.

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
        tokens: [r, n, d] tokens to gather from.
        order: [r, t] indices in order of choice; those past the count are ignored.
        count: [r] number of tokens to keep.
        capacity: static size of the result.

    Returns:
        The kept tokens. A row that keeps more than `capacity` keeps its first choices.
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
    """Applies `take` to a ranking, and returns its order with the result."""
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
    """Keeps text, and the best-scoring tokens of each image.

    Args:
        scores: [b, s] score of every slot; those of text are ignored.
        image: [b, s] number of the slot's image in its row; -1 for text.
        count: [b, j] tokens to keep of each image.

    Returns:
        [b, s] True = kept. Ties go to the earlier token.
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
    """Picks evenly spaced tokens from a pool.

    Args:
        pool: [..., n] True = may be picked; m of them.
        wanted: [...] number g to pick, at most m.

    Returns:
        [..., n] True = picked: the i-th is the floor(i m / g)-th of the pool.
    """
    number = jnp.cumsum(pool, axis=-1, dtype=jnp.int32)
    wanted, size = wanted[..., None], jnp.maximum(number[..., -1:], 1)
    # How many picks lie before the k-th of the pool: the i with floor(i m / g) < k.
    before, up_to = (-(-k * wanted // size) for k in (number - 1, number))
    return pool & (up_to > before)


def map_tokens(
    function: Callable[..., Array], tokens: Float[Array, "r n c"], *by_token: Array
) -> Array:
    """Compares tokens with all others, some at a time if they are many; see `map_queries`.

    Args:
        function: maps some tokens [r, q, c], and their part of each of `by_token`, to [r, q, ...].
        tokens: [r, n, c] the tokens.
        by_token: [r or 1, n] arrays.

    Returns:
        [r, n, ...] the results.
    """
    parts = map_queries(lambda part, *own: function(part[:, 0], *own), tokens[:, None], *by_token)
    parts = jnp.moveaxis(parts, 0, 1)
    return parts.reshape(len(tokens), -1, *parts.shape[3:])[:, : tokens.shape[1]]


def group_means(
    values: Float[Array, "r n c"], group: Int[Array, "r n"], wanted: Int[Array, "#r n"]
) -> Float[Array, "r n c"]:
    """Averages values over groups of tokens, in a fixed order, unlike a scatter on a GPU.

    Args:
        values: [r, n, c] float32 values of each token.
        group: [r, n] number of each token's group.
        wanted: [r or 1, n] numbers of groups.

    Returns:
        [r, n, c] mean of each wanted group; 0 for one without tokens.
    """

    def mean(_: Array, wanted: Int[Array, "#r q"]) -> Float[Array, "r q c"]:
        member = (wanted[..., None] == group[:, None]).astype(jnp.float32)
        total = jnp.einsum("rqn,rnc->rqc", member, values, precision=lax.Precision.HIGHEST)
        return total / jnp.maximum(1, member.sum(2, keepdims=True))

    return map_tokens(mean, values, wanted)


def ranking_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block that ranks tokens, with or without a class token.

    Args:
        config: the model's configuration.
        name: name of the pruner, for the message.

    Returns:
        The block.

    Raises:
        ValueError: the tower has neither a class token nor a block with received attention.
    """
    received = config.received_block
    return tower_block(config, name) if received is None else received


def tower_block(config: ModelConfig, name: str) -> int:
    """Finds the tower's block whose output is projected, if its class token ranks patches.

    Args:
        config: the model's configuration.
        name: name of the pruner, for the message.

    Returns:
        The block's number in taps of kind "attention" and "keys".

    Raises:
        ValueError: the tower has no class token, or no block attends before the features.
    """
    block = config.class_token_block
    if block is None:
        raise ValueError(f"{name}: the model's tower has no [CLS] attention to rank patches by")
    return block
