"""Calibration of a policy: the mean number of kept tokens at each stop bias.

A policy ends an episode before the first step with a positive stop margin (stop logit minus the
best token's logit). A stop bias is added to all margins. Counts are numbers of kept tokens.
"""

import itertools
import logging
import math
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from stepprune_jax.policy import calibrate_stop_bias
from stepprune_jax.policy.trajectory import count_at_bias
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

# Number of target counts, from the smallest count to T_max in equal ratios. Targets that give equal
# mean counts are merged.
ROWS = 25
# If this fraction of the counts is at one bound, a learned stop is hardly better than an exact
# budget.
_ALMOST_ALL = 0.9
# Number of decimals of a stop bias. Without rounding, the bias could equal minus the margin of some
# question, and rounding errors would decide the count of that question.
_DECIMALS = 3


class StopCounts(NamedTuple):
    """Statistics of the counts at which a learned stop ends; `str` gives a sentence.

    Attributes:
        mean: mean count.
        deviation: standard deviation of the counts.
        num_tokens: mean number of visual tokens of the images.
        at_floor: fraction of the questions whose count is the policy's minimum.
        at_cap: fraction of the questions whose count is T_max.
    """

    mean: float
    deviation: float
    num_tokens: float
    at_floor: float
    at_cap: float

    def __str__(self) -> str:
        return (
            f"the learned stop keeps {self.mean:.1f} +- {self.deviation:.1f} of "
            f"{self.num_tokens:g} tokens; {self.at_floor:.0%} of the counts are the minimum, "
            f"{self.at_cap:.0%} are T_max"
        )

    @property
    def finding(self) -> str:
        """A warning with a remedy if nearly all counts are at one bound; "" otherwise."""
        if self.at_cap >= _ALMOST_ALL:
            return (
                f"the learned stop sits at T_max: {self.at_cap:.0%} of the counts are T_max, no "
                "more than an exact budget; train longer, raise `length_weight`, or give a budget"
            )
        if self.at_floor >= _ALMOST_ALL:
            return (
                f"the learned stop sits at the minimum: {self.at_floor:.0%} of the counts are the "
                "minimum, which is right if so few tokens suffice; if more tokens help, lower "
                "`length_weight`, or give a budget"
            )
        return ""


def describe_counts(
    count: Int[np.ndarray, "q"],
    shortest: Int[np.ndarray, "q"],
    longest: Int[np.ndarray, "q"],
    num_tokens: Int[np.ndarray, "q"],
) -> StopCounts:
    """Computes statistics of the counts of a learned stop, over q questions.

    Args:
        count: [q] number of tokens that are kept of each question's image.
        shortest: [q] smallest possible count: the number of tokens before the stop is available.
        longest: [q] largest possible count, T_max.
        num_tokens: [q] number of tokens of each image.

    Returns:
        Mean, deviation, and fractions of the counts at either bound.
    """
    # If both bounds are equal, the stop has no choice.
    has_choice = shortest < longest
    return StopCounts(
        mean=float(np.mean(count)),
        deviation=float(np.std(count)),
        num_tokens=float(np.mean(num_tokens)),
        at_floor=float(np.mean(has_choice & (count <= shortest))),
        at_cap=float(np.mean(has_choice & (count >= longest))),
    )


def count_stops(
    margin: Float[np.ndarray, "q t"],
    num_tokens: Int[np.ndarray, "q"],
    min_tokens: int,
    stop_bias: float,
) -> StopCounts:
    """Computes statistics of the counts at one stop bias, over q questions.

    Args:
        margin: [q, t] stop margins before each step, as in `calibrate`.
        num_tokens: [q] number of tokens of each question's image.
        min_tokens: number of tokens that are chosen before the stop is available.
        stop_bias: number that is added to the margins.

    Returns:
        Mean, deviation, and fractions of the counts at either bound.
    """
    min_tokens = min(min_tokens, margin.shape[1])
    longest = np.isfinite(margin).sum(1)  # margins are infinite from T_max on
    count = np.asarray(count_at_bias(jnp.asarray(margin), stop_bias, min_tokens))
    return describe_counts(count, np.minimum(min_tokens, longest), longest, num_tokens)


def log_stops(stops: StopCounts) -> None:
    """Logs the counts of a learned stop, with a warning if nearly all are at one bound."""
    _LOG.info("%s", stops)
    if stops.finding:
        _LOG.warning("%s", stops.finding)


