"""Rows of the table: a method, a budget, and what it keeps of each question's picture."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.benchmarks.answer_files import pruning_rate
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.answers import Selection
from stepprune_jax.evaluation.names import ALL, CLS, GRID, RANDOM, own_stop
from stepprune_jax.evaluation.orders import Ordering
from stepprune_jax.evaluation.split import Encoded
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.policy import calibrate_stop_bias, count_at_bias
from stepprune_jax.pruning import grid_order


class Row(NamedTuple):
    """One row before its questions are answered.

    Attributes:
        method: name.
        mode: "exact" (every question keeps the budget) or "adaptive" (the policy stops).
        budget: tokens to keep, on average if adaptive; None for a policy's own stop.
        num_tokens: N.
        selection: what is kept.
        stop_bias: added to the stop logits; None for exact rows.
        seconds: of a question, on average, for the order that it is kept in.
    """

    method: str
    mode: str
    budget: int | None
    num_tokens: int
    selection: Selection
    stop_bias: float | None = None
    seconds: float = 0.0

    @property
    def pruning_rate(self) -> float:
        """Of the budget, in percent; of a policy's own stop that of its mean count."""
        count = self.selection.count.mean() if self.budget is None else self.budget
        return pruning_rate(float(count), self.num_tokens)


def grid_shape(config: LlavaConfig) -> tuple[int, int]:
    """Rows and columns of a picture's patches."""
    side = config.vision.image_size // config.vision.patch_size
    return side, side


def exact_row(method: str, order: Int[np.ndarray, "q t"], budget: int, num_tokens: int) -> Row:
    """The row that keeps the first `budget` tokens of each order."""
    count = np.full(len(order), budget, np.int32)
    return Row(method, "exact", budget, num_tokens, Selection(order, count))


def untrained_row(
    method: str,
    split: Encoded,
    config: LlavaConfig,
    budget: int,
    drawn: Int[np.ndarray, "q n"],
) -> Row:
    """All tokens, random ones, a grid, or the class token's favourites.

    Args:
        method: `ALL`, `RANDOM`, `GRID` or `CLS`.
        split: the questions; for `CLS` encoded with the class token's attention.
        config: the model's.
        budget: tokens to keep; not read for all tokens.
        drawn: a random order of each question's tokens; read for random ones alone.
    """
    questions, n = len(split.image_of), split.features.shape[1]
    if method == ALL:
        return exact_row(ALL, np.broadcast_to(np.arange(n, dtype=np.int32), (questions, n)), n, n)
    if method == RANDOM:
        return exact_row(RANDOM, drawn, budget, n)
    if method == GRID:
        first = n - config.vision.num_patches  # a class token that is kept stands in front
        grid = first + grid_order(*grid_shape(config), budget, questions)
        return exact_row(GRID, grid, budget, n)
    return exact_row(CLS, split.by_attention[split.image_of], budget, n)


def exact_rows(method: str, found: Ordering, budgets: Sequence[int], num_tokens: int) -> list[Row]:
    """A trained method at exact budgets."""
    return [
        exact_row(method, found.order, budget, num_tokens)._replace(seconds=found.seconds)
        for budget in budgets
    ]


def adaptive_rows(
    method: str,
    policy: Policy,
    found: Ordering,
    validation: Ordering,
    budgets: Sequence[int],
    num_tokens: int,
) -> list[Row]:
    """A policy that stops by itself, at biases that meet each budget on the validation split.

    Args:
        method: name of the rows.
        policy: StepPrune's.
        found: its order on the questions.
        validation: its order on other questions.
        budgets: mean numbers of tokens wanted.
        num_tokens: N.
    """
    biases = stop_biases(policy, validation.margin, budgets)
    rows = []
    for budget, bias in zip(budgets, biases, strict=True):
        chosen = stopped(found, policy, bias)
        rows.append(Row(method, "adaptive", budget, num_tokens, chosen, bias, found.seconds))
    return rows


def stop_biases(
    policy: Policy, margin: Float[np.ndarray, "q t"], budgets: Sequence[int]
) -> list[float]:
    """Stop biases at which a policy keeps so many tokens on average.

    Args:
        policy: StepPrune's.
        margin: its stop margins on some questions.
        budgets: mean numbers of tokens wanted.
    """
    least = min(policy.config.min_tokens, margin.shape[1])
    margin = jnp.asarray(margin)
    bound = float(jnp.max(jnp.abs(margin))) + 1
    return [
        float(calibrate_stop_bias(margin, budget, min_tokens=least, max_bias=bound))
        for budget in budgets
    ]


def own_stop_row(method: str, policy: Policy, found: Ordering, num_tokens: int) -> Row:
    """A policy that stops where it learned to, at the mean number of tokens that this gives."""
    selection = stopped(found, policy, 0.0)
    return Row(own_stop(method), "adaptive", None, num_tokens, selection, 0.0, found.seconds)


def stopped(found: Ordering, policy: Policy, bias: float) -> Selection:
    """What a policy keeps that stops by itself, with a number added to its stop logits."""
    least = min(policy.config.min_tokens, found.order.shape[1])
    count = np.asarray(count_at_bias(jnp.asarray(found.margin), bias, least))
    return Selection(found.order, count)
