"""The interfaces of methods with weights: what checkpoints, training and selection ask of one."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from stepprune_jax.policy import Draw, Inputs, Limits, Picks, PolicyConfig, Progress, Pruned
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket, run_gather
from stepprune_jax.policy.host import AnyKey, implicit_promotion
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.params import draw_params
from stepprune_jax.policy.rollout import row_counts
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.pruning.base import Pruner, Ranker, Ranking, Trained, View
from stepprune_jax.pruning.budget import EXACT

Weights = dict[str, Any]


@runtime_checkable
class TrainedConfig(Protocol):
    """What the configuration of any trained method has: a frozen dataclass of JSON values.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the text embeddings; 0 for a method that sees no text.
    """

    feature_width: int
    text_width: int


class Learned(Pruner):
    """A pruner with weights, which has a field `config` of its `config_type`."""

    config: Any  # a `TrainedConfig`

    @abc.abstractmethod
    def specs(self) -> Weights:
        """Returns the table of the weights, a nested dict of `ParamSpec`."""

    @property
    def param_dtype(self) -> DTypeLike:
        """The dtype of drawn weights: float32, or float64 if `config.dtype` says so."""
        return score_dtype(jnp.dtype(getattr(self.config, "dtype", None) or jnp.float32))

    def init(self, key: Array) -> Weights:
        """Draws the weights of `param_dtype`; consumes `key`."""
        return draw_params(key, self.specs(), self.param_dtype)

    def prepare(self, weights: Weights) -> Weights:
        """Returns a policy's weights as programs of a `Method` read them; runs once."""
        return weights


class TrainedMethod(Learned, Ranker):
    """A pruner whose order of tokens is learned, and can be trained here.

    A subclass has a field `config` of its `config_type`, implements `specs`, `train_loss` and
    `order`, and is listed in `PRUNERS`. The weights are arguments: `Policy` has them with all that
    belongs to them.
    """

    seed: int = 0  # of the draws, if its configuration draws tokens
    draw: float | None = None  # their temperature, instead of the configuration's

    budgets: ClassVar[tuple[str, ...]] = EXACT
    reads_text: ClassVar[bool] = True
    # Group of a run's configuration that has the fields of `config`.
    settings: ClassVar[str] = "policy"

    def __post_init__(self):
        if self.draw is not None:
            object.__setattr__(self, "config", dataclasses.replace(self.config, draw=self.draw))

    @abc.abstractmethod
    def train_loss(
        self,
        weights: Weights,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Float[Array, ""]]]:
        """Computes the training objective of a batch.

        Args:
            weights: the weights; differentiate with respect to these alone.
            key: PRNG key; consumed.
            inputs: image and question, never the answer.
            lm_loss_fn: maps the gated tokens to the mean language-modelling loss.
            progress: schedules of the training so far.

        Returns:
            The loss, and (scalars to be logged by name, among them "lm_loss"; the running mean of K
            for the next batch's `progress`).
        """

    def sample(
        self,
        weights: Weights,
        inputs: Inputs,
        limits: Limits,
        keys: AnyKey,
        progress: Progress,
    ) -> tuple[Draw, Float[Array, "g b"]]:
        """Draws sets of tokens, and returns what each of them costs, for a policy gradient.

        Args:
            weights: the weights, in which the draws' log-probabilities are differentiable.
            inputs: image and question.
            limits: bounds on the counts of each row.
            keys: g PRNG keys, one for each draw; consumed.
            progress: schedules of the training so far.

        Returns:
            The draws, and the price of each of their sets.

        Raises:
            ValueError: the method draws nothing.
        """
        raise ValueError(f"{self.name} draws no sets of tokens, expected a method that does")

    @abc.abstractmethod
    def order(
        self, weights: Weights, inputs: Inputs, steps: int, key: Array | None = None
    ) -> Ranking:
        """Puts tokens in an order of static length `steps`, whose prefixes are the choices.

        Args:
            weights: the weights.
            inputs: image and question.
            steps: length of the order.
            key: PRNG key of a method that draws tokens, one for all rows or one for each; by
                default a fixed one.

        Returns:
            The order, and margins of the stop if there is one.
        """

    def opened(
        self, weights: Weights, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns how wide training opens each token at a budget, and the entropy of its choices.

        By default tokens are opened in their order, and the entropy is not known.
        """
        n = inputs.image.shape[1]
        place = jnp.argsort(self.order(weights, inputs, n).order, axis=1)
        return -place.astype(jnp.float32), jnp.array(jnp.nan)

    def is_stop(self, path: str) -> bool:
        """Returns whether the weight of a path is the stop's own; its gradient is logged."""
        return False

    @property
    def least(self) -> int:
        """Tokens chosen before the stop is available."""
        return 1

    @property
    def clips_stop_apart(self) -> bool:
        """Whether the gradients of the stop's own weights are clipped by their own norm."""
        return False

    @property
    def shape(self) -> PolicyConfig | None:
        """The `PolicyConfig` of its encoder, by which operations are counted; None without one."""
        return None

    def pointer_steps(self, count: int) -> int | None:
        """Returns the steps in which its decoder chooses `count` tokens; None without a decoder."""
        return None

    def rank(self, params: Trained, view: View, steps: int) -> Ranking:
        """Orders the tokens of a view."""
        return self.order(params.weights, self.inputs(params, view), steps, view.keys(self.seed))

    def inputs(self, params: Trained, view: View) -> Inputs:
        """Returns what the method sees of a view."""
        return Inputs(view.tokens, view.text, view.valid, view.text_valid, params.stats)

    @implicit_promotion()
    def choose(
        self,
        weights: Weights,
        inputs: Inputs,
        limits: Limits,
        stop_bias: ArrayLike = 0.0,
        key: Array | None = None,
    ) -> Picks:
        """Chooses the first `limits.budget` tokens of the order, on the device.

        Raises:
            ValueError: another limit than a budget, as the method has no stop, or one out of range
                where it can be read.
        """
        n, budget = inputs.image.shape[1], self._budget(inputs, limits)
        count = jnp.minimum(budget, jnp.sum(inputs.real, axis=1))
        return first_picks(self.order(weights, inputs, n, key).order, count, n)

    def prune(
        self,
        weights: Weights,
        inputs: Inputs,
        limits: Limits,
        *,
        stop_bias: ArrayLike = 0.0,
        order: str = "raster",
        key: Array | None = None,
    ) -> Pruned:
        """Chooses and gathers tokens, in a bucket chosen on the host; see `policy.prune`."""
        limits = Limits(self._budget(inputs, limits))
        picks = run_choose(self, weights, inputs, limits, stop_bias, key)
        bucket = choose_bucket(picks.count, bucket_ladder(picks.action.shape[1]))
        return run_gather(picks, inputs.image, bucket, order=order)

    def _budget(self, inputs: Inputs, limits: Limits) -> Int[Array, "b"]:
        """Returns the count of each row, if limits are those of a method without a stop."""
        (b, n), budget = inputs.image.shape[:2], limits.budget
        rest = limits.min_tokens, limits.max_tokens, limits.max_steps, limits.group
        if budget is None or any(limit is not None for limit in rest):
            raise ValueError(f"{self.name} has no learned stop, expected a budget, and it alone")
        return row_counts("budget", budget, 1, n, b)


@functools.partial(jax.jit, static_argnums=0)
def run_choose(method: TrainedMethod, *given: Any) -> Picks:
    """Runs `TrainedMethod.choose` as one program, rather than one for each of its operations."""
    return method.choose(*given)