class Calibration(NamedTuple):
    """Table of stop biases and mean counts of a policy, measured on a validation split.

    The first four attributes have one entry per stop bias, by ascending mean count.

    Attributes:
        mean_count: mean K over the questions.
        stop_bias: number that is added to the policy's stop logits.
        at_floor: fraction of the questions whose K is the policy's minimum.
        at_cap: fraction of the questions whose K is T_max.
        num_tokens: mean number of visual tokens of the questions' images.
        questions: number of questions.
    """

    mean_count: tuple[float, ...]
    stop_bias: tuple[float, ...]
    at_floor: tuple[float, ...]
    at_cap: tuple[float, ...]
    num_tokens: float
    questions: int

    def bias_at(self, mean: float | int) -> float:
        """Returns the stop bias for a mean count, interpolated linearly between table entries.

        Args:
            mean: number of tokens to keep on average.

        Returns:
            The number to add to the stop logits.

        Raises:
            ValueError: no stop bias of the table gives this mean.

        Warns:
            UserWarning: nearly all counts would be the minimum, or nearly all T_max.
        """
        bias, at_floor, at_cap = self.row_at(mean)
        fraction, bound_name = max((at_floor, "least"), (at_cap, "largest"))
        if fraction >= _ALMOST_ALL:
            warnings.warn(
                f"at a mean of {mean:g} tokens the count of {fraction:.0%} of the calibration's "
                f"questions is the {bound_name} that the policy may keep, little more than an "
                "exact budget",
                stacklevel=2,
            )
        return bias

    def row_at(self, mean: float | int) -> tuple[float, float, float]:
        """Interpolates the table linearly at a mean count.

        Args:
            mean: number of tokens to keep on average.

        Returns:
            A tuple (stop_bias, at_floor, at_cap); see the attributes.

        Raises:
            ValueError: the mean is outside of the table.
        """
        low, high = self.mean_count[0], self.mean_count[-1]
        if not low <= mean <= high:
            raise UserError(
                f"the mean budget is {mean}, expected {low:g} to {high:g}, what the policy keeps "
                f"of {self.num_tokens:g} visual tokens on average"
            )
        bias, at_floor, at_cap = (
            float(np.interp(mean, self.mean_count, column))
            for column in (self.stop_bias, self.at_floor, self.at_cap)
        )
        return bias, at_floor, at_cap

    def bias_in_program(self, mean: ArrayLike) -> ArrayLike:
        """Returns the stop bias for a mean count that may be traced.

        Raises:
            ValueError: `mean` is a concrete number outside of the table.
        """
        if isinstance(mean, float | int):
            return self.row_at(mean)[0]
        return jnp.interp(mean, jnp.array(self.mean_count), jnp.array(self.stop_bias))

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values; `read_calibration` reads them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }


def calibrate(
    margin: Float[np.ndarray, "q t"], num_tokens: Int[np.ndarray, "q"], min_tokens: int
) -> Calibration:
    """Computes the mean count of a policy at a range of stop biases, over q questions.

    Args:
        margin: [q, t] stop margins (stop logit minus the best token's logit) before each step, from
            rollouts to T_max; infinite from each question's T_max on.
        num_tokens: [q] number of tokens of each question's image.
        min_tokens: number of tokens that are chosen before the stop is available.

    Returns:
        The table, by ascending mean count. Its targets are `ROWS` mean counts in equal ratios, from
        the smallest to the largest possible mean.
    """
    margins, min_tokens = jnp.asarray(margin), min(min_tokens, margin.shape[1])
    longest = np.isfinite(margin).sum(1)
    shortest = np.minimum(min_tokens, longest)
    # With this bias every question stops at its minimum. With minus this bias, none stops early.
    max_bias = float(np.max(np.abs(margin), where=np.isfinite(margin), initial=0)) + 1
    biases = [
        float(calibrate_stop_bias(margins, target, min_tokens=min_tokens, max_bias=max_bias))
        for target in np.geomspace(max(1, shortest.mean()), max(1, longest.mean()), ROWS)
    ]
    # (stop bias, at_floor, at_cap) by mean count; the first bias with a mean count is kept.
    row_by_mean: dict[float, tuple[float, float, float]] = {}
    for bias in (round(bias, _DECIMALS) for bias in (*biases, max_bias, -max_bias)):
        count = np.asarray(count_at_bias(margins, bias, min_tokens))
        at_floor, at_cap = float((count == shortest).mean()), float((count == longest).mean())
        row_by_mean.setdefault(float(count.mean()), (bias, at_floor, at_cap))
    mean_counts = tuple(sorted(row_by_mean))
    stop_biases, floor_fractions, cap_fractions = zip(
        *(row_by_mean[mean] for mean in mean_counts), strict=True
    )
    return Calibration(
        mean_count=mean_counts,
        stop_bias=stop_biases,
        at_floor=floor_fractions,
        at_cap=cap_fractions,
        num_tokens=float(np.mean(num_tokens)),
        questions=len(margin),
    )


def read_calibration(value: Any) -> Calibration:
    """Creates a calibration from the result of `Calibration.as_json`, and checks all values.

    Args:
        value: JSON value, such as a part of a policy file.

    Returns:
        The calibration.

    Raises:
        ValueError: the value is damaged; the message names the field.
    """
    damaged_field = "fields"
    if isinstance(value, dict) and value.keys() == {*Calibration._fields}:
        damaged_field = _find_damaged_field(value)
    if damaged_field is not None:
        raise UserError(
            f"the calibration's {damaged_field} is damaged, expected what stepprune-calibrate "
            "writes"
        )
    fields: dict[str, Any] = {
        name: tuple(column) if isinstance(column, list) else column
        for name, column in value.items()
    }
    return Calibration(**fields)


def _find_damaged_field(value: dict[str, Any]) -> str | None:
    """Finds the first field of a calibration with an impossible value.

    Args:
        value: a dict with the fields of a `Calibration`.

    Returns:
        The name of the field; None if all values are possible.
    """
    mean_counts, num_tokens = value["mean_count"], value["num_tokens"]
    if not is_number(num_tokens):
        return "num_tokens"
    if not is_count(value["questions"]):
        return "questions"
    # Lowest and highest value of each column, and its order: ascending (1), descending (-1) or any
    # (0).
    column_rules = {
        "mean_count": (0, num_tokens, 1),
        "stop_bias": (-math.inf, math.inf, -1),
        "at_floor": (0, 1, 0),
        "at_cap": (0, 1, 0),
    }
    for name, (low, high, sign) in column_rules.items():
        column = value[name]
        if not isinstance(column, list) or not len(column) == len(mean_counts) > 0:
            return name
        if not all(is_number(x) and low <= x <= high for x in column):
            return name
        if sign and any(
            sign * previous >= sign * current for previous, current in itertools.pairwise(column)
        ):
            return name
    return None
