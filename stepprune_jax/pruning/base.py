"""The interface of all pruning methods: what a method sees, what it keeps, and where.

A `Pruner` is a frozen dataclass with pure functions, and a pytree: it is an argument of the
programs that use it, with the weights of a trained method as its leaves. It chooses before the
language model (`keep`), between its layers (`cuts`, `drop`), or both. A `Ranker` puts tokens in an
order whose prefixes are its choices, so that one pass serves every budget.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import POSITIONS as MODEL_POSITIONS
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.policy import Picks, gather
from stepprune_jax.policy.jax_settings import THREEFRY
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.pruning.ordering import keep_best
from stepprune_jax.user_input import UserError, require

# Choices of position ids for kept tokens; "own" is what the method's authors use.
POSITIONS = (*MODEL_POSITIONS, "own")

# The end of a message about a method or a budget.
BUDGETS_PAGE = "see 'Choose a method' and 'Budgets' in docs/pruners.md"

AnyPruner = TypeVar("AnyPruner", bound="Pruner")


class PrunerInputs(NamedTuple):
    """Inputs of a pruner; a row is an (image, prompt) pair.

    Attributes:
        tokens: [r, n, d] visual tokens in raster order, before the projector; after it for pruners
            that are `after_projector`.
        valid: [r, n] True = token, a prefix of each row; None where all are.
        grid: [r, 2] int32 rows and columns of the image's patches.
        text: [r, l, e] word embeddings of the user's turns.
        text_valid: [r, l] True = word.
        number: [r] int32 number of its prompt in its set.
        seed: [r] uint32 checksum of image and question, the seed of its random draws.
        count: [r] int32 tokens to keep, where the budget is exact.
        taps: intermediates of the tower, in the order of `Pruner.taps`.
        deep: [r, n, D] deep features of each token, which travel with it and are not compared; None
            for a model without them.
    """

    tokens: Float[Array, "r n d"]
    valid: Bool[Array, "r n"] | None
    grid: Int[Array, "r 2"]
    text: Float[Array, "r l e"]
    text_valid: Bool[Array, "r l"]
    number: Int[Array, "r"]
    seed: UInt32[Array, "r"]
    count: Int[Array, "r"]
    taps: tuple[Array, ...] = ()
    deep: Float[Array, "r n D"] | None = None

    @property
    def whole(self) -> Float[Array, "r n w"]:
        """The tokens with their deep features behind them: what is kept, added or averaged."""
        if self.deep is None:
            return self.tokens
        return jnp.concatenate([self.tokens, self.deep], axis=2)

    def keys(self, seed: int) -> Key[Array, "r"]:
        """Returns a PRNG key for each row, of `seed` and of what the row shows."""
        key = jax.random.key(seed, impl=THREEFRY)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, self.seed)


class Kept(NamedTuple):
    """The tokens that enter the language model, padded to a static size; real ones come first.

    Attributes:
        index: [r, k] int32 index of each among the image's n; -1 for merged and added tokens, and
            in the padding.
        place: [r, k] int32 index of the image token whose position ids it has.
        tokens: [r, k, w] the tokens, of the same kind as `PrunerInputs.whole`; zero in the padding.
        valid: [r, k] True = token.
        count: [r] int32 their number.
        order: [r, t] int32 the indices in order of choice, -1 in the padding; None for a method
            that chooses a set.
        note: [r, k, w] values of each token for `LayerPruner.drop`; None if it needs none.
    """

    index: Int[Array, "r k"]
    place: Int[Array, "r k"]
    tokens: Float[Array, "r k w"]
    valid: Bool[Array, "r k"]
    count: Int[Array, "r"]
    order: Int[Array, "r t"] | None = None
    note: Float[Array, "r k w"] | None = None


class Ranking(NamedTuple):
    """An order of the tokens; choices are its prefixes.

    Attributes:
        order: [r, t] int32 indices in order of choice.
        margin: [r, t] stop margins before each step, see `policy.count_at_bias`; None for a method
            without a learned stop.
    """

    order: Int[Array, "r t"]
    margin: Float[Array, "r t"] | None = None


class LayerCut(NamedTuple):
    """A place between layers where a pruner drops tokens.

    Attributes:
        layer: number of layers before it, at least 1.
        taps: intermediates of the language model that the choice depends on: of the layers since
            the previous cut, and the attention of the layer after it.
        rows: queries of "attention" and "scores" taps: "last", that of the prompt's last token or
            of the `probe` behind it, or "text", as many last tokens as the longest text has, which
            are `models.sequence.last_slots`.
        forgets: whether the caches of the layers before it lose the dropped tokens, too.
    """

    layer: int
    taps: tuple[Tap, ...] = ()
    rows: str = "last"
    forgets: bool = False


class Survivors(NamedTuple):
    """Number of tokens of an image that remain after a cut.

    Attributes:
        kept: tokens kept of those before it.
        merged: additional tokens that dropped ones were merged into.
    """

    kept: int
    merged: int = 0


class Schedule(NamedTuple):
    """How many tokens of an image are in the language model.

    Attributes:
        enter: tokens that enter it; None if that depends on more than the image's size.
        most: the most tokens that may enter it.
        after: the tokens that remain after each cut between its layers.
    """

    enter: int | None
    most: int
    after: tuple[Survivors, ...] = ()

    @property
    def bound(self) -> int:
        """The tokens that enter, or the most that may where their number is not known."""
        return self.most if self.enter is None else self.enter


@dataclasses.dataclass(frozen=True)
class Pruner:
    """Base class of pruning methods, which keeps everything.

    Subclasses are frozen dataclasses that add their options as fields, and override the methods in
    which they differ. Every subclass is a pytree: the fields that `leaves` names are its children,
    all others are static.

    Attributes:
        budget: tokens to keep per image: a `Budget`, or what `Budget.parse` reads, such as 64,
            "1/9" or "adaptive"; None for `default_budget`.
    """

    budget: Any = None  # a `Budget` after construction

    name: ClassVar[str]
    # Its name in tables.
    label: ClassVar[str]
    # The fields that are numbers, arrays or trees of arrays.
    leaves: ClassVar[tuple[str, ...]] = ()
    # Supported kinds of budgets.
    budgets: ClassVar[tuple[str, ...]] = ("all", *EXACT)
    # Options that set the number of tokens in place of a budget.
    schedules: ClassVar[tuple[str, ...]] = ()
    # Position ids of kept tokens in the authors' program, for models with one id per token.
    positions: ClassVar[str] = "original"
    # Whether it reads the user's text.
    reads_text: ClassVar[bool] = False
    # Whether it sees and returns projected tokens instead of those before the projector.
    after_projector: ClassVar[bool] = False
    # Whether its tokens are random ones, by an option `seed`, which commands set to their own.
    is_random: ClassVar[bool] = False
    # The class of its configuration, for a pruner with weights.
    config_type: ClassVar[type | None] = None
    # Whether it has a learned stop, and so stop biases and mean budgets.
    has_stop: ClassVar[bool] = False
    # Incremented when the choice of tokens changes, so that answers are not mixed.
    version: ClassVar[int] = 1

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
        )

    def __post_init__(self):
        budget = self.budget
        if budget is None:
            budget = self.default_budget(
                name for name in self.schedules if getattr(self, name) is not None
            )
        object.__setattr__(self, "budget", Budget.parse(budget))

    def with_budget(self: AnyPruner, budget: Budget | int | str | None) -> AnyPruner:
        """Returns a copy with another budget, as `Budget.parse` reads it; None as at first."""
        return dataclasses.replace(self, budget=budget)

    @classmethod
    def default_budget(cls, options: Iterable[str] = ()) -> Budget:
        """Returns the budget of a pruner that is built without one.

        It is "adaptive" for a method that decides the number, and "all" for a method that keeps all
        tokens, or whose `options` are a schedule of numbers. Any other method needs a budget: its
        budget is "unset", which `check` refuses.
        """
        if "adaptive" in cls.budgets:
            return Budget("adaptive")
        decides = cls.budgets == ("all",) or bool({*cls.schedules} & {*options})
        return Budget("all" if decides else "unset")

    @property
    def without_weights(self: AnyPruner) -> AnyPruner:
        """A copy without arrays, which can be hashed: a key for what depends on the method."""
        arrays = [name for name in self.leaves if name != "budget"]
        return dataclasses.replace(self, **dict.fromkeys(arrays)) if arrays else self

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Checks budget, options and model before anything is loaded.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Raises:
            ValueError: an unsupported budget or option, or a model that lacks an intermediate.
        """
        budget = self.budget
        self.require_kind(budget)
        if budget.kind in EXACT:
            most = self.schedule(config, num_tokens).most
            count = budget.number if budget.kind == "count" else budget.exact_count(num_tokens)
            self.expect("budget", count <= most, f"at most {most} of {num_tokens} visual tokens")

    @property
    def budget_counts(self) -> str:
        """What a budget counts, in words for those who compare methods."""
        return "tokens of an image that enter the language model"

    @classmethod
    def require_kind(cls, budget: Budget) -> None:
        """Raises a UserError unless budgets of this kind are supported."""
        if budget.kind == "unset":
            remedy = f"(budget=64 in Python, --budget 64); {BUDGETS_PAGE}"
            raise UserError(f"the pruner {cls.name!r} needs a budget {remedy}")
        if budget.kind not in cls.budgets:
            raise UserError(
                f"{cls.name} does not support the budget {budget}, only {', '.join(cls.budgets)}"
            )

    def expect(self, option: str, fits: bool, expected: str) -> None:
        """Raises a UserError that names the option and what was `expected`, unless it fits."""
        value = getattr(self, option)
        shown = str(value) if isinstance(value, Budget) else repr(value)
        require(fits, f"{self.name}: {option} is {shown}, expected {expected}")

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts an image's tokens in the language model; all other counts derive from it.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image.

        Returns:
            The counts, with an entry of `Schedule.after` for each of `cuts`.
        """
        return Schedule(self.budget.count(num_tokens), num_tokens)

    def method_positions(self, config: ModelConfig) -> str:
        """Returns `positions`, or "original" in a model whose tokens have several ids each."""
        return self.positions if config.position_axes == 1 else "original"

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the intermediates of the tower that it needs."""
        return ()

    def program(self) -> "Pruner":
        """Returns the pruner without its exact count, on which no compiled program depends.

        `keep` reads exact counts from the view, and `drop` takes them as an argument, so that all
        counts share programs.
        """
        return dataclasses.replace(self, budget=Budget()) if self.budget.kind in EXACT else self

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Chooses the tokens that enter the language model.

        Args:
            view: inputs of the pruner.
            capacity: static size of the result; at least every row's count.

        Returns:
            The kept tokens.
        """
        (r, n), valid = view.tokens.shape[:2], view.valid
        count = jnp.full(r, n, jnp.int32) if valid is None else valid.sum(1, dtype=jnp.int32)
        index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (r, n))
        if valid is None and capacity == n:
            return Kept(index, index, view.whole, jnp.ones((r, n), bool), count)
        return take(view.whole, index, count, capacity)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the layers of the language model before which it drops tokens.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Returns:
            The cuts, from the first layer to the last.
        """
        return ()

    def layer_tokens(
        self, config: ModelConfig, num_tokens: int, kept: int | None = None
    ) -> list[int]:
        """Counts the tokens of an image that enter each layer of the language model.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image.
            kept: how many of them it has kept, if it decides; by default the most.

        Returns:
            A count for each layer, as `flops.llm_flops` takes them once the text is added.
        """
        enter = self.schedule(config, num_tokens).enter
        if enter is None:
            enter = num_tokens if kept is None else kept
        cuts, counts = self.cuts(config, num_tokens), [enter] * config.text.num_layers
        for cut, left in zip(cuts, self.schedule(config, enter).after, strict=True):
            counts[cut.layer :] = [sum(left) if kept is None else kept] * (len(counts) - cut.layer)
        return counts


