"""Types of the policy: inputs, limits, decoder callbacks and results.

Axis sizes in shapes: b rows, n image tokens, m = n + 1 memory slots (the last slot is the stop), l
words of the question, t steps, k kept tokens, d and e feature widths.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

Params = dict[str, Any]
# A jax or numpy array: ArrayLike without scalars.
AnyArray = jax.Array | np.ndarray


class FeatureStats(NamedTuple):
    """Per-channel mean and variance of the frozen vision tower's features.

    Features of real towers are far from unit variance: some channels of CLIP are tens of times
    wider than other channels. The noise gate preserves variance only for standardized features. The
    statistics are gathered once before training, then fixed, and saved with the policy.

    Attributes:
        mean: [d] mean of each channel.
        var: [d] variance of each channel.
        count: number of tokens that the statistics were computed from.
    """

    mean: Float[Array, "d"]
    var: Float[Array, "d"]
    count: Float[Array, ""]

    @classmethod
    def start(cls, width: int) -> FeatureStats:
        """Returns empty statistics: mean 0 and variance 1 until the first update."""
        dtype = jnp.float32
        return cls(jnp.zeros(width, dtype), jnp.ones(width, dtype), jnp.zeros((), dtype))

    def split(self, width: int) -> tuple[FeatureStats, FeatureStats]:
        """Splits the statistics into the first `width` channels and the remaining channels."""
        first = FeatureStats(self.mean[:width], self.var[:width], self.count)
        return first, FeatureStats(self.mean[width:], self.var[width:], self.count)

    def continued(self, wider: FeatureStats) -> FeatureStats:
        """Appends channels of `wider`, which has statistics of more channels.

        Args:
            wider: statistics whose first channels are the channels of these statistics.

        Returns:
            Statistics as wide as `wider`; the first channels are unchanged.
        """
        _, remaining = wider.split(len(self.mean))
        mean = jnp.concatenate([self.mean, remaining.mean])
        return FeatureStats(mean, jnp.concatenate([self.var, remaining.var]), self.count)


class Inputs(NamedTuple):
    """Inputs of a selector. Must not contain the answer.

    Attributes:
        image: [b, n, d] image tokens X of any floating dtype, as returned by the frozen tower.
        text: [b, l, e] word embeddings E of the question. None, or a policy with `text_width=0`,
            selects by the image only.
        image_mask: [b, n] True at real image tokens; None marks all tokens as real. Padding may
            hold any values and affects no result.
        text_mask: [b, l] True at real words; None marks all words as real.
        stats: statistics that standardize the image tokens; None leaves them unscaled.
        deep: [b, n, D] DeepStack features of the tokens, for the language model. Selectors do not
            read them. The noise gate applies the gate of each token to its deep features as well,
            so they cannot bypass the gate. None for a model without such features.
        deep_stats: statistics that standardize the deep features.
    """

    image: Float[AnyArray, "b n d"]
    text: Float[AnyArray, "b l e"] | None = None
    image_mask: Bool[AnyArray, "b n"] | None = None
    text_mask: Bool[AnyArray, "b l"] | None = None
    stats: FeatureStats | None = None
    deep: Float[AnyArray, "b n D"] | None = None
    deep_stats: FeatureStats | None = None

    @property
    def with_deepstack(self) -> Float[AnyArray, "b n w"]:
        """The image tokens, concatenated with their deep features if there are any."""
        return self.image if self.deep is None else jnp.concatenate([self.image, self.deep], axis=2)

    @property
    def real(self) -> Bool[Array, "b n"]:
        """True at real image tokens."""
        shape = self.image.shape[:2]
        return jnp.ones(shape, bool) if self.image_mask is None else jnp.asarray(self.image_mask)

    def check(self, feature_width: int, text_width: int) -> None:
        """Checks types and shapes; works on traced arrays.

        Args:
            feature_width: expected width of the image tokens.
            text_width: expected width of the word embeddings.

        Raises:
            ValueError: a field has another type or shape; the message names the field.
        """
        expected_image = f"(b, n, {feature_width}), n tokens of each image"
        image_shape = _require_array(
            "image", self.image, (None, None, feature_width), expected_image
        )
        if image_shape[1] == 0:
            raise ValueError("image has 0 tokens, expected at least 1 of each image")
        _require_mask("image_mask", self.image_mask, image_shape[:2])
        batch_size = image_shape[0]
        if self.text is not None:
            expected_text = (
                f"({batch_size}, l, {text_width}), the embeddings of the l words of each question"
            )
            if np.shape(self.text) == (batch_size, text_width):
                expected_text += "; for one vector for each question, give text[:, None]"
            text_shape = _require_array(
                "text", self.text, (batch_size, None, text_width), expected_text
            )
            _require_mask("text_mask", self.text_mask, text_shape[:2])
        elif self.text_mask is not None:
            raise ValueError("text_mask is given without text, expected both")
        if self.stats is not None:
            if not isinstance(self.stats, FeatureStats):
                kind = type(self.stats).__name__
                raise ValueError(f"stats is a {kind}, expected FeatureStats or None")
            if np.shape(self.stats.mean) != (feature_width,):
                channels = np.shape(self.stats.mean)
                raise ValueError(f"stats.mean is of shape {channels}, expected ({feature_width},)")


def _require_array(
    name: str, value: Any, shape: tuple[int | None, ...], expected: str
) -> tuple[int, ...]:
    """Checks that a value is a floating-point array of the required shape.

    Args:
        name: name of the argument, for messages.
        value: value to check.
        shape: required shape; None allows any size of an axis.
        expected: description of the shape, for messages.

    Returns:
        The actual shape.

    Raises:
        ValueError: the value has another type, shape or dtype, or explicit sharding.
    """
    if not isinstance(value, AnyArray):
        kind = type(value).__name__
        hint = "; check the order of the arguments" if callable(value) else ""
        raise ValueError(f"{name} is a {kind}, expected an array of shape {expected}{hint}")
    has_shape = value.ndim == len(shape) and all(
        required_size in (None, size)
        for size, required_size in zip(value.shape, shape, strict=True)
    )
    if not has_shape:
        raise ValueError(f"{name} is of shape {value.shape}, expected {expected}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} is of dtype {value.dtype}, expected floating point: {expected}")
    _require_auto_axes(name, value)
    return value.shape


def _require_auto_axes(name: str, value: AnyArray) -> None:
    """Raises a ValueError for an array that is sharded over a mesh axis of type `Explicit`.

    Without this check, a gather would fail with a message about its operands.
    """
    if not hasattr(jax, "typeof"):  # jax 0.5 has no such types
        return
    # The type of an array names explicit axes only.
    axes = [axis for axis in jax.typeof(value).sharding.spec if axis is not None]
    if axes:
        raise ValueError(
            f"{name} is sharded over the mesh axes {axes} of type Explicit, expected type Auto: "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape)), "
            "or call the policy through jax.sharding.auto_axes"
        )


def _require_mask(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless a mask is None, or boolean and of shape `shape`."""
    if value is None:
        return
    if np.shape(value) != shape:
        raise ValueError(f"{name} is of shape {np.shape(value)}, expected {shape}")
    if not isinstance(value, AnyArray) or value.dtype != bool:
        kind = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{name} is of dtype {kind}, expected bool: True at real entries")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("budget", "min_tokens", "max_tokens"),
    meta_fields=("max_steps", "group", "draw"),
)
@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the number of kept tokens, and options of their selection.

    A field that is None takes the value of the `PolicyConfig`. Counts are integers or one integer
    per row, and may be traced. A row never keeps more tokens than it has real tokens.

    Attributes:
        budget: exact count, at most T_max; excludes `min_tokens` and `max_tokens`.
        min_tokens: number of tokens that are chosen before the stop is available.
        max_tokens: number of tokens after which a row is stopped.
        max_steps: T_max, at most N; static. Default `config.steps(n)`.
        group: g, the number of tokens that are chosen by one pointer distribution; static. Token t
            (counted from 0) is the best remaining token by the logits of step g floor(t / g). All g
            slots enter the history in order of choice and the last slot is the next query, as with
            g = 1, so a policy needs no retraining for another g. All other quantities are computed
            per token: p_t(i) over the remaining tokens, the stop (a hazard is evaluated before each
            token, all other stops use the group's logits), A_t and beta^t. The gradient of each of
            the g tokens flows to the group's logits. The last group ends with the episode.
        draw: temperature at which tokens are sampled; 0 takes the most probable tokens; static.
    """

    budget: ArrayLike | None = None
    min_tokens: ArrayLike | None = None
    max_tokens: ArrayLike | None = None
    max_steps: int | None = None
    group: int | None = None
    draw: float | int | None = None


@runtime_checkable
class InitFn(Protocol):
    """Type of `DecoderFns.init`."""

    def __call__(
        self, params: Params, config: Any, memory: Array, memory_mask: Array, steps: int, /
    ) -> tuple[Array, Any, Any]:
        """Prepares a decoder for one episode.

        Args:
            params: policy weights.
            config: the `PolicyConfig`.
            memory: [b, m, d] encoded image tokens, followed by the stop slot.
            memory_mask: [b, m] True at slots of real tokens and at the stop slot.
            steps: T_max, the number of steps of the episode.

        Returns:
            A tuple (query, context, cache). query: [b, d] the first query; a projection of the
            question may be added to it, see `PolicyConfig.first_query`. context: arrays that are
            computed once from the memory. cache: the empty decoder cache. Context and cache are
            pytrees of any structure.
        """
        ...


@runtime_checkable
class StepFn(Protocol):
    """Type of `DecoderFns.step`."""

    def __call__(
        self, params: Params, config: Any, context: Any, query: Array, cache: Any, step: Array, /
    ) -> tuple[Array, Any]:
        """Computes the logits of one step.

        Args:
            params: policy weights.
            config: the `PolicyConfig`.
            context: context that `InitFn` returned.
            query: [b, d] query of this step.
            cache: cache that `InitFn` or the previous step returned.
            step: [] number of the step, from 0.

        Returns:
            A tuple (logits, cache). logits: [b, m] unmasked logits, with the stop logit last.
        """
        ...


@runtime_checkable
class SequenceFn(Protocol):
    """Type of `DecoderFns.sequence`."""

    def __call__(
        self, params: Params, config: Any, context: Any, queries: Array, cache: Any, /
    ) -> Array:
        """Computes the logits of all steps at once.

        Args:
            params: policy weights.
            config: the `PolicyConfig`.
            context: context that `InitFn` returned.
            queries: [b, t, d] queries of all steps.
            cache: cache that `InitFn` returned.

        Returns:
            [b, t, m] logits that equal the logits of `StepFn` at every step.
        """
        ...


@runtime_checkable
class FeedbackFn(Protocol):
    """Type of `DecoderFns.feedback`."""

    def __call__(self, memory: Array, prob: Any, choice: Array, /) -> Array:
        """Maps the slot that a step points at to the next query.

        Args:
            memory: [b, m, d] encoded image tokens, followed by the stop slot.
            prob: [b, m] probabilities of the step.
            choice: [b] index of the slot that the step points at.

        Returns:
            [b, d] the next query.
        """
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DecoderFns:
    """Functions of a decoder. Each distinct `DecoderFns` compiles its own programs.

    Attributes:
        init: prepares an episode; see `InitFn`.
        step: computes the logits of one step; see `StepFn`.
        sequence: computes the logits of all steps; see `SequenceFn`. If None, the estimator
            `"parallel"` differentiates the loop instead, with the same gradient.
        feedback: maps the chosen slot to the next query, with a custom gradient; see `FeedbackFn`.
            If given, the loop is differentiated, whatever the estimator. Only training calls it:
            inference feeds back the chosen slot. If None, the estimator `"straight_through"` uses
            the gradient of the slot's probability, and `"parallel"` uses no gradient.
    """

    init: InitFn
    step: StepFn
    sequence: SequenceFn | None = None
    feedback: FeedbackFn | None = None

    def __repr__(self) -> str:
        """Returns the names of the functions. Their addresses would differ in each process."""
        functions = (getattr(self, field.name) for field in dataclasses.fields(self))
        names = (getattr(function, "__name__", repr(function)) for function in functions)
        return f"DecoderFns({', '.join(names)})"


class Progress(NamedTuple):
    """Progress of training, as numbers that may be traced.

    Attributes:
        share: completed fraction of training, in [0, 1]. It sets the temperature of SoftTopK, the
            smallest random budget, and when a probe starts to train the stop.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for its effect.
        state: state that the objective returned for the previous batch; () for the first batch and
            for objectives without a state.
    """

    share: ArrayLike = 1.0
    text_gate: ArrayLike = 1.0
    state: Any = ()


class Trajectory(NamedTuple):
    """A selection episode of T_max steps, as `select` returns it; slot n is the stop.

    Attributes:
        action: a_t; n from the step at which the row stopped.
        choice: index of the token that each step points at, also after the stop.
        log_prob: log p_t(i), finite; -1e9 for tokens that cannot be chosen.
        prob: p_t(i); exactly zero for tokens that cannot be chosen.
        stop_prob: p_t(stop); 0 before `min_tokens` and 1 once `max_tokens` are chosen.
        log_continue: log(1 - p_t(stop)), finite and computed without cancellation.
        margin: stop margin l_stop - max_i l_i, or l_stop for a hazard, with the stop bias. The hard
            stop is `margin > 0`; see `count_at_bias`.
        alive: whether the episode had not ended before step t (the hard A_t).
        count: K, the number of tokens kept.
        selected: whether token i is kept.
    """

    action: Int[Array, "b t"]
    choice: Int[Array, "b t"]
    log_prob: Float[Array, "b t n"]
    prob: Float[Array, "b t n"]
    stop_prob: Float[Array, "b t"]
    log_continue: Float[Array, "b t"]
    margin: Float[Array, "b t"]
    alive: Bool[Array, "b t"]
    count: Int[Array, "b"]
    selected: Bool[Array, "b n"]


class Picks(NamedTuple):
    """The decisions of a `Trajectory` without its probabilities, as `choose` returns them.

    Attributes:
        action: a_t; n from the step at which the row stopped.
        count: K, the number of tokens kept.
        selected: whether token i is kept.
    """

    action: Int[Array, "b t"]
    count: Int[Array, "b"]
    selected: Bool[Array, "b n"]


class Ranked(NamedTuple):
    """Order and margins of a `Trajectory` without its probabilities, as `rank` returns them.

    Attributes:
        choice: index of the token that each step points at.
        margin: margin of the stop before each step, as in `Trajectory`.
    """

    choice: Int[Array, "b t"]
    margin: Float[Array, "b t"]


class Pruned(NamedTuple):
    """The kept tokens of a batch, padded to a static size; real entries come first.

    Attributes:
        index: position of each kept token among the N image tokens; -1 in the padding.
        tokens: the kept tokens, unchanged; zero in the padding.
        valid: True at real entries.
        count: K, the number of real entries.
    """

    index: Int[Array, "b k"]
    tokens: Float[Array, "b k d"]
    valid: Bool[Array, "b k"]
    count: Int[Array, "b"]


class SampledSubsets(NamedTuple):
    """One sampled subset of tokens per row, or `g` subsets with a leading axis.

    Attributes:
        picks: the kept tokens of each subset.
        log_prob: log-probability of the subset's order and count; differentiable.
        entropy: mean entropy in nats of the distributions that the tokens were sampled from. A
            method whose entropy is equal for all subsets returns a scalar.
    """

    picks: Picks
    log_prob: Float[Array, "*g b"]
    entropy: Float[Array, "*g"]


class StopPrice(NamedTuple):
    """Counts at which the learned stop ends each row, and the price of the kept tokens.

    Attributes:
        price: expected price of the kept tokens if the stop is sampled; differentiable in the
            weights.
        count: number of tokens before the hard stop, at a price factor of 1.
        shortest: number of tokens of each row before the stop is available.
        longest: T_max of each row.
    """

    price: Float[Array, "b"]
    count: Int[Array, "b"]
    shortest: Int[Array, "b"]
    longest: Int[Array, "b"]


class Gated(NamedTuple):
    """Result of the training pathway: all N tokens, each with as much noise as its gate says.

    Attributes:
        tokens: X^, all N tokens, in the space and dtype of the input features; zero in the padding.
        alpha: gate of each token, in [0, 1].
        budget: k of SoftTopK.
        trajectory: the episode that the gates were computed from.
        price: factor on lambda for each row at its count; see `PolicyConfig.price_range` and
            `price_growth`.
        stopped: number of tokens before the hard stop; with `batch_budget="probe"`, at a price
            factor of 1.
        shortest: number of tokens of each row before the stop is available.
        longest: T_max of each row.
        state: the running mean of K, for `Progress.state` of the next batch, if `soft_budget` is
            "batch_mean"; () otherwise.
        real: True at real tokens.
    """

    tokens: Float[Array, "b n d"]
    alpha: Float[Array, "b n"]
    budget: Float[Array, "b"]
    trajectory: Trajectory
    price: Float[Array, "b"]
    stopped: Int[Array, "b"]
    shortest: Int[Array, "b"]
    longest: Int[Array, "b"]
    state: Float[Array, ""] | tuple[()]
    real: Bool[Array, "b n"]


class TrainAux(NamedTuple):
    """Auxiliary output of `train_loss`.

    Attributes:
        gated: result of the training pathway.
        lm_loss: the language-modeling loss, without the length penalty.
    """

    gated: Gated
    lm_loss: Float[Array, ""]
