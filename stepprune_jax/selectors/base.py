"""Base classes of methods with weights.

`TrainedPruner` is a pruner that holds its weights. `Selector` is a trained pruner that orders
tokens and can be trained. `Policy` (policy.py) adds the functions that users call in front of a
model; the methods derive from it.
"""

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
    Picks,
    PolicyConfig,
    Progress,
    SampledSubsets,
    StopPrice,
    WarmStart,
)
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.policy.config import is_number
from stepprune_jax.policy.jax_settings import AnyKey, implicit_promotion
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.params import count_weights, flat_params, init_params
from stepprune_jax.policy.rollout import row_counts
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.pruning.base import Pruner, PrunerInputs, Ranker, Ranking, Schedule
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.user_input import UserError

CALIBRATE = "stepprune-calibrate"

# Annotations of functions are quoted where `help` would show long names of types. Fields of
# dataclasses are not quoted: a subclass in another module would need the same imports.
Weights = dict[str, Any]
AnyTrained = TypeVar("AnyTrained", bound="TrainedPruner")


@runtime_checkable
class SelectorConfig(Protocol):
    """Configuration of a method with weights: a frozen dataclass of JSON values."""

    @property
    def feature_width(self) -> int:
        """Width of the image tokens."""
        ...

    @property
    def text_width(self) -> int:
        """Width of the text embeddings; 0 for a method that reads no text."""
        ...


class Aux(NamedTuple):
    """Auxiliary output of a training objective.

    Attributes:
        metrics: scalars to log, by name; includes "lm_loss".
        state: state of the objective for `Progress.state` of the next batch, with the structure of
            `Selector.init_state`.
    """

    metrics: dict[str, Float[Array, ""]]
    state: Any = ()