def _flatten(pruner: Pruner) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the children of a pruner, and its static fields."""
    names = [field.name for field in dataclasses.fields(pruner) if field.name not in pruner.leaves]
    children = tuple(getattr(pruner, name) for name in pruner.leaves)
    return children, tuple(getattr(pruner, name) for name in names)


def _flatten_with_keys(pruner: Pruner) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the children of a pruner with the names of their fields, and its static fields."""
    children, static = _flatten(pruner)
    keys = map(jax.tree_util.GetAttrKey, pruner.leaves)
    return tuple(zip(keys, children, strict=True)), static


def _unflatten(cls: type[Pruner], static: tuple[Any, ...], children: Iterable[Any]) -> Pruner:
    """Builds a pruner without checks: its children may be tracers, or anything a tree may hold."""
    pruner = object.__new__(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.name not in cls.leaves]
    for name, value in zip((*names, *cls.leaves), (*static, *children), strict=True):
        object.__setattr__(pruner, name, value)
    return pruner


class Ranker(Pruner, abc.ABC):
    """A pruner that puts tokens in an order and keeps a prefix of it."""

    @abc.abstractmethod
    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Puts the tokens of each row in an order.

        Args:
            view: inputs of the pruner.
            steps: static length of the order.

        Returns:
            The order, and the margins of a learned stop.
        """

    def counts(self, ranking: Ranking, exact: Int[ArrayLike, "r"]) -> Int[ArrayLike, "r"]:
        """Returns the length of the prefix kept of each row's order; runs on the host.

        Args:
            ranking: the orders.
            exact: [r] tokens that enter of each row's image, or the image's number of tokens where
                a learned stop decides.

        Returns:
            [r] counts.
        """
        return exact

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps the first `view.count` tokens of the order, in raster order."""
        ranking = self.rank(view, capacity)
        return take_first(view.whole, ranking.order, view.count, capacity)


