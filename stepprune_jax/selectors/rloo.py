"""RLOO (REINFORCE leave-one-out) on sampled subsets of tokens.

Several subsets are sampled per question. The language model answers from each subset as it would
at inference. Subsets with better answers than the question's other subsets become more probable.
The objective uses no noise gate, no denoiser and no backward pass through the language model.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stepprune_jax.models.sequence import POSITIONS
from stepprune_jax.policy import (
    Inputs,
    Limits,
    Progress,
    Pruned,
    SampledSubsets,
    gather,
    leave_one_out,
)
from stepprune_jax.policy.budget import RANDOM_BUDGET, draw_budgets
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.objective import require_losses, stop_metrics
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.selectors.base import Aux, Selector
from stepprune_jax.settings import Settings, choice, count, setting, share

# Minimum gain of random subsets, as a fraction of the gain of all tokens, for starting with RLOO.
# RLOO learned at a gain of 8 % and did not learn at 4 % (experiments/RESULTS.md). The gain has to
# exceed the minimum by one standard error: if subsets cannot learn, the run fails, while starting
# with the gate costs little.
MIN_GAIN = 0.06


def subsets_suffice(gain: float, error: float) -> bool:
    """Returns whether RLOO can start; the criterion of `SubsetGain` and of a diagnosis.

    Args:
        gain: gain of random subsets, as a fraction of the gain of all tokens.
        error: standard error of `gain`.
    """
    return gain - error >= MIN_GAIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooSettings(Settings, path="RlooSettings"):
    """Settings of RLOO; `training.RlooTraining` adds learning rates and a price for a run.

    Attributes:
        samples: g, the number of subsets per question; 8 by default.
        longest: size of the largest subset, as a fraction of an image's tokens; 0.11 by default.
        stops: fraction of the questions whose subsets end by the policy's learned stop; 0.25 by
            default. All other questions have an exact count, log-uniform up to `longest`. The stop
            pays the price of all tokens that it would keep, including tokens beyond `longest`.
        positions: position ids of kept tokens in `train.py`, "original" (default) or "compact".
    """

    samples: int = count(8, minimum=2)
    longest: float = setting(0.11, "a share in (0, 1]", lambda value: 0 < value <= 1)
    stops: float = share(0.25)
    positions: str = choice("original", POSITIONS)


class SubsetRewards(NamedTuple):
    """Reward of each question with subsets and with all tokens, without the price of tokens.

    Attributes:
        subsets: [b] mean reward of the question's subsets.
        chance: [b] mean reward with the subsets of another question's image. It measures how well
            the question can be answered without its image.
        full: [b] reward with all tokens of the image.
    """

    subsets: Float[Array, "b"]
    chance: Float[Array, "b"]
    full: Float[Array, "b"]


class SubsetGain(NamedTuple):
    """Gain of random subsets, which decides whether RLOO can start; `str` says what to do next.

    The spread of the rewards of a question's subsets could not decide it: with few possible
    answers, lucky guesses spread the rewards as much as informative tokens do. A run's folder
    stores the fields by their names.

    Attributes:
        sets: mean reward with sampled subsets.
        luck: mean reward with the subsets of another question's image: the reward of guessing.
        all: mean reward with all tokens.
        error: standard error of `sets` - `luck`.
        questions: number of questions.
    """

    sets: float
    luck: float
    all: float
    error: float
    questions: int

    @property
    def gain(self) -> float:
        """The gain of subsets over chance, as a fraction of the gain of all tokens."""
        full_gain = self.all - self.luck
        return (self.sets - self.luck) / full_gain if full_gain > 0 else 0.0

    @property
    def suffices(self) -> bool:
        """Whether training can start with RLOO."""
        return subsets_suffice(self.gain, self._gain_error)

    def is_better_than(self, before: "SubsetGain") -> bool:
        """Whether the mean reward of subsets rose by more than two standard errors.

        Args:
            before: the gain of subsets of the same questions, before a trial.
        """
        return self.sets - before.sets > 2 * math.hypot(self.error, before.error)

    @property
    def rewards(self) -> str:
        """The mean rewards, for lines of the log."""
        return (
            f"mean probability of an answer: {self.sets:.3f} with a few, {self.luck:.3f} with a "
            f"few of another image, {self.all:.3f} with all; {self.questions} questions"
        )

    @property
    def _gain_error(self) -> float:
        """The standard error of `gain`; the error of the gain of all tokens is neglected."""
        full_gain = self.all - self.luck
        return self.error / full_gain if full_gain > 0 else 0.0

    @property
    def advice(self) -> str:
        """The functions of `Policy` to train with next, in a sentence."""
        if self.all <= self.luck:
            return (
                "check answer_loss_fn: all tokens answer no better than the tokens of another "
                "image, so the model does not read the image, or the questions are few"
            )
        if self.suffices:
            return "train with Policy.rloo_loss"
        return (
            "train first with Policy.warm_start_loss, measure again, and continue with "
            "Policy.rloo_loss if the gain has risen; otherwise train first with Policy.train_loss"
        )

    def __str__(self) -> str:
        return f"{self.summary}\nnext: {self.advice}"

    @property
    def summary(self) -> str:
        """The gain, the criterion and the mean rewards, in one line."""
        clarity = "clearly" if self.suffices else "not clearly"
        return (
            f"a few tokens gain {100 * self.gain:.1f} +- {100 * self._gain_error:.1f} % of what "
            f"all tokens gain, {clarity} more than the {100 * MIN_GAIN:.0f} % from which sampled "
            f"subsets teach a policy ({self.rewards})"
        )


def subset_gain(rewards: Iterable[SubsetRewards]) -> SubsetGain:
    """Averages rewards over all questions, on the host.

    Args:
        rewards: rewards of batches of questions; at least one batch.

    Returns:
        The mean rewards, and the standard error of the gain over chance.
    """
    subsets, chance, full = (
        np.concatenate([np.asarray(batch) for batch in batches])
        for batches in zip(*rewards, strict=True)
    )
    return SubsetGain(
        sets=float(subsets.mean()),
        luck=float(chance.mean()),
        all=float(full.mean()),
        error=float((subsets - chance).std()) / len(subsets) ** 0.5,
        questions=len(subsets),
    )


@implicit_promotion()
def rloo_loss(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
    *,
    progress: Progress = Progress(),
) -> tuple[Float[Array, ""], Aux]:
    """Computes the RLOO objective: -mean(advantage x log-probability), plus the price of the stop.

    For each of b questions, g subsets of its image's tokens are sampled. The reward of a subset is
    the geometric mean probability of the answer's tokens. The advantage of a subset is its reward
    minus the mean reward of the question's other subsets.

    Subsets have at most `settings.longest` of an image's tokens, so rewards teach the learned stop
    nothing about larger counts. The price of the stop does: it is the expected price of all tokens
    that the stop would keep, up to the method's limit T_max.

    Args:
        method: the method to train; differentiate with respect to its weights only.
        settings: settings of RLOO.
        key: PRNG key; consumed.
        inputs: image and question of each row, never the answer.
        answer_loss_fn: maps the tokens of all subsets, with leaves [b, g, ...], to the mean loss of
            the answer's tokens, [b, g].
        progress: progress of training.

    Returns:
        A tuple (loss, aux). loss: [] the objective. aux: metrics to log, and the unchanged state of
        `progress`.

    Raises:
        ValueError: `answer_loss_fn` returned losses of another shape than [b, g].
    """
    sample_key, stop_key = jax.random.split(key)
    subsets, kept = _sample_and_gather(method, settings, sample_key, inputs, progress)
    # `leave_one_out` compares the subsets of a question along the leading axis: [g, b].
    answer_loss = _answer_losses(answer_loss_fn, kept).T
    reward = jnp.exp(-answer_loss)
    advantage = jax.lax.stop_gradient(leave_one_out(reward))
    loss = -jnp.mean(advantage * subsets.log_prob)
    metrics = {
        "lm_loss": jnp.mean(answer_loss),
        "reward": jnp.mean(reward),
        "reward_std": jnp.mean(jnp.std(reward, axis=0)),
        "entropy": jnp.mean(subsets.entropy),
    }
    if method.has_stop and settings.stops:
        # The weight `settings.stops` is the fraction of rows that end by the learned stop.
        stop = method.price_stop(_every_nth_row(inputs, settings.stops), stop_key, progress)
        loss = loss + settings.stops * jnp.mean(stop.price)
        metrics |= stop_metrics(stop.count, stop.shortest, stop.longest)
    else:
        metrics["k_mean"] = jnp.mean(subsets.picks.count.astype(jnp.float32))
    return loss, Aux(metrics, progress.state)


def _every_nth_row(inputs: Inputs, fraction: float) -> Inputs:
    """Returns about a fraction of the rows of a batch.

    The price of the stop needs an episode to T_max, with far more steps than a sampled subset. The
    fraction bounds the cost of these episodes.

    Args:
        inputs: image and question of each row.
        fraction: fraction of the rows to return, in (0, 1].

    Returns:
        Every n-th row with n = round(1 / fraction), starting with the first row. The rows are
        spaced evenly, so that a batch that is sharded over devices keeps rows on each device. Deep
        features are left out, because selectors do not read them.
    """
    step = max(1, round(1 / fraction))

    def take_rows(array):
        return None if array is None else array[::step]

    return Inputs(
        image=inputs.image[::step],
        text=take_rows(inputs.text),
        image_mask=take_rows(inputs.image_mask),
        text_mask=take_rows(inputs.text_mask),
        stats=inputs.stats,
    )


@implicit_promotion()
def subset_rewards(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]],
) -> SubsetRewards:
    """Computes the mean reward of each question with sampled subsets, and with two baselines.

    The rewards show whether subsets of tokens inform the language model at all. A method with
    randomly initialized weights samples random subsets.

    Args:
        method: the method that samples.
        settings: settings of RLOO; `stops` is ignored, so all subsets have exact counts.
        key: PRNG key; consumed.
        inputs: image and question of each row, never the answer.
        answer_loss_fn: maps tokens with leaves [b, g, ...] to the mean loss of the answer's tokens,
            [b, g]. It is also called with a single subset of all tokens, g = 1.

    Returns:
        The mean reward of the question's subsets, of the subsets of another question's image, and
        of all tokens.

    Raises:
        ValueError: `answer_loss_fn` returned losses of another shape than [b, g].
    """
    exact_settings = dataclasses.replace(settings, stops=0.0)
    _, kept = _jit_sample_and_gather(method, exact_settings, key, inputs, Progress())
    n, num_tokens = inputs.image.shape[1], jnp.sum(inputs.real, axis=1)
    # A single subset of all real tokens, with leaves [b, 1, n, ...].
    real_first = jnp.argsort(~inputs.real, axis=1, stable=True)
    all_kept = gather(first_picks(real_first, num_tokens, n), inputs.with_deepstack, n)
    all_kept = jax.tree.map(lambda x: x[:, None], all_kept)
    # Each question gets the subsets of the previous row's image.
    mismatched = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), kept)

    def mean_reward(tokens):
        return jnp.mean(jnp.exp(-_answer_losses(answer_loss_fn, tokens)), axis=1)

    return SubsetRewards(
        subsets=mean_reward(kept), chance=mean_reward(mismatched), full=mean_reward(all_kept)
    )


def _answer_losses(
    answer_loss_fn: Callable[[Pruned], Float[Array, "b g"]], kept: Pruned
) -> Float[Array, "b g"]:
    """Calls a user's loss function and checks the shape of its result.

    Args:
        answer_loss_fn: maps tokens with leaves [b, g, ...] to losses [b, g].
        kept: tokens of g subsets for each of b questions, with leaves [b, g, ...].

    Returns:
        [b, g] loss of the answer to each question from each subset.

    Raises:
        ValueError: the losses have another shape.
    """
    b, g = kept.count.shape
    # If b = g, transposed losses [g, b] have the expected shape. The shape for one subset per
    # question reveals the mistake.
    if b == g > 1:
        first_subset = jax.tree.map(lambda x: x[:, :1], kept)
        # A function that reads concrete values cannot be traced; this check is then skipped.
        with contextlib.suppress(jax.errors.JAXTypeError):
            _require_subset_losses(jax.eval_shape(answer_loss_fn, first_subset), b, 1)
    losses = answer_loss_fn(kept)
    _require_subset_losses(losses, b, g)
    return jnp.asarray(losses)


def _require_subset_losses(losses: Any, b: int, g: int) -> None:
    """Raises a ValueError unless the losses have shape [b, g]."""
    expected = f"({b}, {g}), a loss for each of the {g} subsets of each of the {b} rows"
    require_losses("answer_loss_fn", losses, (b, g), expected)


def _sample_and_gather(
    method: Selector,
    settings: RlooSettings,
    key: Array,
    inputs: Inputs,
    progress: Progress,
) -> tuple[SampledSubsets, Pruned]:
    """Samples g subsets of image tokens for each of b questions, and gathers their tokens.

    All subsets of a question have the same limits. Either their count is exact, or the learned stop
    ends each of them.

    Args:
        method: the method that samples subsets.
        settings: settings of RLOO: `samples` is g, `longest` the size of the largest subset as a
            fraction of an image's tokens, and `stops` the probability that the subsets of a
            question end by the learned stop.
        key: PRNG key; consumed.
        inputs: image and question of each row, with n image tokens per row.
        progress: progress of training.

    Returns:
        A tuple (subsets, kept). subsets: the sampled choices, with a leading axis g. kept: the
        tokens of each subset, with leaves [b, g, k, ...] and [b, g]. k = `settings.longest` * n is
        the static size that subsets are padded to.
    """
    subset_key, budget_key, stop_key = jax.random.split(key, 3)
    (batch_size, n), num_samples = inputs.image.shape[:2], settings.samples
    num_tokens = jnp.sum(inputs.real, axis=1)
    capacity = max(1, int(settings.longest * n))
    max_count = jnp.clip((settings.longest * num_tokens).astype(jnp.int32), 1, capacity)
    # Log-uniform counts: each doubling of the count is equally likely.
    min_fraction, _ = RANDOM_BUDGET
    fraction_range = min(min_fraction, settings.longest), settings.longest
    exact_count = draw_budgets(budget_key, num_tokens, max_count, fraction_range)
    stop_probability = settings.stops if method.has_stop else 0.0
    uses_stop = jax.random.uniform(stop_key, (batch_size,), jnp.float32) < stop_probability
    # The stop acts between two bounds. Equal bounds leave it no choice: the count is exact.
    min_stop_count = jnp.minimum(method.min_tokens, max_count)
    limits = Limits(
        min_tokens=jnp.where(uses_stop, min_stop_count, exact_count),
        max_tokens=jnp.where(uses_stop, max_count, exact_count),
        max_steps=capacity,
    )
    sample_keys = jax.random.split(subset_key, num_samples)
    subsets = method.sample_subsets(inputs, limits, sample_keys, progress)

    def gather_subset(picks):
        # Some language models also read deep features of each token; they are gathered with it.
        return gather(picks, inputs.with_deepstack, capacity)

    return subsets, jax.vmap(gather_subset, out_axes=1)(subsets.picks)


# A single compiled program for `subset_rewards`, which runs outside of jit.
_jit_sample_and_gather = jax.jit(_sample_and_gather, static_argnums=1)
