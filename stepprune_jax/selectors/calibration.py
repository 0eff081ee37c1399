"""Calibration of a policy: the mean number of tokens kept at each stop bias."""

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

# Rows of the table, from the smallest count to T_max in equal ratios, before merging duplicates.
ROWS = 25
# Share of questions from which a learned stop is hardly more than an exact budget.
_ALMOST_ALL = 0.9
# Decimals of a bias. An exact one would be the margin of some question, whose count would then
# depend on the last bit of a sum.
_DECIMALS = 3


class StopCounts(NamedTuple):
    """What a learned stop keeps by itself of some questions' images; `str` says so in words.

    Attributes:
        mean: mean count.
        deviation: standard deviation of the counts.
        num_tokens: mean number of visual tokens of the images.
        at_floor: share of the questions whose count is the policy's minimum.
        at_cap: share of the questions whose count is T_max.
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
        """The bound that nearly all counts are at, with a remedy; empty without one."""
        if self.at_cap >= _ALMOST_ALL:
            return (
                f"the learned stop sits at T_max: {self.at_cap:.0%} of the counts are T_max, no "
                "more than an exact budget; train longer, raise `length_weight`, or give a budget"
            )
        if self.at_floor >= _ALMOST_ALL:
            return (
                f"the learned stop sits at the minimum: {self.at_floor:.0%} of the counts are the "
                "minimum, no more than an exact budget; lower `length_weight` if more tokens help, "
                "or give a budget"
            )
        return ""


def describe_counts(
    count: Int[np.ndarray, "q"],
    shortest: Int[np.ndarray, "q"],
    longest: Int[np.ndarray, "q"],
    num_tokens: Int[np.ndarray, "q"],
) -> StopCounts:
    """Summarizes the counts of a learned stop.

    Args:
        count: tokens kept of each question's image.
        shortest: count before the stop is available.
        longest: T_max of each image.
        num_tokens: tokens of each image.
    """
    # Where both bounds are equal, the count says nothing of the stop.
    free = shortest < longest
    return StopCounts(
        mean=float(np.mean(count)),
        deviation=float(np.std(count)),
        num_tokens=float(np.mean(num_tokens)),
        at_floor=float(np.mean(free & (count <= shortest))),
        at_cap=float(np.mean(free & (count >= longest))),
    )


def count_stops(
    margin: Float[np.ndarray, "q t"],
    num_tokens: Int[np.ndarray, "q"],
    min_tokens: int,
    stop_bias: float,
) -> StopCounts:
    """Summarizes the counts at one stop bias, from margins as `calibrate` takes them."""
    least = min(min_tokens, margin.shape[1])
    longest = np.isfinite(margin).sum(1)
    count = np.asarray(count_at_bias(jnp.asarray(margin), stop_bias, least))
    return describe_counts(count, np.minimum(least, longest), longest, num_tokens)


def log_stops(stops: StopCounts) -> None:
    """Logs what a learned stop keeps, and warns where it sits at a bound."""
    _LOG.info("%s", stops)
    if stops.finding:
        _LOG.warning("%s", stops.finding)


class Calibration(NamedTuple):
    """Mean counts of a policy at some stop biases, measured on questions of a validation split.

    The four tables have one row per stop bias, by ascending mean count.

    Attributes:
        mean_count: mean K over the questions.
        stop_bias: number added to the policy's stop logits.
        at_floor: share of the questions whose K is the policy's minimum.
        at_cap: share of the questions whose K is T_max.
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
        """Returns the stop bias for a mean count, interpolating linearly between rows.

        Args:
            mean: tokens to keep on average.

        Returns:
            The bias.

        Raises:
            ValueError: fewer or more tokens than the policy keeps at any bias.

        Warns:
            UserWarning: nearly all counts would be the minimum, or nearly all T_max.
        """
        bias, floor, cap = self.row_at(mean)
        share, bound = max((floor, "least"), (cap, "largest"))
        if share >= _ALMOST_ALL:
            warnings.warn(
                f"at a mean of {mean:g} tokens the count of {share:.0%} of the calibration's "
                f"questions is the {bound} that the policy may keep, little more than an "
                "exact budget",
                stacklevel=2,
            )
        return bias

    def row_at(self, mean: float | int) -> tuple[float, float, float]:
        """Returns stop bias and shares at floor and cap for a mean; raises as `bias_at`."""
        low, high = self.mean_count[0], self.mean_count[-1]
        if not low <= mean <= high:
            raise UserError(
                f"the mean budget is {mean}, expected {low:g} to {high:g}, what the policy keeps "
                f"of {self.num_tokens:g} visual tokens on average"
            )
        bias, floor, cap = (
            float(np.interp(mean, self.mean_count, column))
            for column in (self.stop_bias, self.at_floor, self.at_cap)
        )
        return bias, floor, cap

    def bias_in_program(self, mean: ArrayLike) -> ArrayLike:
        """Returns the stop bias for a mean count that may be traced; a number is checked.

        Raises:
            ValueError: as `bias_at`, for a number.
        """
        if isinstance(mean, float | int):
            return self.row_at(mean)[0]
        return jnp.interp(mean, jnp.array(self.mean_count), jnp.array(self.stop_bias))

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values by name, as read by `read_calibration`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._asdict().items()}


