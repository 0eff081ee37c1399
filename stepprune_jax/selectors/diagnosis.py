"""Whether a policy learns: its tokens beside none, all, random ones, and another question's."""

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
from stepprune_jax.selectors.rloo import LEAST_GAIN

ALL, NONE, RANDOM, OWN, OTHER = "all tokens", "no token", "random", "policy", "another's question"

# Differences count from this many standard errors of the paired mean, and from this share of what
# all tokens gain over none. A policy that keeps less than half of that gain is far from them.
_ERRORS, _SHARE, _FAR = 2.0, 0.05, 0.5
# Nats below which a distribution is as good as decided.
_SATURATED = 0.05


class Diagnosis(NamedTuple):
    """What a policy's tokens are worth at one budget; `str` gives a table, and findings in words.

    Attributes:
        budget: tokens kept by the policy.
        loss: [b] loss of each question by what is kept: "all tokens", "no token", "random" ones,
            those of the "policy", and those it would keep for "another's question" if it reads any.
        accuracy: share of right answers, likewise; empty if not known.
        entropy: mean entropy in nats of the distributions that tokens are taken from.
        agreement: mean share of the kept tokens that the gate opens widest at this budget.
        findings: what is wrong, each with a remedy; empty if nothing was found.
        stops: what the learned stop keeps by itself; None without one.
    """

    budget: int
    loss: Mapping[str, Float[np.ndarray, "b"]]
    accuracy: Mapping[str, float]
    entropy: float
    agreement: float
    findings: tuple[str, ...]
    stops: StopCounts | None = None

    def __str__(self) -> str:
        right = {name: f", accuracy {100 * share:.1f} %" for name, share in self.accuracy.items()}
        lines = [
            f"{name}: loss {loss.mean():.4f}{right.get(name, '')}"
            for name, loss in self.loss.items()
        ]
        lines.append(f"entropy {self.entropy:.2f} nats; agreement {self.agreement:.2f}")
        lines += [str(self.stops)] if self.stops else []
        return "\n".join([f"{self.budget} tokens", *lines, *(self.findings or ("nothing found",))])


def describe(
    budget: int,
    loss: Mapping[str, Float[np.ndarray, "b"]],
    entropy: float = math.nan,
    agreement: float = math.nan,
    accuracy: Mapping[str, float] | None = None,
    recipe: str = "",
    stops: StopCounts | None = None,
) -> Diagnosis:
    """Puts in words what the losses of the same questions with different tokens say.

    With the `recipe` of the training, "gate" or "sets", also whether the other would be better.
    With the counts of the learned stop, also whether it sits at a bound.
    """
    gain = float(np.mean(loss[NONE] - loss[ALL]))

    def lower(case: str, other: str) -> bool:
        """Whether the losses of a case are clearly lower than those of another."""
        apart = loss[other] - loss[case]
        error = float(np.std(apart)) / math.sqrt(len(apart))
        return float(np.mean(apart)) > max(_ERRORS * error, _SHARE * gain)

    findings = []
    if not lower(ALL, NONE):
        findings.append(
            "the loss with all tokens is not clearly lower than with none: the frozen model, or "
            "the loss, does not read the image, or the questions are few; nothing can be learned"
        )
    else:
        short = lower(ALL, OWN)
        kept = float(np.mean(loss[NONE] - loss[OWN])) / gain
        by_chance = _gain(loss)
        if short and recipe == "sets" and not lower(OWN, RANDOM):
            findings.append(
                "no better than random tokens, from which its sampled sets began: train longer, or "
                'begin with the gate, as the recipe "auto" does where sets gain too little'
            )
        elif short and not lower(OWN, RANDOM):
            findings.append(
                "no better than random tokens: train longer, or with a higher learning rate; check "
                "that questions reach the policy and that features are standardised"
            )
        elif short and OTHER in loss and not lower(OWN, OTHER):
            findings.append(
                "does not read the question: its tokens serve another's as well; train longer, "
                "open the text gate from the start, or check `text` and `text_mask`"
            )
        elif short and kept < _FAR:
            findings.append(
                f"far from all tokens: {100 * kept:.0f} % of what they gain over none; keep more, "
                "or train longer"
            )
        if short and recipe == "gate" and by_chance >= LEAST_GAIN:
            findings.append(
                f"trained through the gate, though random tokens gain {100 * by_chance:.0f} % of "
                'what all do: sampled sets would teach it; go on with the recipe "sets" or "auto"'
            )
        if short and entropy < _SATURATED:
            findings.append(
                "saturated: its choices are decided, and wrong; raise the temperature or "
                "`polarisation_temperature`, or lower the learning rate"
            )
        if short and agreement < 0.5:
            findings.append(
                "what is kept is not what training opens: train on, and compare `draw=1.0` with 0.0"
            )
    if stops is not None and stops.finding:
        findings.append(stops.finding)
    shares = dict(accuracy or {})
    return Diagnosis(budget, dict(loss), shares, entropy, agreement, tuple(findings), stops)


