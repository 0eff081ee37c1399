"""The interface of all pruning methods.

A `Pruner` is a frozen dataclass with pure functions, and a pytree: it is an argument of the
programs that use it, with the weights of a trained method as its leaves. A pruner selects tokens
before the language model (`keep`), between layers of the language model (`cuts`, `drop`), or both.
A `Ranker` orders the tokens once for every budget, and its selections are prefixes of the order.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.sequence import POSITIONS as MODEL_POSITIONS
from stepprune_jax.models.sequence import Kept, Sequence
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.pruning.ordering import keep_best
from stepprune_jax.pruning.packing import take, take_first
from stepprune_jax.pruning.types import LayerCut, PrunerInputs, Ranking, Schedule, Survivors
from stepprune_jax.user_input import UserError

# Choices of position ids for kept tokens; "own" selects the choice of the method's authors.
POSITIONS = (*MODEL_POSITIONS, "own")

# The end of a message about a method or a budget.
BUDGETS_PAGE = "see 'Choose a method' and 'Budgets' in docs/pruners.md"

# Annotations of functions are quoted where `help` would show long names of types. Fields of
# dataclasses are not quoted: a subclass in another module would need the same imports.
AnyPruner = TypeVar("AnyPruner", bound="Pruner")


@dataclasses.dataclass(frozen=True)
class Pruner:
    """Base class of pruning methods, which keeps all tokens.

    Subclasses are frozen dataclasses that add their options as fields, and override methods. Every
    subclass is a pytree: the fields that `leaves` names are its children, all other fields are
    static.

    Attributes:
        budget: tokens to keep per image: a `Budget`, or an argument of `Budget.parse`, such as 64,
            "1/9" or "adaptive"; None selects `default_budget`.
        name: name of the method in commands.
        label: name of the method in tables; `name` if a class does not set it.
        leaves: names of the fields that are numbers, arrays or trees of arrays.
        budgets: supported kinds of budgets.
        schedules: options that set the number of tokens in place of a budget.
        positions: position ids of kept tokens in the authors' program, for models with one id per
            token.
        reads_text: whether the method reads the user's text.
        reads_words: whether the method reads the result of `words` instead of all of the text.
        after_projector: whether the method reads and returns projected tokens, instead of tokens
            before the projector.
        keeps_images: whether images are kept entirely, because the method compares the frames of
            videos.
        reads_videos: whether the method has a meaning for videos, which have three axes.
        is_random: whether the tokens are random ones. The method then has an option `seed`, which
            commands set to their own seed.
        config_type: class of the configuration, for a pruner with weights.
        has_stop: whether the method has a learned stop, and so stop biases and mean budgets.
        version: incremented when the selected tokens change, so that answer files of two versions
            are not mixed.
    """

    budget: Any = None  # a `Budget` after construction

    name: ClassVar[str]
    label: ClassVar[str]
    leaves: ClassVar[tuple[str, ...]] = ()
    budgets: ClassVar[tuple[str, ...]] = ("all", *EXACT)
    schedules: ClassVar[tuple[str, ...]] = ()
    positions: ClassVar[str] = "original"
    reads_text: ClassVar[bool] = False
    reads_words: ClassVar[bool] = False
    after_projector: ClassVar[bool] = False
    keeps_images: ClassVar[bool] = False
    reads_videos: ClassVar[bool] = True
    is_random: ClassVar[bool] = False
    config_type: ClassVar[type | None] = None
    has_stop: ClassVar[bool] = False
    version: ClassVar[int] = 1

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if "name" in vars(cls) and "label" not in vars(cls):
            cls.label = cls.name
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
        """Returns a copy with another budget, an argument of `Budget.parse`; None resets it."""
        return dataclasses.replace(self, budget=budget)

    @classmethod
    def default_budget(cls, options: "Iterable[str]" = ()) -> Budget:
        """Returns the budget of a pruner that is built without a budget.

        Args:
            options: names of the options that are set.

        Returns:
            "adaptive" for a method that decides the number of tokens. The only budget of a method
            that has one. "all" if an option is one of `schedules`. Otherwise "unset", which
            `check` refuses.
        """
        if "adaptive" in cls.budgets:
            return Budget("adaptive")
        if len(cls.budgets) == 1:
            return Budget(cls.budgets[0])
        return Budget("all" if {*cls.schedules} & {*options} else "unset")

    @property
    def without_weights(self: AnyPruner) -> AnyPruner:
        """A hashable copy without arrays, as a key for results that depend on the method."""
        arrays = [name for name in self.leaves if name != "budget"]
        return dataclasses.replace(self, **dict.fromkeys(arrays)) if arrays else self

    def check(self, config: "ModelConfig", num_tokens: int) -> None:
        """Checks budget, options and model before anything is loaded.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Raises:
            ValueError: an unsupported budget or option, a model that lacks an intermediate, or a
                method of videos for a model that reads none.
        """
        budget = self.budget
        self.require_kind(budget)
        if self.keeps_images and not config.reads_videos:
            raise UserError(f"{self.name} prunes videos only, and the model reads images only")
        if budget.kind in EXACT:
            limit = self.schedule(config, num_tokens).most
            count = budget.number if budget.kind == "count" else budget.exact_count(num_tokens)
            self.expect("budget", count <= limit, f"at most {limit} of {num_tokens} visual tokens")

    @property
    def budget_counts(self) -> str:
        """Description of the tokens that a budget counts, for comparisons of methods."""
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

    def expect(self, option: str, is_valid: bool, expected: str) -> None:
        """Raises a UserError with the option and the `expected` values, unless it is valid."""
        if not is_valid:
            value = getattr(self, option)
            value = str(value) if isinstance(value, Budget) else repr(value)
            raise UserError(f"{self.name}: {option} is {value}, expected {expected}")

    def schedule(self, config: "ModelConfig", num_tokens: int) -> "Schedule":
        """Counts an image's tokens in the language model; all other counts follow from these.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image.

        Returns:
            The counts, with an entry of `Schedule.after` for each cut of `cuts`.
        """
        return Schedule(self.budget.count(num_tokens), num_tokens)

    def media_counts(
        self,
        counts: "Int[np.ndarray, 'r']",
        sizes: "Int[np.ndarray, 'r']",
        frames: "Int[np.ndarray, 'r']",
    ) -> "Int[np.ndarray, 'r']":
        """Adapts the numbers of tokens to keep to the temporal patches of videos; on the host.

        Args:
            counts: [r] number of tokens to keep of each image or video by the budget.
            sizes: [r] number of all tokens.
            frames: [r] number of temporal patches; 1 for an image.

        Returns:
            [r] numbers of tokens to keep. This base class does not change them.
        """
        del sizes, frames
        return counts

    def floor_counts(
        self, counts: "Int[np.ndarray, 'r']", sizes: "Int[np.ndarray, 'r']"
    ) -> "Int[np.ndarray, 'r']":
        """Returns counts with shares rounded down, as methods of videos round them."""
        if self.budget.kind != "rate":
            return counts
        share = Fraction(self.budget.number)
        return np.array([int(share * size) for size in sizes.tolist()], counts.dtype)

    def method_positions(self, config: "ModelConfig") -> str:
        """Returns `positions`, or "original" for a model whose tokens have several position ids."""
        return self.positions if config.position_axes == 1 else "original"

    def taps(self, config: "ModelConfig") -> "tuple[Tap, ...]":
        """Returns the intermediates of the tower that the method reads."""
        return ()

    def words(self, config: "ModelConfig", text: str) -> list[str]:
        """Returns the words to read of the user's text, if the method has `reads_words`.

        The words are tokenized one by one; `PrunerInputs.text` has the embeddings of their tokens.
        A model without a tokenizer has no text, so its pruners read all ids instead.

        Args:
            config: the model's configuration.
            text: the user's turns, one per line, without image marks.

        Returns:
            The words, without blanks.
        """
        return text.split()

    def program(self: AnyPruner) -> AnyPruner:
        """Returns the pruner without its exact count, so that all counts share programs.

        `keep` reads exact counts from its inputs, and `drop` gets them as an argument.
        """
        return dataclasses.replace(self, budget=Budget()) if self.budget.kind in EXACT else self

    def keep(self, inputs: "PrunerInputs", capacity: int) -> "Kept":
        """Selects the tokens that enter the language model.

        Args:
            inputs: inputs of the pruner.
            capacity: static size k of the result; at least every row's count.

        Returns:
            The kept tokens.
        """
        # This base class keeps all tokens.
        r, n = inputs.tokens.shape[:2]
        index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (r, n))
        if inputs.mask is None and capacity == n:  # without padding, no token has to be gathered
            return Kept(index, index, inputs.whole, inputs.valid, jnp.full(r, n, jnp.int32))
        return take(inputs.whole, index, inputs.valid.sum(1, dtype=jnp.int32), capacity)

    def cuts(self, config: "ModelConfig", num_tokens: int) -> "tuple[LayerCut, ...]":
        """Returns the layers of the language model before which the method drops tokens.

        Args:
            config: the model's configuration.
            num_tokens: tokens of its largest image.

        Returns:
            The cuts, from the first layer to the last.
        """
        return ()

    def layer_tokens(
        self, config: "ModelConfig", num_tokens: int, kept: int | None = None
    ) -> list[int]:
        """Counts the tokens of an image that enter each layer of the language model.

        Args:
            config: the model's configuration.
            num_tokens: tokens of the image.
            kept: number of tokens that a learned stop kept; None for a method without one.

        Returns:
            The number of visual tokens in each layer. After text tokens are added,
            `flops.llm_flops` takes these numbers.
        """
        first_count = self.schedule(config, num_tokens).enter
        if first_count is None:
            first_count = num_tokens if kept is None else kept
        cuts, counts = self.cuts(config, num_tokens), [first_count] * config.text.num_layers
        for cut, survivors in zip(cuts, self.schedule(config, first_count).after, strict=True):
            count = sum(survivors) if kept is None else kept
            counts[cut.layer :] = [count] * (len(counts) - cut.layer)
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
    """Builds a pruner without checks, because its children may be tracers."""
    pruner = object.__new__(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.name not in cls.leaves]
    for name, value in zip((*names, *cls.leaves), (*static, *children), strict=True):
        object.__setattr__(pruner, name, value)
    return pruner


class Ranker(Pruner, abc.ABC):
    """A pruner that orders the tokens and keeps a prefix of the order."""

    @abc.abstractmethod
    def rank(self, inputs: "PrunerInputs", steps: int) -> "Ranking":
        """Orders the tokens of each row.

        Args:
            inputs: inputs of the pruner.
            steps: static length of the order.

        Returns:
            The order, and the margins of a learned stop.
        """

    def counts(self, ranking: "Ranking", exact: "Int[ArrayLike, 'r']") -> "Int[ArrayLike, 'r']":
        """Returns the number of tokens kept of each row's order; runs on the host.

        Args:
            ranking: the orders.
            exact: [r] number of tokens that enter the language model; the number of the image's
                tokens where a learned stop decides.

        Returns:
            [r] counts.
        """
        return exact

    def keep(self, inputs: "PrunerInputs", capacity: int) -> "Kept":
        """Keeps the first `inputs.count` tokens of the order, in raster order."""
        ranking = self.rank(inputs, capacity)
        return take_first(inputs.whole, ranking.order, inputs.count, capacity)


class LayerPruner(Pruner, abc.ABC):
    """A pruner that passes all tokens to the language model and drops tokens between layers.

    Attributes:
        average: whether the budget is a mean over layers; an option of some subclasses.
    """

    average: bool = False

    @property
    def budget_counts(self) -> str:
        """Description: the tokens after the last cut, or their mean over layers if `average`."""
        if self.average:
            return "the mean over all layers of an image's tokens"
        return "tokens of an image after the last cut between layers"

    @abc.abstractmethod
    def cuts(self, config: "ModelConfig", num_tokens: int) -> "tuple[LayerCut, ...]":
        """Returns the cuts; as in `Pruner`, but at least one."""

    def schedule(self, config: "ModelConfig", num_tokens: int) -> "Schedule":
        """Counts all tokens before a single cut, and the budget after it."""
        survivors = Survivors(self.budget.exact_count(num_tokens))
        return Schedule(num_tokens, num_tokens, (survivors,))

    def probe(self) -> "Float[Array, 'layers e'] | None":
        """Returns the vectors of the `models.vlm.Cut.probe`; None for a method without a probe."""
        return None

    def scores(self, sequence: Sequence, taps: "dict[str, Array]") -> "Float[Array, 'b s']":
        """Scores all tokens at a cut; `drop` keeps the tokens of each image with the best scores.

        The default score is the attention of the prompt's last token, averaged over heads. It needs
        a cut with this attention as its only tap.

        Args:
            sequence: b padded sequences of s slots (positions) with hidden states before the cut.
            taps: the intermediates that the cut requests, by name.

        Returns:
            [b, s] scores.
        """
        (attention,) = taps.values()
        return attention[:, :, 0].mean(1)

    def drop(
        self,
        cut: "LayerCut",
        sequence: Sequence,
        taps: "dict[str, Array]",
        count: "Int[Array, 'b j']",
    ) -> "tuple[Sequence, Bool[Array, 'b s']]":
        """Selects the tokens that remain after a cut, which is a place between two layers.

        Args:
            cut: one of `cuts`.
            sequence: b padded sequences of s slots (positions) with hidden states before the cut.
            taps: the intermediates that the cut requests, by name.
            count: [b, j] number of tokens to keep of each of a sequence's j images, without merged
                tokens: `Survivors.kept`.

        Returns:
            The sequences, whose visual tokens may have been merged, and [b, s] True at the slots
            that remain. Text always remains.
        """
        return sequence, keep_best(self.scores(sequence, taps), sequence.image, count)