def calibrate(
    margin: Float[np.ndarray, "q t"], num_tokens: Int[np.ndarray, "q"], min_tokens: int
) -> Calibration:
    """Tabulates mean counts and stop biases.

    Args:
        margin: stop margins before each step, of rollouts that do not stop; infinite from each
            question's T_max on.
        num_tokens: tokens of each question's image.
        min_tokens: tokens chosen before the stop is available.

    Returns:
        The table.
    """
    rows, least = jnp.asarray(margin), min(min_tokens, margin.shape[1])
    longest = np.isfinite(margin).sum(1)
    floor = np.minimum(least, longest)
    bound = float(np.max(np.abs(margin), where=np.isfinite(margin), initial=0)) + 1
    exact = [
        float(calibrate_stop_bias(rows, target, min_tokens=least, max_bias=bound))
        for target in np.geomspace(max(1, floor.mean()), max(1, longest.mean()), ROWS)
    ]
    table: dict[float, tuple[float, float, float]] = {}
    for bias in (round(bias, _DECIMALS) for bias in (*exact, bound, -bound)):
        count = np.asarray(count_at_bias(rows, bias, least))
        shares = float((count == floor).mean()), float((count == longest).mean())
        table.setdefault(float(count.mean()), (bias, *shares))
    means = tuple(sorted(table))
    biases, floors, caps = zip(*(table[mean] for mean in means), strict=True)
    return Calibration(means, biases, floors, caps, float(np.mean(num_tokens)), len(margin))


def read_calibration(value: Any) -> Calibration:
    """Reads the result of `Calibration.as_json`.

    Raises:
        ValueError: it has another form; the message names the field.
    """
    wrong = "fields"
    if isinstance(value, dict) and value.keys() == {*Calibration._fields}:
        wrong = _wrong_field(value)
    if wrong is not None:
        raise UserError(
            f"the calibration's {wrong} is damaged, expected what stepprune-calibrate writes"
        )
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Calibration(**fields)


def _wrong_field(value: dict[str, Any]) -> str | None:
    """Returns the name of a field that is not as in any calibration, or None."""
    means, tokens = value["mean_count"], value["num_tokens"]
    if not is_number(tokens):
        return "num_tokens"
    if not is_count(value["questions"]):
        return "questions"
    # The range of each table, and whether it rises (1) or falls (-1).
    tables = {
        "mean_count": (0, tokens, 1),
        "stop_bias": (-math.inf, math.inf, -1),
        "at_floor": (0, 1, 0),
        "at_cap": (0, 1, 0),
    }
    for name, (low, high, sign) in tables.items():
        column = value[name]
        good = isinstance(column, list) and len(column) == len(means) > 0
        good = good and all(is_number(x) and low <= x <= high for x in column)
        if not good or (sign and any(sign * a >= sign * b for a, b in itertools.pairwise(column))):
            return name
    return None
