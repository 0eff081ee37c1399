"""Calibration of a policy: the mean number of tokens kept at each stop bias."""

import itertools
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.policy import calibrate_stop_bias, count_at_bias
from stepprune_jax.policy.checks import is_integer, is_number

# Rows of the table, from the smallest count to T_max in equal ratios, before merging duplicates.
ROWS = 25
# Share of questions above which a learned stop is hardly more than an exact budget.
_ALMOST_ALL = 0.9
# Decimals of a bias. An exact one would be the margin of some question, whose count would then
# depend on the last bit of a sum.
_DECIMALS = 3


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
        low, high = self.mean_count[0], self.mean_count[-1]
        if not low <= mean <= high:
            raise ValueError(
                f"the mean budget is {mean}, expected {low:g} to {high:g}, what the policy keeps "
                f"of {self.num_tokens:g} visual tokens on average"
            )
        bias, floor, cap = (
            float(np.interp(mean, self.mean_count, column))
            for column in (self.stop_bias, self.at_floor, self.at_cap)
        )
        share, bound = max((floor, "least"), (cap, "largest"))
        if share >= _ALMOST_ALL:
            warnings.warn(
                f"at a mean of {mean:g} tokens the count of {share:.0%} of the calibration's "
                f"questions is the {bound} that the policy may keep, little more than an "
                "exact budget",
                stacklevel=2,
            )
        return bias

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
    if not isinstance(value, dict) or value.keys() != {*Calibration._fields}:
        raise ValueError(f"the calibration's fields are not {', '.join(Calibration._fields)}")
    for name, entry in value.items():
        listed = entry if isinstance(entry, list) else [entry]
        good = all(map(is_number, listed))
        wanted = len(value["mean_count"]) if isinstance(value["mean_count"], list) else 0
        single = name in ("num_tokens", "questions")
        if not good or single == isinstance(entry, list) or not (single or len(entry) == wanted):
            raise ValueError(f"the calibration's {name} is not a list of finite numbers")
    means, tokens, questions = (value[x] for x in ("mean_count", "num_tokens", "questions"))
    if not means or any(b <= a for a, b in itertools.pairwise(means)):
        raise ValueError("the calibration's mean_count does not ascend")
    if not 0 <= means[0] <= means[-1] <= tokens:
        raise ValueError(f"the calibration's mean_count is not from 0 to {tokens}, its num_tokens")
    if any(b >= a for a, b in itertools.pairwise(value["stop_bias"])):
        raise ValueError("the calibration's stop_bias does not descend")
    for name in ("at_floor", "at_cap"):
        if not all(0 <= share <= 1 for share in value[name]):
            raise ValueError(f"the calibration's {name} has shares that are not from 0 to 1")
    if not is_integer(questions) or questions < 1:
        raise ValueError(f"the calibration's questions is {questions}, expected an integer from 1")
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Calibration(**fields)