class LayerPruner(Pruner, abc.ABC):
    """A pruner that passes all tokens to the language model and drops some between its layers."""

    average: bool = False  # whether its budget is a mean over layers, of one with the option

    @property
    def budget_counts(self) -> str:
        """The tokens after the last cut, or their mean over layers with the option `average`."""
        if self.average:
            return "the mean over all layers of an image's tokens"
        return "tokens of an image after the last cut between layers"

    @abc.abstractmethod
    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cuts; as in `Pruner`, but at least one."""

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts all tokens before a single cut, and the budget after it."""
        left = Survivors(self.budget.exact_count(num_tokens))
        return Schedule(num_tokens, num_tokens, (left,))

    def probe(self) -> Float[Array, "layers e"] | None:
        """Returns vectors of a token behind each prompt before a cut; see `models.vlm.Cut`."""
        return None

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Scores all slots at a cut; the best of each image remain, unless `drop` is overridden.

        By default by the attention of the last token in the only tap, averaged over heads.

        Args:
            sequence: the rows before it.
            taps: the cut's intermediates by name.
        """
        (attention,) = taps.values()
        return attention[:, :, 0].mean(1)

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Chooses the tokens that remain after a cut.

        Args:
            cut: the cut.
            sequence: the rows before it.
            taps: the cut's intermediates by name.
            count: [b, j] tokens to keep of each image, not counting merged ones: `Survivors.kept`.

        Returns:
            The rows, whose visual tokens may have been merged, and which slots remain; text always
            does.
        """
        return sequence, keep_best(self.scores(sequence, taps), sequence.image, count)


def take(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """Applies `take_first` for a method that chooses a set."""
    return take_first(tokens, order, count, capacity)._replace(order=None)


def take_first(
    tokens: Float[Array, "r n d"],
    order: Int[Array, "r t"],
    count: Int[Array, "r"],
    capacity: int,
) -> Kept:
    """Gathers the first `count` tokens of an order, in raster order; past `capacity` none."""
    return from_picks(tokens, first_picks(order, count, tokens.shape[1]), capacity)


def from_picks(tokens: Float[Array, "r n d"], picks: Picks, capacity: int) -> Kept:
    """Gathers the picked tokens, in raster order; past `capacity` none."""
    order = jnp.where(picks.action < tokens.shape[1], picks.action, -1)[:, :capacity]
    index, tokens, valid, count = gather(picks, tokens, capacity)
    return Kept(index, jnp.maximum(index, 0), tokens, valid, count, order)