@dataclasses.dataclass(frozen=True)
class TrainedPruner(Pruner):
    """A pruner that holds its weights.

    The pytree leaves are the weights, the statistics, the stop bias and the number of the budget.
    A subclass sets `config_type`, gives `config` a default and defines `specs`.

    Attributes:
        params: the weights; None for a method that is not trained yet.
        config: configuration, an instance of the class's `config_type`.
        stats: statistics of the training features; None if the features are not standardized.
        stop_bias: number that is added to the stop logits of a method with a learned stop.
        calibration: table of stop biases and mean counts; None if it was not measured.
    """

    params: Any = dataclasses.field(default=None, kw_only=True)
    config: Any = dataclasses.field(default=None, kw_only=True)
    stats: FeatureStats | None = dataclasses.field(default=None, kw_only=True)
    stop_bias: Any = dataclasses.field(default=0.0, kw_only=True)
    calibration: Calibration | None = dataclasses.field(default=None, kw_only=True)

    leaves: ClassVar[tuple[str, ...]] = ("params", "stats", "stop_bias", "budget")

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        # `dataclass` would otherwise add a `__repr__` that prints all weights.
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = TrainedPruner.__repr__

    def __repr__(self) -> str:
        """Returns one line: the number of weights, and the fields that differ from defaults."""
        weights = f"{count_weights(self.params):,} weights" if self.params else "no weights"
        parts = [f"budget={self.budget}", weights, *_changed_fields(self)]
        if self.calibration is not None:
            parts.append("calibrated")
        config = f"{type(self.config).__name__}({', '.join(_changed_fields(self.config))})"
        return f"{type(self).__name__}({', '.join(parts)}, config={config})"

    @classmethod
    def init(
        cls: type[AnyTrained],
        key: "Array",
        config: Any,
        stats: "FeatureStats | None",
        **options: Any,
    ) -> AnyTrained:
        """Creates a method with randomly initialized weights, for training.

        Args:
            key: PRNG key; consumed.
            config: configuration, an instance of the class's `config_type`.
            stats: statistics of the features, computed with `update_stats`; None skips
                standardization.
            **options: other fields by name.

        Raises:
            ValueError: an argument has another type.
        """
        method = cls(config=config, stats=stats, **options)
        return method.replace(params=method.init_params(key))

    @abc.abstractmethod
    def specs(self) -> Weights:
        """Returns a nested dict of `ParamSpec` with the structure of the weights."""

    @property
    def param_dtype(self) -> DTypeLike:
        """The dtype of initialized weights: float32, or float64 if `config.dtype` is "float64"."""
        return score_dtype(jnp.dtype(getattr(self.config, "dtype", None) or jnp.float32))

    def init_params(self, key: "Array") -> Weights:
        """Returns randomly initialized weights of `param_dtype`; consumes `key`."""
        return init_params(key, self.specs(), self.param_dtype)

    def __post_init__(self):
        super().__post_init__()
        for name, kind in (("config", self.config_type), ("stats", FeatureStats | None)):
            value = getattr(self, name)
            if kind is not None and not isinstance(value, kind):
                expected = kind.__name__ if isinstance(kind, type) else "FeatureStats, or None"
                actual = type(value).__name__
                raise UserError(f"{self.name}: {name} is a {actual}, expected {expected}")

    def replace(self: AnyTrained, **changes: Any) -> AnyTrained:
        """Returns a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def with_budget(self: AnyTrained, budget: "Budget | int | str") -> AnyTrained:
        """Returns a copy with another budget; see `Budget.parse`.

        Raises:
            ValueError: an unsupported kind of budget, or a mean budget without a calibration or out
                of its range.

        Warns:
            UserWarning: at this mean, nearly all counts are at a bound; see `Calibration.bias_at`.
        """
        method = super().with_budget(budget)
        method.require_kind(method.budget)
        if method.budget.kind == "mean":
            # Called for its errors and warnings only.
            method.bias_at(float(method.budget.number))
        return method

    def bias_at(self, mean_budget: float | int) -> float:
        """Returns the stop bias that keeps `mean_budget` tokens on average.

        Args:
            mean_budget: number of tokens to keep per image, on average over questions like those of
                the calibration.

        Raises:
            ValueError: the method has no learned stop or no calibration, or the mean is out of the
                calibration's range.

        Warns:
            UserWarning: at this mean, nearly all counts are at a bound; see `Calibration.bias_at`.
        """
        return self._require_calibration().bias_at(mean_budget)

    @property
    def bias(self) -> Any:
        """The stop bias in use: from the calibration for a mean budget, else `stop_bias`."""
        if self.budget.kind == "mean":
            return self._require_calibration().bias_in_program(self.budget.value)
        return self.stop_bias

    def _require_calibration(self) -> Calibration:
        """Returns the calibration; raises a UserError if there is none."""
        if not self.has_stop:
            raise UserError(f"{self.name} has no learned stop, and so no mean budget")
        if self.calibration is None:
            raise UserError(
                "the policy has no calibration, which a mean budget needs: create one with "
                f"policy.calibrate in Python or {CALIBRATE} in a shell, or give a stop bias"
            )
        return self.calibration

    def program(self: AnyTrained) -> AnyTrained:
        """Returns a copy that is equal for all budgets that can share a compiled program.

        Programs read exact counts from `PrunerInputs.count` and the learned stop from `stop_bias`,
        so the copy needs neither the budget nor the calibration.
        """
        kind = "all" if self.budget.is_exact else "adaptive"
        return self.replace(budget=Budget(kind), stop_bias=self.bias, calibration=None)

    def prepare(self: AnyTrained) -> AnyTrained:
        """Returns a copy for many calls, with the stop bias in place of a mean budget."""
        if self.budget.kind == "mean":
            return self.replace(budget=Budget("adaptive"), stop_bias=self.bias)
        return self

    def check(self, config: "ModelConfig", num_tokens: int) -> None:
        """Raises a UserError for missing weights, weights for another model or invalid options."""
        self.check_weights()
        self.check_fits(config)
        super().check(config, num_tokens)

    def check_weights(self, skipped_part: str = "") -> None:
        """Raises a UserError unless the weights have the names and shapes of the configuration.

        Args:
            skipped_part: name of a part of the weights that is not checked, such as "decoder" for a
                custom decoder; "" checks all weights.
        """
        if self.params is None:
            raise UserError(
                f"the pruner {self.name!r} is trained: it needs a policy with weights (load_policy "
                f"or {type(self).__name__}.init in Python, --policy in a command)"
            )
        specs = {path: spec.shape for path, spec in flat_params(self.specs()).items()}
        shapes = {path: jnp.shape(leaf) for path, leaf in flat_params(self.params).items()}
        mismatches = [
            f"{path} is {shapes.get(path, 'missing')}, expected {specs.get(path, 'none')}"
            for path in sorted(specs.keys() | shapes.keys())
            if specs.get(path) != shapes.get(path) and path.partition("/")[0] != skipped_part
        ]
        if mismatches:
            kind, examples = type(self.config).__name__, "; ".join(mismatches[:3])
            raise UserError(f"{self.name}: params do not fit its {kind}: {examples}")

    def check_fits(self, config: "ModelConfig") -> None:
        """Raises a UserError unless the configuration has the widths of a model."""
        # Name of the field, the policy's width, and the part and width of the model.
        widths = [("feature_width", self.config.feature_width, "vision", config.feature_width)]
        if self.config.text_width:
            text_width = config.text.hidden_size
            widths.append(("text_width", self.config.text_width, "text", text_width))
        mismatches = [
            f"its {name} is {width}, the model's {part} hidden_size {expected_width}"
            for name, width, part, expected_width in widths
            if width != expected_width
        ]
        if mismatches:
            raise UserError("the policy does not fit the model: " + "; ".join(mismatches))


def _changed_fields(value: Any) -> list[str]:
    """Returns "name=value" for each simple field of a dataclass that differs from its default."""
    fields_and_values = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    simple_types = float, int, bool, str, tuple, type(None)
    return [
        f"{field.name}={field_value!r}"
        for field, field_value in fields_and_values
        if type(field_value) in simple_types and field_value != field.default
    ]


def nonzero_tokens(tokens: Float[Array, "b n d"], real: Bool[Array, "b n"]) -> Bool[Array, "b n"]:
    """Returns True at real tokens that are not zero vectors: the tokens that policies choose from.

    LLaVA-NeXT ends each row of an image's tiles with a zero vector.
    """
    return real & jnp.any(tokens != 0, axis=-1)


def zeros_last(
    order: Int[Array, "r t"], candidates: Bool[AnyArray, "r n"] | None
) -> Int[Array, "r t"]:
    """Appends the tokens that a method does not choose from to its order of tokens.

    Policies do not choose zero vectors, which some models add to the tokens of an image. With the
    completed order, a budget above the number of candidates also keeps zero vectors, and a budget
    of all tokens keeps all tokens.

    Args:
        order: [r, t] indices of tokens in order of choice, undefined after the last candidate.
        candidates: [r, n] True at tokens that the method chooses from; None for all tokens.

    Returns:
        [r, t] the order of the candidates, followed by all other tokens by ascending index.
    """
    if candidates is None:
        return order
    step, num_candidates = jnp.arange(order.shape[1]), jnp.sum(candidates, axis=1, keepdims=True)
    non_candidates_first = jnp.argsort(candidates, axis=1, stable=True)
    rank_after_candidates = jnp.maximum(step - num_candidates, 0)
    non_candidates = jnp.take_along_axis(non_candidates_first, rank_after_candidates, axis=1)
    return jnp.where(step < num_candidates, order, non_candidates.astype(order.dtype))


class Selector(TrainedPruner, Ranker):
    """A trained pruner that orders tokens; the interface between a method and its users.

    A subclass defines `specs`, `loss` and `order`, and is listed in `PRUNERS`. This class derives
    the `Pruner` contract from `order`. All functions are pure. Differentiate them with respect to
    `params` only: `jax.grad(lambda params: method.replace(params=params).loss(...), has_aux=True)`.

    Attributes:
        settings: name of the group of a run's configuration that holds the fields of `config`.
        samples_subsets: whether the method defines `sample_subsets` and `warm_start`.
        seed: seed of the sampled tokens.
        draw: sampling temperature, 0 for no sampling; None for the configuration's temperature.
    """

    budgets: ClassVar[tuple[str, ...]] = EXACT
    reads_text: ClassVar[bool] = True
    settings: ClassVar[str] = "policy"
    samples_subsets: ClassVar[bool] = False
    seed: int = 0
    draw: float | None = None

    def __post_init__(self):
        super().__post_init__()
        is_valid = self.draw is None or (is_number(self.draw) and self.draw >= 0)
        self.expect("draw", is_valid, "a number >= 0")

    # Training.

    def init_state(self) -> Any:
        """Returns the state of the objective before the first batch; () for no state."""
        return ()

    @abc.abstractmethod
    def loss(
        self,
        key: "Array",
        inputs: "Inputs",
        lm_loss_fn: "Callable[[Float[Array, 'b n d']], Float[Array, '']]",
        progress: "Progress",
    ) -> "tuple[Float[Array, ''], Aux]":
        """Computes the training objective of a batch.

        Args:
            key: PRNG key; consumed.
            inputs: image and question, never the answer.
            lm_loss_fn: maps the gated tokens [b, n, d] to the mean language-modeling loss.
            progress: progress of training, and the state after the previous batch.

        Returns:
            The loss, its metrics and the next state.
        """

    def sample_subsets(
        self, inputs: "Inputs", limits: "Limits", keys: "AnyKey", progress: "Progress"
    ) -> "SampledSubsets":
        """Samples subsets of tokens, for training with RLOO.

        Args:
            inputs: image and question.
            limits: bounds on the counts of each row.
            keys: [g] PRNG keys, one per subset; consumed.
            progress: progress of training.

        Returns:
            The subsets, with log-probabilities that are differentiable in the weights.

        Raises:
            ValueError: the method does not sample subsets.
        """
        raise UserError(f"{self.name} samples no subsets of tokens, expected a method that does")

    def warm_start(
        self, key: "Array", inputs: "Inputs", importance: "Float[Array, 'b n']"
    ) -> "WarmStart":
        """Computes the loss that trains the method towards the importance of tokens.

        Args:
            key: PRNG key; consumed.
            inputs: image and question, never the answer.
            importance: [b, n] importance of each token, as from `policy.token_importance`.

        Returns:
            The loss, which is differentiable in the weights, and metrics.

        Raises:
            ValueError: the method does not sample subsets.
        """
        raise UserError(f"{self.name} samples no subsets of tokens, expected a method that does")

    def price_stop(self, inputs: "Inputs", key: "Array", progress: "Progress") -> "StopPrice":
        """Computes the expected price of the tokens that the learned stop keeps, for RLOO.

        Args:
            inputs: image and question.
            key: PRNG key; consumed.
            progress: progress of training.

        Returns:
            The expected price of each row, differentiable in the weights, with count and bounds.

        Raises:
            ValueError: the method has no learned stop.
        """
        raise UserError(f"{self.name} has no learned stop to price")

    def open_scores(
        self, inputs: "Inputs", budget: int
    ) -> "tuple[Float[Array, 'b n'], Float[Array, '']]":
        """Returns the scores that the gates of training are computed from, for a diagnosis.

        Training gates each token: a token with a larger score gets less noise. By default, the
        scores follow the order of the tokens.

        Args:
            inputs: image and question.
            budget: number of tokens to keep.

        Returns:
            A tuple (scores, entropy). scores: [b, n] score of each token. entropy: [] mean entropy
            in nats of the distributions that tokens are chosen from; NaN by default.
        """
        rank = jnp.argsort(self.order(inputs, inputs.image.shape[1]).order, axis=1)
        return -rank.astype(jnp.float32), jnp.array(jnp.nan)

    def is_stop(self, path: str) -> bool:
        """Returns whether a weight is used by the stop only.

        Training logs the gradient norm of these weights separately.
        """
        return False

    @property
    def clips_stop_apart(self) -> bool:
        """Whether the gradients of the stop's weights are clipped by a separate norm."""
        return False

    # Selection.

    @abc.abstractmethod
    def order(self, inputs: "Inputs", steps: int, key: "Array | None" = None) -> "Ranking":
        """Orders tokens. A budget of k keeps the first k tokens of the order.

        Args:
            inputs: image and question.
            steps: length of the order; static.
            key: PRNG key of the sampled tokens, one for all rows or one per row; None for a fixed
                key.

        Returns:
            The order, and the margins of the learned stop if there is one.
        """

    @implicit_promotion()
    def choose(self, inputs: "Inputs", limits: "Limits", key: "Array | None" = None) -> "Picks":
        """Chooses the first `limits.budget` tokens of the order, on the device.

        Args:
            inputs: image and question.
            limits: an exact budget, one number or one per row, and no other limit.
            key: PRNG key of the sampled tokens; None for a fixed key.

        Returns:
            The kept tokens of each row, in order of choice.

        Raises:
            ValueError: the limits have no budget, another limit, or a concrete budget that is out
                of range.
        """
        n, budget = inputs.image.shape[1], self.as_arrays(inputs, limits).budget
        count = jnp.minimum(jnp.asarray(budget), jnp.sum(inputs.real, axis=1))
        return first_picks(self.order(inputs, n, key).order, count, n)

    def as_arrays(self, inputs: "Inputs", limits: "Limits") -> "Limits":
        """Converts a budget to one int32 count per row, so that all counts share one program.

        Args:
            inputs: image and question.
            limits: an exact budget, one number or one per row, and no other limit.

        Raises:
            ValueError: the limits have no budget, another limit, or a concrete budget that is out
                of range.
        """
        (b, n), budget = inputs.image.shape[:2], limits.budget
        other_limits = vars(dataclasses.replace(limits, budget=None)).values()
        if budget is None or any(limit is not None for limit in other_limits):
            raise UserError(
                f"{self.name} has no learned stop, expected a budget and no other limit"
            )
        return Limits(row_counts("budget", budget, 1, n, b))

    def longest(self, num_tokens: int) -> int:
        """Returns T_max, the largest number of tokens that the method keeps of `num_tokens`."""
        return num_tokens

    @property
    def min_tokens(self) -> int:
        """Number of tokens that are chosen before the stop is available."""
        return 1

    @property
    def encoder_config(self) -> PolicyConfig | None:
        """The `PolicyConfig` of the encoder, for counting operations; None without an encoder."""
        return None

    @property
    def pointer_group(self) -> int | None:
        """Number of tokens per pointer distribution of the decoder; None without a decoder."""
        return None

    # The contract of pruners.

    def schedule(self, config: "ModelConfig", num_tokens: int) -> "Schedule":
        """Returns the number of tokens that remain of each image, for planning array shapes.

        The number is unknown (None) if the learned stop decides; T_max then bounds it.
        """
        count, max_tokens = self.budget.count(num_tokens), self.longest(num_tokens)
        return Schedule(None if count is None else min(count, max_tokens), max_tokens)

    def inputs(self, view: "PrunerInputs") -> "Inputs":
        """Converts the inputs of a pruner to inputs of the method; zero vectors are masked."""
        mask = None if view.mask is None else nonzero_tokens(view.tokens, view.valid)
        return Inputs(view.tokens, view.text, mask, view.text_valid, self.stats)

    def rank(self, view: "PrunerInputs", steps: int) -> "Ranking":
        """Orders the tokens of a pruner's inputs; zero vectors come last."""
        inputs = self.inputs(view)
        ranking = self.order(inputs, steps, view.keys(self.seed))
        return ranking._replace(order=zeros_last(ranking.order, inputs.image_mask))