def _gain(loss: Mapping[str, Float[np.ndarray, "b"]]) -> float:
    """Returns what random tokens gain in probability, as a share of what all do; 0 if by chance."""
    none, anyhow, every = (np.exp(-loss[case]) for case in (NONE, RANDOM, ALL))
    apart, room = anyhow - none, float(np.mean(every - none))
    error = float(np.std(apart)) / math.sqrt(len(apart))
    clear = room > 0 and float(np.mean(apart)) > _ERRORS * error
    return float(np.mean(apart)) / room if clear else 0.0


def cases(
    own: Int[AnyArray, "b t"],
    other: Int[AnyArray, "b u"] | None,
    anyhow: Int[AnyArray, "b n"],
    count: Int[AnyArray, "b"],
    tokens: Int[AnyArray, "b"],
) -> dict[str, tuple[Int[AnyArray, "b _"], Int[AnyArray, "b"]]]:
    """Returns an order of tokens for each case, and the number of its first that are kept.

    Args:
        own: a policy's order for each question.
        other: the one for another's question; None for a policy that reads none.
        anyhow: all tokens in a random order, padding last.
        count: tokens kept by the policy.
        tokens: those of each row without padding.
    """
    found = {ALL: (anyhow, tokens), NONE: (anyhow, 0 * count), RANDOM: (anyhow, count)}
    found[OWN] = own, count
    return found if other is None else found | {OTHER: (other, count)}


@jax.jit
def run_choose(
    method: Selector, inputs: Inputs, limits: Limits, key: Array | None = None, **options: Any
) -> Picks:
    """Runs `Selector.choose` as one program, rather than one for each of its operations."""
    return method.choose(inputs, limits, key, **options)


@functools.partial(jax.jit, static_argnums=2)
def _opened(method: Selector, inputs: Inputs, budget: int):
    return method.open_scores(inputs, budget)


@implicit_promotion()
def measure(
    method: Selector,
    inputs: Inputs,
    loss_fn: Callable[[Pruned], Any],
    budget: int,
    key: Array,
    recipe: str = "",
    stops: StopCounts | None = None,
) -> Diagnosis:
    """Computes the losses of all cases, and describes them; see `Policy.diagnose`."""
    (b, n), real = inputs.image.shape[:2], inputs.real
    tokens = jnp.sum(real, axis=1, dtype=jnp.int32)
    noise = jnp.where(real, jax.random.uniform(key, (b, n), jnp.float32), 2)
    method = method.with_budget(budget).program()
    limits = Limits(row_counts("budget", budget, 1, method.longest(n), b))
    own, other = run_choose(method, inputs, limits), None
    if inputs.text is not None and method.config.text_width and b > 1:
        mask = None if inputs.text_mask is None else jnp.roll(inputs.text_mask, 1, axis=0)
        swapped = inputs._replace(text=jnp.roll(inputs.text, 1, axis=0), text_mask=mask)
        other = run_choose(method, swapped, limits).action
    loss, accuracy = {}, {}
    anyhow = jnp.argsort(noise, axis=1)
    for name, (order, count) in cases(own.action, other, anyhow, own.count, tokens).items():
        chosen, size = first_picks(order, count, n), n if name == ALL else budget
        result = loss_fn(run_gather(chosen, inputs.image, capacity=size))
        losses, *right = result if isinstance(result, tuple) else (result,)
        for values in (losses, *right):
            require_losses("loss_fn", values, (b,), f"one for each of the {b} rows")
        loss[name] = np.asarray(losses, np.float64)
        if right:
            accuracy[name] = float(np.mean(right))
    scores, entropy = _opened(method, inputs, budget)
    widest = first_picks(jnp.argsort(-scores, axis=1, stable=True), own.count, n)
    shared = jnp.sum(widest.selected & own.selected, axis=1) / jnp.maximum(own.count, 1)
    agreement = float(jnp.mean(shared))
    return describe(budget, loss, float(entropy), agreement, accuracy, recipe, stops)


def measure_stop(method: Selector, inputs: Inputs) -> StopCounts:
    """Counts what the learned stop of a method keeps by itself of some images."""
    own = method.with_budget("own")
    picks = run_choose(own.program(), inputs, own.as_arrays(inputs, Limits()))
    tokens = np.asarray(jnp.sum(inputs.real, axis=1))
    longest = np.array([min(size, method.longest(size)) for size in tokens.tolist()])
    shortest = np.minimum(method.min_tokens, longest)
    return describe_counts(np.asarray(picks.count), shortest, longest, tokens)
