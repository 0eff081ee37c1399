"""The types of the policy.

In shapes, b counts rows, n image tokens, m = n + 1 slots to point at (the last one is the stop), l
words of the question, t steps and k kept tokens; d and e are widths.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

Params = dict[str, Any]
StepFn = Callable[..., tuple[Array, Any]]
# A jax or numpy array: ArrayLike without scalars.
AnyArray = jax.Array | np.ndarray


class FeatureStats(NamedTuple):
    """Per-channel mean and variance of the frozen tower's features.

    Features of real towers are far from unit variance (CLIP has channels tens of times wider than
    others), so "variance-preserving" holds only after standardisation. The statistics are gathered
    once before training, then fixed, and saved with the policy.

    Attributes:
        mean: mean of each channel.
        var: variance of each channel.
        count: tokens seen.
    """

    mean: Float[Array, "d"]
    var: Float[Array, "d"]
    count: Float[Array, ""]

    @classmethod
    def start(cls, width: int) -> "FeatureStats":
        """Returns empty statistics: mean 0 and variance 1 until the first update."""
        dtype = jnp.float32
        return cls(jnp.zeros(width, dtype), jnp.ones(width, dtype), jnp.zeros((), dtype))

    def split(self, width: int) -> tuple["FeatureStats", "FeatureStats"]:
        """Returns the statistics of the first channels, so many, and those of the others."""
        first = FeatureStats(self.mean[:width], self.var[:width], self.count)
        return first, FeatureStats(self.mean[width:], self.var[width:], self.count)

    def continued(self, wider: "FeatureStats") -> "FeatureStats":
        """Returns the statistics, followed by those of the other channels of `wider`."""
        _, rest = wider.split(len(self.mean))
        mean = jnp.concatenate([self.mean, rest.mean])
        return FeatureStats(mean, jnp.concatenate([self.var, rest.var]), self.count)


class Inputs(NamedTuple):
    """What a selector sees, which is never an answer.

    Attributes:
        image: image tokens X of any floating dtype, as returned by the frozen tower.
        text: word embeddings E of the question; None, or a policy with `text_width=0`, sees the
            image alone.
        image_mask: True at real image tokens, by default all; padding may hold anything and affects
            no result.
        text_mask: True at real words, by default all.
        stats: statistics by which features are standardised; None if they are not.
        deep: deep features of the tokens, which no selector reads; the noise gate opens them as
            wide as their tokens, so that nothing of a token evades it. None if there are none.
        deep_stats: their statistics.
    """

    image: Float[AnyArray, "b n d"]
    text: Float[AnyArray, "b l e"] | None = None
    image_mask: Bool[AnyArray, "b n"] | None = None
    text_mask: Bool[AnyArray, "b l"] | None = None
    stats: FeatureStats | None = None
    deep: Float[AnyArray, "b n D"] | None = None
    deep_stats: FeatureStats | None = None

    @property
    def whole(self) -> Float[AnyArray, "b n w"]:
        """The tokens with their deep features behind them: what the language model reads."""
        return self.image if self.deep is None else jnp.concatenate([self.image, self.deep], axis=2)

    @property
    def real(self) -> Bool[Array, "b n"]:
        """True at real image tokens."""
        shape = self.image.shape[:2]
        return jnp.ones(shape, bool) if self.image_mask is None else jnp.asarray(self.image_mask)

    def check(self, feature_width: int, text_width: int) -> None:
        """Checks types and shapes, which traced arrays have as well.

        Args:
            feature_width: width of the image tokens.
            text_width: width of the word embeddings.

        Raises:
            ValueError: names the field, its shape or type, and the expected one.
        """
        tokens = f"(b, n, {feature_width}), n tokens of each image"
        rows = _require_array("image", self.image, (None, None, feature_width), tokens)
        if rows[1] == 0:
            raise ValueError("image has 0 tokens, expected at least 1 of each image")
        _require_mask("image_mask", self.image_mask, rows[:2])
        if self.text is not None:
            width = f"({rows[0]}, l, {text_width}), the embeddings of the l words of each question"
            if np.shape(self.text) == (rows[0], text_width):
                width += "; of one vector for each question, text[:, None]"
            words = _require_array("text", self.text, (rows[0], None, text_width), width)
            _require_mask("text_mask", self.text_mask, words[:2])
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
    """Returns the shape of an array of floating dtype; None in `shape` stands for any size."""
    if not isinstance(value, AnyArray):
        kind = type(value).__name__
        raise ValueError(f"{name} is a {kind}, expected an array of shape {expected}")
    sizes = zip(value.shape, shape, strict=False)
    if value.ndim != len(shape) or any(want not in (None, size) for size, want in sizes):
        raise ValueError(f"{name} is of shape {value.shape}, expected {expected}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} is of dtype {value.dtype}, expected floating point: {expected}")
    return value.shape


def _require_mask(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless a mask is absent, or boolean and of the shape of its rows."""
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
    """How many tokens are kept, and how; a field that is None takes the configuration's value.

    Counts are integers or one per row, and may be traced. A row never keeps more tokens than it
    has.

    Attributes:
        budget: exact count, at most T_max; replaces the two bounds.
        min_tokens: tokens chosen before the stop is available.
        max_tokens: tokens after which a row is stopped.
        max_steps: T_max, at most N; static. Default `config.steps(n)`.
        group: g, tokens taken from one pointer distribution; static. Token t (counted from 0) is
            the best remaining one by the logits of step g floor(t / g). All g slots enter the
            history in order of choice and the last of them is the next query, as if they had been
            taken one by one, so that no retraining is needed. Everything else is computed token by
            token: p_t(i) over the remaining tokens, the stop (a hazard before each token, the
            other two by the group's logits), A_t and beta^t; the credit of each of the g tokens is
            a gradient to the group's logits. The last group is cut where the episode ends.
        draw: temperature at which tokens are drawn, 0 for the most probable ones; static.
    """

    budget: ArrayLike | None = None
    min_tokens: ArrayLike | None = None
    max_tokens: ArrayLike | None = None
    max_steps: int | None = None
    group: int | None = None
    draw: float | int | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DecoderFns:
    """The functions of a decoder; a program is compiled for each set of them.

    Attributes:
        init: `(params, config, memory [b, m, d], memory_mask [b, m], steps) -> (query, context,
            cache)`: the first query [b, d], to which the question may be added
            (`PolicyConfig.first_query`), what is computed once from the memory, and an empty cache.
        step: `(params, config, context, query, cache, step) -> (logits [b, m], cache)`: unmasked
            logits of one step, the stop's last.
        sequence: `(params, config, context, queries [b, t, d], cache) -> logits [b, t, m]`: the
            same for all steps, given every query. Without one, the estimator `"parallel"`
            differentiates the loop, with the same gradient.
        feedback: `(memory, prob [b, m], choice [b]) -> query [b, d]`: the chosen slot, with a
            gradient of one's own; the loop is then differentiated whatever the estimator. Only
            training calls it: inference feeds back the chosen slot. The default has the gradient of
            its probability for `"straight_through"`, and otherwise none.
    """

    init: Callable[..., tuple[Array, Any, Any]]
    step: StepFn
    sequence: Callable[..., Array] | None = None
    feedback: Callable[..., Array] | None = None


