"""Diagnosis of learning: the loss with a policy's tokens, compared with four baselines."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.policy import Inputs, Limits, Picks, Pruned
from stepprune_jax.policy.base import AnyArray
from stepprune_jax.policy.gathering import run_gather
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.objective import require_losses
from stepprune_jax.policy.rollout import row_counts
from stepprune_jax.policy.selection import first_picks
from stepprune_jax.selectors.base import Selector
from stepprune_jax.selectors.calibration import StopCounts, describe_counts
from stepprune_jax.selectors.rloo import subsets_suffice

# Cases of a diagnosis. Each case keeps other tokens of the same images.
ALL, NONE, RANDOM, POLICY = "all tokens", "no token", "random", "policy"
OTHER_QUESTION = "another's question"

# The full gain is the loss without tokens minus the loss with all tokens. A difference of losses is
# significant from two standard errors of the paired mean, and relevant from 5 % of the full gain. A
# policy with less than half of the full gain is reported as far from all tokens.
_NUM_ERRORS, _MIN_GAIN_SHARE, _FAR_GAIN_SHARE = 2.0, 0.05, 0.5
# Entropy in nats below which a distribution is reported as saturated.
_SATURATED_ENTROPY = 0.05


class Remedies(NamedTuple):
    """Advice of a diagnosis, in the words of the interface that its reader uses.

    Attributes:
        begin: how to train before RLOO, where subsets of tokens gain too little.
        use_rloo: how to continue with RLOO.
        read_question: how to make a policy read the question.
        use_stats: how to standardize features.
        sharpen: how to make the choices of a saturated policy vary.
        compare_draws: how to compare sampling temperatures.
    """

    begin: str
    use_rloo: str
    read_question: str
    use_stats: str
    sharpen: str
    compare_draws: str


# For users of `Policy`, and for users of train.py.
API_REMEDIES = Remedies(
    begin="begin with Policy.warm_start_loss or Policy.train_loss, and ask "
    "Policy.measure_subset_gain whether subsets can teach it now",
    use_rloo="continue with Policy.rloo_loss if Policy.measure_subset_gain agrees",
    read_question="pass Progress(text_gate=1.0) to Policy.train_loss, and check `text` and "
    "`text_mask`",
    use_stats="check that questions reach the policy, and that it has the statistics of its "
    "features (`FeatureStats`)",
    sharpen="raise `temperature` or `polarisation_temperature` of `PolicyConfig`, or lower the "
    "learning rate",
    compare_draws="compare policy.replace(draw=1.0) with policy.replace(draw=0.0)",
)
CONFIG_REMEDIES = Remedies(
    begin='begin with the warm start or the gate, as config.recipe="auto" does where subsets gain '
    "too little",
    use_rloo='config.recipe="auto" measures whether it does; to continue this policy, set '
    'config.recipe="rloo" and config.start=FILE',
    read_question="leave config.text_gate_anneal at 0, and check config.policy.text_width",
    use_stats="check that config.policy.text_width is not 0 and that config.data.stats_images is "
    "not too small",
    sharpen="raise config.policy.temperature or config.policy.polarisation_temperature, or lower "
    "config.optimizer.lr",
    compare_draws="compare config.policy.draw=1.0 with 0.0",
)


class Diagnosis(NamedTuple):
    """Losses with a policy's tokens and with baselines, at one budget; `str` gives a report.

    Attributes:
        budget: number of tokens that the policy keeps.
        loss: [b] loss of each question, by the tokens that are kept: "all tokens", "no token",
            "random", "policy", and "another's question" (the tokens that the policy keeps for
            another question, if it reads questions).
        accuracy: fraction of right answers for the same cases; empty if answers are not judged.
        entropy: mean entropy in nats of the distributions that the tokens are chosen from.
        agreement: mean fraction of the kept tokens that also have the largest training gates.
        findings: problems, each with a remedy; empty if no problem was found.
        stops: counts of the learned stop; None for a method without one.
    """

    budget: int
    loss: Mapping[str, Float[np.ndarray, "b"]]
    accuracy: Mapping[str, float]
    entropy: float
    agreement: float
    findings: tuple[str, ...]
    stops: StopCounts | None = None

    def __str__(self) -> str:
        lines = [f"{self.budget} tokens"]
        for case, loss in self.loss.items():
            accuracy = self.accuracy.get(case)
            suffix = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
            lines.append(f"{case}: loss {loss.mean():.4f}{suffix}")
        lines.append(f"entropy {self.entropy:.2f} nats; agreement {self.agreement:.2f}")
        if self.stops:
            lines.append(str(self.stops))
        return "\n".join([*lines, *(self.findings or ("no problem found",))])


def describe(
    budget: int,
    loss: Mapping[str, Float[np.ndarray, "b"]],
    entropy: float = math.nan,
    agreement: float = math.nan,
    accuracy: Mapping[str, float] | None = None,
    *,
    recipe: str = "",
    stops: StopCounts | None = None,
    remedies: Remedies = API_REMEDIES,
) -> Diagnosis:
    """Finds problems of a policy in the losses of the same questions with different tokens.

    Args:
        budget: number of tokens that the policy keeps.
        loss: [b] loss of each question, by case; see `Diagnosis`.
        entropy: mean entropy of the distributions that the tokens are chosen from.
        agreement: mean fraction of the kept tokens that also have the largest training gates.
        accuracy: fraction of right answers, by case.
        recipe: recipe of the training, "gate" or "rloo", to find out whether the other recipe would
            be better; "" if it is not known.
        stops: counts of the learned stop, to find out whether they are at a bound.
        remedies: advice in the words of the reader's interface.

    Returns:
        The diagnosis, with a finding for each problem.
    """
    findings = []
    if not _is_lower(loss, ALL, NONE):
        findings.append(
            "the loss with all tokens is not clearly lower than with none: the frozen model, or "
            "the loss, does not read the image, or the questions are few; nothing can be learned"
        )
    elif _is_lower(loss, ALL, POLICY):
        findings += _find_shortcomings(loss, entropy, agreement, recipe, remedies)
    if stops is not None and stops.finding:
        findings.append(stops.finding)
    return Diagnosis(
        budget=budget,
        loss=dict(loss),
        accuracy=dict(accuracy or {}),
        entropy=entropy,
        agreement=agreement,
        findings=tuple(findings),
        stops=stops,
    )


def _is_lower(loss: Mapping[str, Float[np.ndarray, "b"]], case: str, baseline: str) -> bool:
    """Returns whether the losses of a case are significantly lower than a baseline.

    Args:
        loss: [b] loss of each question, by case; includes all tokens and no token.
        case: name of the case.
        baseline: name of the case to compare with.
    """
    difference = loss[baseline] - loss[case]
    error = float(np.std(difference)) / math.sqrt(len(difference))
    full_gain = float(np.mean(loss[NONE] - loss[ALL]))
    return float(np.mean(difference)) > max(_NUM_ERRORS * error, _MIN_GAIN_SHARE * full_gain)


def _find_shortcomings(
    loss: Mapping[str, Float[np.ndarray, "b"]],
    entropy: float,
    agreement: float,
    recipe: str,
    remedies: Remedies,
) -> list[str]:
    """Explains why the losses of a policy are clearly above the losses with all tokens.

    Args:
        loss: [b] loss of each question, by case; see `Diagnosis`.
        entropy: mean entropy of the distributions that the tokens are chosen from.
        agreement: mean fraction of the kept tokens that also have the largest training gates.
        recipe: recipe of the training, "gate", "rloo", or "" if it is not known.
        remedies: advice in the words of the reader's interface.

    Returns:
        Sentences that name a problem and a remedy.
    """
    findings = []
    full_gain = float(np.mean(loss[NONE] - loss[ALL]))
    gain_share = float(np.mean(loss[NONE] - loss[POLICY])) / full_gain
    if not _is_lower(loss, POLICY, RANDOM) and recipe == "rloo":
        findings.append(
            "no better than random tokens, from which its sampled subsets began: train longer, or "
            f"{remedies.begin}"
        )
    elif not _is_lower(loss, POLICY, RANDOM):
        findings.append(
            "no better than random tokens: train longer, or with a higher learning rate; "
            f"{remedies.use_stats}"
        )
    elif OTHER_QUESTION in loss and not _is_lower(loss, POLICY, OTHER_QUESTION):
        findings.append(
            "does not read the question: its tokens for another question are as good; train "
            f"longer; {remedies.read_question}"
        )
    elif gain_share < _FAR_GAIN_SHARE:
        findings.append(
            f"far from all tokens: {100 * gain_share:.0f} % of the gain of all tokens over none; "
            "keep more tokens, or train longer"
        )
    random_gain, gain_error = _random_gain(loss)
    if recipe == "gate" and subsets_suffice(random_gain, gain_error):
        findings.append(
            f"trained through the gate, though random tokens gain {100 * random_gain:.0f} % of "
            f"what all tokens gain over none: RLOO may do better; {remedies.use_rloo}"
        )
    if entropy < _SATURATED_ENTROPY:
        findings.append(
            "saturated: its choices no longer vary, and they are wrong; " + remedies.sharpen
        )
    if agreement < 0.5:
        findings.append(
            f"what is kept is not what training opens: train longer, and {remedies.compare_draws}"
        )
    return findings


def _random_gain(loss: Mapping[str, Float[np.ndarray, "b"]]) -> tuple[float, float]:
    """Returns the gain of random tokens and its standard error, in units of the gain of all tokens.

    A gain is the probability of the answer minus its probability without tokens. `SubsetGain`
    compares with the tokens of another image instead, and samples several subsets; the criterion
    for both is `subsets_suffice`.

    Args:
        loss: [b] loss of each question, by case; see `Diagnosis`.

    Returns:
        The gain and its error; (0, 0) if all tokens gain nothing.
    """
    none_prob, random_prob, full_prob = (np.exp(-loss[case]) for case in (NONE, RANDOM, ALL))
    gain, full_gain = random_prob - none_prob, float(np.mean(full_prob - none_prob))
    if full_gain <= 0:
        return 0.0, 0.0
    error = float(np.std(gain)) / math.sqrt(len(gain))
    return float(np.mean(gain)) / full_gain, error / full_gain


def cases(
    policy_order: Int[AnyArray, "b t"],
    other_order: Int[AnyArray, "b u"] | None,
    random_order: Int[AnyArray, "b n"],
    count: Int[AnyArray, "b"],
    num_tokens: Int[AnyArray, "b"],
) -> dict[str, tuple[Int[AnyArray, "b _"], Int[AnyArray, "b"]]]:
    """Returns the tokens to keep in each case of a diagnosis.

    Args:
        policy_order: the policy's order of tokens for each question.
        other_order: the policy's order for another question; None if it reads no questions.
        random_order: all tokens in random order, padding last.
        count: [b] number of tokens that the policy keeps.
        num_tokens: [b] number of real tokens.

    Returns:
        A pair (order, count) by the name of the case. The first `count` tokens of each row's order
        are kept.
    """
    orders = {
        ALL: (random_order, num_tokens),
        NONE: (random_order, 0 * count),  # zeros with the dtype of `count`
        RANDOM: (random_order, count),
        POLICY: (policy_order, count),
    }
    if other_order is not None:
        orders[OTHER_QUESTION] = other_order, count
    return orders


@jax.jit
def run_choose(
    method: Selector, inputs: Inputs, limits: Limits, key: Array | None = None, **options: Any
) -> Picks:
    """Runs `Selector.choose` as one compiled program."""
    return method.choose(inputs, limits, key, **options)


@functools.partial(jax.jit, static_argnums=2)
def _run_open_scores(
    method: Selector, inputs: Inputs, budget: int
) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
    """Runs `Selector.open_scores` as one compiled program."""
    return method.open_scores(inputs, budget)


@implicit_promotion()
def measure(
    method: Selector,
    inputs: Inputs,
    loss_fn: Callable[[Pruned], Any],
    budget: int,
    *,
    key: Array,
    recipe: str = "",
    stops: StopCounts | None = None,
) -> Diagnosis:
    """Computes the losses with a policy's tokens and with all baselines; see `Policy.diagnose`.

    Args:
        method: the method to diagnose.
        inputs: image and question of b rows, with n image tokens per row.
        loss_fn: maps kept tokens to losses [b], or to a tuple (losses, whether each answer is
            right).
        budget: number of tokens that the policy keeps.
        key: PRNG key of the random tokens; consumed.
        recipe: recipe of the training, "gate", "rloo", or "" if it is not known.
        stops: counts of the learned stop; None for a method without one.

    Returns:
        The diagnosis at this budget.

    Raises:
        ValueError: `loss_fn` did not return one loss per row.
    """
    (b, n), real = inputs.image.shape[:2], inputs.real
    num_tokens = jnp.sum(real, axis=1, dtype=jnp.int32)
    # A random order of each row's tokens. Uniform noise is below 1, so 2 sorts the padding last.
    noise = jnp.where(real, jax.random.uniform(key, (b, n), jnp.float32), 2)
    random_order = jnp.argsort(noise, axis=1)
    method = method.with_budget(budget).program()
    limits = Limits(row_counts("budget", budget, 1, method.longest(n), b))
    picks, other_order = run_choose(method, inputs, limits), None
    if inputs.text is not None and method.config.text_width and b > 1:
        # Each image with the question of the previous row.
        text_mask = None if inputs.text_mask is None else jnp.roll(inputs.text_mask, 1, axis=0)
        text = jnp.roll(inputs.text, 1, axis=0)
        mismatched = inputs._replace(text=text, text_mask=text_mask)
        other_order = run_choose(method, mismatched, limits).action
    loss, accuracy = {}, {}
    orders = cases(picks.action, other_order, random_order, picks.count, num_tokens)
    for case, (order, count) in orders.items():
        capacity = n if case == ALL else budget
        kept = run_gather(first_picks(order, count, n), inputs.image, capacity=capacity)
        losses_and_judgments = loss_fn(kept)
        if not isinstance(losses_and_judgments, tuple):
            losses_and_judgments = (losses_and_judgments,)
        for values in losses_and_judgments:
            require_losses("loss_fn", values, (b,), f"one for each of the {b} rows")
        row_losses, *is_right = losses_and_judgments
        loss[case] = np.asarray(row_losses, np.float64)
        if is_right:
            accuracy[case] = float(np.mean(is_right))
    # Agreement of the policy's choice with the tokens that training would give the largest gates.
    scores, entropy = _run_open_scores(method, inputs, budget)
    largest_gates = first_picks(jnp.argsort(-scores, axis=1, stable=True), picks.count, n)
    num_shared = jnp.sum(largest_gates.selected & picks.selected, axis=1)
    agreement = float(jnp.mean(num_shared / jnp.maximum(picks.count, 1)))
    return describe(budget, loss, float(entropy), agreement, accuracy, recipe=recipe, stops=stops)


def measure_stop(method: Selector, inputs: Inputs) -> StopCounts:
    """Measures how many tokens of each image a method keeps by its learned stop.

    Args:
        method: a method with a learned stop.
        inputs: image and question of each row.

    Returns:
        Statistics of the counts, and fractions of the counts at the method's bounds.
    """
    method = method.with_budget("adaptive")
    picks = run_choose(method.program(), inputs, method.as_arrays(inputs, Limits()))
    num_tokens = np.asarray(jnp.sum(inputs.real, axis=1))
    longest = np.array([min(count, method.longest(count)) for count in num_tokens.tolist()])
    shortest = np.minimum(method.min_tokens, longest)
    return describe_counts(np.asarray(picks.count), shortest, longest, num_tokens)
