"""Methods with weights: a pruner that carries them, and what training asks of one that selects."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy import (
    FeatureStats,
    Inputs,
    Limits,
    OwnStop,
    Picks,
    PolicyConfig,
    Progress,
    SampledSubsets,
)
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.policy.config import is_number
from stepprune_jax.policy.jax_settings import AnyKey, implicit_promotion
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.params import count_weights, draw_params, flat_params
from stepprune_jax.policy.rollout import row_counts
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.pruning.base import Pruner, PrunerInputs, Ranker, Ranking, Schedule
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.user_input import UserError, require

CALIBRATE = "stepprune-calibrate"

Weights = dict[str, Any]
AnyTrained = TypeVar("AnyTrained", bound="TrainedPruner")


@runtime_checkable
class SelectorConfig(Protocol):
    """What the configuration of any method with weights has: a frozen dataclass of JSON values.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the text embeddings; 0 for a method that sees no text.
    """

    feature_width: int
    text_width: int


class Aux(NamedTuple):
    """What a training objective returns beside its value.

    Attributes:
        metrics: scalars to be logged by name, among them "lm_loss".
        state: state of the objective, like that of `Selector.init_state`, for `Progress.state` of
            the next batch.
    """

    metrics: dict[str, Float[Array, ""]]
    state: Any = ()


@dataclasses.dataclass(frozen=True)
class TrainedPruner(Pruner):
    """A pruner that carries its weights.

    Its leaves are the weights, the statistics, the stop bias and the number of its budget.

    A subclass sets `config_type`, gives `config` a default and defines `specs`.

    Attributes:
        params: the weights; None for the method alone, as it is before it is trained.
        config: shapes and readings, of the class's `config_type`.
        stats: statistics of the features it was trained with; None if the features were not
            standardised.
        stop_bias: number added to the stop logits, where there is a stop.
        calibration: stop biases of mean counts; None if not measured.
    """

    params: Any = dataclasses.field(default=None, kw_only=True)
    config: Any = dataclasses.field(default=None, kw_only=True)
    stats: FeatureStats | None = dataclasses.field(default=None, kw_only=True)
    stop_bias: Any = dataclasses.field(default=0.0, kw_only=True)
    calibration: Calibration | None = dataclasses.field(default=None, kw_only=True)

    leaves: ClassVar[tuple[str, ...]] = ("params", "stats", "stop_bias", "budget")

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if "__repr__" not in cls.__dict__:  # `dataclass` would add one that prints all weights
            cls.__repr__ = TrainedPruner.__repr__

    def __repr__(self) -> str:
        """Returns one line: the number of weights, and the fields that differ from defaults."""
        weights = f"{count_weights(self.params):,} weights" if self.params else "no weights"
        parts = [f"budget={self.budget}", weights, *_changed_fields(self)]
        parts += ["calibrated"] * (self.calibration is not None)
        config = f"{type(self.config).__name__}({', '.join(_changed_fields(self.config))})"
        return f"{type(self).__name__}({', '.join(parts)}, config={config})"

    @classmethod
    def init(
        cls: type[AnyTrained],
        key: Array,
        config: Any,
        stats: FeatureStats | None,
        **options: Any,
    ) -> AnyTrained:
        """Draws the weights of a method to be trained.

        Args:
            key: PRNG key; consumed.
            config: shapes and readings, of the class's `config_type`.
            stats: statistics of the features, gathered with `update_stats`; None to skip
                standardisation.
            **options: other fields by name.

        Raises:
            ValueError: an argument of another type.
        """
        method = cls(config=config, stats=stats, **options)
        return method.replace(params=method.draw_params(key))

    @abc.abstractmethod
    def specs(self) -> Weights:
        """Returns the table of the weights, a nested dict of `ParamSpec`."""

    @property
    def param_dtype(self) -> DTypeLike:
        """The dtype of drawn weights: float32, or float64 if `config.dtype` says so."""
        return score_dtype(jnp.dtype(getattr(self.config, "dtype", None) or jnp.float32))

    def draw_params(self, key: Array) -> Weights:
        """Draws weights of `param_dtype`; consumes `key`."""
        return draw_params(key, self.specs(), self.param_dtype)

    def __post_init__(self):
        super().__post_init__()
        for name, kind in (("config", self.config_type), ("stats", FeatureStats | None)):
            value = getattr(self, name)
            if kind is not None and not isinstance(value, kind):
                wanted = kind.__name__ if isinstance(kind, type) else "FeatureStats, or None"
                message = f"{self.name}: {name} is a {type(value).__name__}, expected "
                raise UserError(message + wanted)

    def replace(self: AnyTrained, **changes: Any) -> AnyTrained:
        """Returns a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def with_budget(self: AnyTrained, budget: Budget | int | str) -> AnyTrained:
        """Returns a copy with another budget, as `Budget.parse` reads it.

        Raises:
            ValueError: an unsupported kind of budget, or a mean without a calibration or out of its
                range.

        Warns:
            UserWarning: as `Calibration.bias_at`.
        """
        made = super().with_budget(budget)
        made.require_kind(made.budget)
        if made.budget.kind == "mean":
            made.bias_at(float(made.budget.number))
        return made

    def bias_at(self, mean_budget: float | int) -> float:
        """Returns the stop bias at which it keeps `mean_budget` tokens on average.

        Args:
            mean_budget: tokens to keep per image, on average over questions like those of the
                calibration.

        Raises:
            ValueError: it has no stop or no calibration, or the mean is out of its range.

        Warns:
            UserWarning: as `Calibration.bias_at`.
        """
        return self._table().bias_at(mean_budget)

    @property
    def bias(self) -> Any:
        """The stop bias in effect: for a mean budget, the bias of the calibration."""
        if self.budget.kind == "mean":
            return self._table().bias_in_program(self.budget.value)
        return self.stop_bias

    def _table(self) -> Calibration:
        """Returns the calibration; raises as `bias_at`."""
        require(self.has_stop, f"{self.name} has no learned stop, and so no mean budget")
        if self.calibration is None:
            raise UserError(
                "the policy has no calibration, which a mean budget needs: create one with "
                f"policy.calibrate in Python or {CALIBRATE} in a shell, or give a stop bias"
            )
        return self.calibration

    def program(self: AnyTrained) -> AnyTrained:
        """Returns it without what no compiled program depends on.

        Exact counts are read from the view, and a learned stop from the bias.
        """
        kind = "all" if self.budget.is_exact else "own"
        return self.replace(budget=Budget(kind), stop_bias=self.bias, calibration=None)

    def prepare(self: AnyTrained) -> AnyTrained:
        """Returns it as programs read it, once for many calls: the bias of a mean looked up."""
        if self.budget.kind == "mean":
            return self.replace(budget=Budget("own"), stop_bias=self.bias)
        return self

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects a method without weights, and weights of another model."""
        self.check_weights()
        self.check_fits(config)
        super().check(config, num_tokens)

    def check_weights(self, without: str = "") -> None:
        """Raises a UserError unless the weights have the names and shapes of the configuration.

        Args:
            without: name of a part that is not checked, such as "decoder" for a custom decoder.
        """
        built = f"load_policy or {type(self).__name__}.init in Python, --policy in a command"
        message = f"the pruner {self.name!r} is trained: it needs a policy with weights ({built})"
        require(self.params is not None, message)
        specs = {path: spec.shape for path, spec in flat_params(self.specs()).items()}
        shapes = {path: jnp.shape(leaf) for path, leaf in flat_params(self.params).items()}
        wrong = [
            f"{path} is {shapes.get(path, 'missing')}, expected {specs.get(path, 'none')}"
            for path in sorted(specs.keys() | shapes.keys())
            if specs.get(path) != shapes.get(path) and path.partition("/")[0] != without
        ]
        kind = type(self.config).__name__
        require(not wrong, f"{self.name}: params do not fit its {kind}: {'; '.join(wrong[:3])}")

    def check_fits(self, config: ModelConfig) -> None:
        """Raises a ValueError unless the weights have the widths of a model."""
        own = self.config
        widths = [("feature_width", own.feature_width, "vision", config.feature_width)]
        if own.text_width:
            widths.append(("text_width", own.text_width, "text", config.text.hidden_size))
        wrong = [
            f"its {name} is {width}, the model's {part} hidden_size {expected}"
            for name, width, part, expected in widths
            if width != expected
        ]
        require(not wrong, "the policy does not fit the model: " + "; ".join(wrong))


def _changed_fields(value: Any) -> list[str]:
    """Returns "name=value" of the simple fields of a dataclass that differ from their defaults."""
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    simple = float, int, bool, str, tuple, type(None)
    return [
        f"{field.name}={content!r}"
        for field, content in fields
        if type(content) in simple and content != field.default
    ]


def nonzero_tokens(tokens: Float[Array, "b n d"], real: Bool[Array, "b n"]) -> Bool[Array, "b n"]:
    """Returns True at real tokens that are not vectors of zeros: policies choose from these.

    A vector of zeros ends each row of the tiles of LLaVA-NeXT.
    """
    return real & jnp.any(tokens != 0, axis=-1)


def zeros_last(
    order: Int[Array, "r t"], chosen_from: Bool[AnyArray, "r n"] | None
) -> Int[Array, "r t"]:
    """Appends the tokens that a method does not choose from to its order, by their positions.

    Args:
        order: indices of tokens in order of choice, undefined after all of `chosen_from`.
        chosen_from: True = token that the method chooses from; None for all tokens.

    Returns:
        The order. A budget above the number of tokens in `chosen_from` also keeps zeros, so that a
        budget of all tokens keeps all.
    """
    if chosen_from is None:
        return order
    step, count = jnp.arange(order.shape[1]), jnp.sum(chosen_from, axis=1, keepdims=True)
    zeros = jnp.argsort(chosen_from, axis=1, stable=True)
    following = jnp.take_along_axis(zeros, jnp.maximum(step - count, 0), axis=1)
    return jnp.where(step < count, order, following.astype(order.dtype))


class Selector(TrainedPruner, Ranker):
    """A method whose order of tokens is learned, and can be trained here.

    A subclass defines `specs`, `loss` and `order`, and is listed in `PRUNERS`. All of its functions
    are pure; differentiate them with respect to `params` alone:
    `jax.grad(lambda params: method.replace(params=params).loss(...), has_aux=True)`.
    """

    budgets: ClassVar[tuple[str, ...]] = EXACT
    reads_text: ClassVar[bool] = True
    # Group of a run's configuration that has the fields of `config`.
    settings: ClassVar[str] = "policy"
    # Whether `sample_subsets` is defined.
    samples_subsets: ClassVar[bool] = False
    # Seed of the draws, where its configuration draws tokens.
    seed: int = 0
    # Their temperature; None for the configuration's.
    draw: float | None = None

    def __post_init__(self):
        super().__post_init__()
        least = self.draw is None or (is_number(self.draw) and self.draw >= 0)
        self.expect("draw", least, "a number >= 0")

    def init_state(self) -> Any:
        """Returns the state of the objective before the first batch; by default it has none."""
        return ()

    @abc.abstractmethod
    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the training objective of a batch.

        Args:
            key: PRNG key; consumed.
            inputs: image and question, never the answer.
            lm_loss_fn: maps the gated tokens to the mean language-modelling loss.
            progress: schedules of the training so far, and the state after the batch before.

        Returns:
            The loss, and what else is known of the batch.
        """

    def sample_subsets(
        self, inputs: Inputs, limits: Limits, keys: AnyKey, progress: Progress
    ) -> SampledSubsets:
        """Draws sets of tokens for a policy gradient.

        Args:
            inputs: image and question.
            limits: bounds on the counts of each row.
            keys: g PRNG keys, one for each draw; consumed.
            progress: schedules of the training so far.

        Returns:
            The draws, whose log-probabilities are differentiable in the weights.

        Raises:
            ValueError: the method draws nothing.
        """
        raise UserError(f"{self.name} draws no sets of tokens, expected a method that does")

    def price_stop(self, inputs: Inputs, key: Array, progress: Progress) -> OwnStop:
        """Prices the tokens that a method with a learned stop keeps by it, for a policy gradient.

        Args:
            inputs: image and question.
            key: PRNG key; consumed.
            progress: schedules of the training so far.

        Returns:
            The expected price of each row, differentiable in the weights, with count and bounds.

        Raises:
            ValueError: the method has no stop.
        """
        raise UserError(f"{self.name} has no learned stop to price")

    @abc.abstractmethod
    def order(self, inputs: Inputs, steps: int, key: Array | None = None) -> Ranking:
        """Puts tokens in an order of static length `steps`, whose prefixes are the choices.

        Args:
            inputs: image and question.
            steps: length of the order.
            key: PRNG key of a method that draws tokens, one for all rows or one for each; by
                default a fixed one.

        Returns:
            The order, and margins of the stop if there is one.
        """

    def open_scores(
        self, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns how wide training opens each token at a budget, and the entropy of its choices.

        By default tokens are opened in their order, and the entropy is not known.
        """
        place = jnp.argsort(self.order(inputs, inputs.image.shape[1]).order, axis=1)
        return -place.astype(jnp.float32), jnp.array(jnp.nan)

    def longest(self, num_tokens: int) -> int:
        """Returns T_max, the most tokens that it chooses of an image's."""
        return num_tokens

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts what the budget says, at most T_max; nothing is known where it stops by itself."""
        count, most = self.budget.count(num_tokens), self.longest(num_tokens)
        return Schedule(None if count is None else min(count, most), most)

    def is_stop(self, path: str) -> bool:
        """Returns whether the weight of a path is the stop's own; its gradient is logged."""
        return False

    @property
    def min_tokens(self) -> int:
        """Tokens chosen before the stop is available."""
        return 1

    @property
    def clips_stop_apart(self) -> bool:
        """Whether the gradients of the stop's own weights are clipped by their own norm."""
        return False

    @property
    def encoder_config(self) -> PolicyConfig | None:
        """The `PolicyConfig` of its encoder, by which operations are counted; None without one."""
        return None

    @property
    def pointer_group(self) -> int | None:
        """Tokens that its decoder takes from one pointer distribution; None without a decoder."""
        return None

    def inputs(self, view: PrunerInputs) -> Inputs:
        """Returns the inputs of the method for a view; vectors of zeros are masked."""
        mask = None if view.valid is None else nonzero_tokens(view.tokens, view.valid)
        return Inputs(view.tokens, view.text, mask, view.text_valid, self.stats)

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of a view; vectors of zeros come last."""
        inputs = self.inputs(view)
        ranking = self.order(inputs, steps, view.keys(self.seed))
        return ranking._replace(order=zeros_last(ranking.order, inputs.image_mask))

    def as_arrays(self, inputs: Inputs, limits: Limits) -> Limits:
        """Returns limits whose counts are arrays, so that all of them share a program.

        Raises:
            ValueError: another limit than a budget, as the method has no stop, or one out of range.
        """
        (b, n), budget = inputs.image.shape[:2], limits.budget
        rest = limits.min_tokens, limits.max_tokens, limits.max_steps, limits.group, limits.draw
        if budget is None or any(limit is not None for limit in rest):
            raise UserError(f"{self.name} has no learned stop, expected a budget, and it alone")
        return Limits(row_counts("budget", budget, 1, n, b))

    @implicit_promotion()
    def choose(self, inputs: Inputs, limits: Limits, key: Array | None = None) -> Picks:
        """Chooses the first `limits.budget` tokens of the order, on the device.

        Raises:
            ValueError: as `as_arrays`, where the limits can be read.
        """
        n, budget = inputs.image.shape[1], self.as_arrays(inputs, limits).budget
        assert budget is not None  # as `as_arrays` has found
        count = jnp.minimum(budget, jnp.sum(inputs.real, axis=1))
        return first_picks(self.order(inputs, n, key).order, count, n)