class Progress(NamedTuple):
    """Progress of training, as numbers that may be traced.

    Attributes:
        share: share of training done, in [0, 1]; sets the temperature of SoftTopK.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate` for where it acts.
        state: what the objective returned as its state for the batch before, if it has any; () for
            the first batch.
    """

    share: ArrayLike = 1.0
    text_gate: ArrayLike = 1.0
    state: Any = ()


class Trajectory(NamedTuple):
    """A selection episode of T_max steps; slot n is the stop.

    Attributes:
        action: a_t; n from the step at which the row stopped.
        choice: the token pointed at in every step, also after the stop.
        log_prob: log p_t(i), finite; -1e9 for tokens that cannot be chosen.
        prob: p_t(i), exactly zero for those.
        stop_prob: p_t(stop): 0 before `min_tokens`, 1 once `max_tokens` are chosen.
        log_continue: log(1 - p_t(stop)), finite and computed without cancellation.
        margin: l_stop - max_i l_i, or l_stop alone for a hazard; stop bias included. The hard stop
            is `margin > 0`; see `count_at_bias`.
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
    """The decisions of a `Trajectory`, without its probabilities.

    Attributes:
        action: a_t; n from the step at which the row stopped.
        count: K, the number of tokens kept.
        selected: whether token i is kept.
    """

    action: Int[Array, "b t"]
    count: Int[Array, "b"]
    selected: Bool[Array, "b n"]


class Ranked(NamedTuple):
    """Order and margins of a `Trajectory`, without its probabilities.

    Attributes:
        choice: the token pointed at in every step.
        margin: as in `Trajectory`.
    """

    choice: Int[Array, "b t"]
    margin: Float[Array, "b t"]


class Pruned(NamedTuple):
    """The kept tokens of a batch in a bucket of static size; real entries come first.

    Attributes:
        index: position of each kept token among the N image tokens; -1 in the padding.
        tokens: the kept tokens themselves, untouched; zero in the padding.
        valid: True at real entries.
        count: K, the number of real entries.
    """

    index: Int[Array, "b k"]
    tokens: Float[Array, "b k d"]
    valid: Bool[Array, "b k"]
    count: Int[Array, "b"]


class SampledSubsets(NamedTuple):
    """A set drawn for each row, of g draws where there is an axis g.

    Attributes:
        picks: the set.
        log_prob: logarithm of the probability of its order and count, differentiable.
        entropy: mean entropy of the distributions that its tokens were drawn from, in nats; one
            number where that is the same for all draws.
    """

    picks: Picks
    log_prob: Float[Array, "*g b"]
    entropy: Float[Array, "*g"]


class OwnStop(NamedTuple):
    """What the learned stop keeps of images, and what its tokens cost.

    Attributes:
        price: expected price of the tokens where the stop is drawn, differentiable in the weights.
        count: tokens of the hard stop at a price factor of 1.
        shortest: count of each row before the stop is available.
        longest: T_max of each row.
    """

    price: Float[Array, "b"]
    count: Int[Array, "b"]
    shortest: Int[Array, "b"]
    longest: Int[Array, "b"]


class Gated(NamedTuple):
    """Result of the training pathway: all N tokens, each as noisy as the policy decides.

    Attributes:
        tokens: X^, full length, in the space and dtype of the given features; zero in the padding.
        alpha: gate of each token.
        budget: k of SoftTopK.
        trajectory: the selection behind it.
        price: factor on lambda for each row at its count, see `PolicyConfig.price_range` and
            `price_growth`.
        stopped: count at which a row stops by itself; under a probe, the one at a price factor of
            1.
        shortest: count of each row before the stop is available.
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
    """What `train_loss` computes on the way.

    Attributes:
        gated: result of the training pathway.
        lm_loss: the language-modelling loss, without the penalty.
    """

    gated: Gated
    lm_loss: Float[Array, ""]
