"""Calibration of a policy: the mean number of tokens kept at each stop bias."""

import itertools
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.policy import calibrate_stop_bias
from stepprune_jax.policy.trajectory import count_at_bias

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


_EXPECTED = {
    "mean_count": "ascending numbers from 0 to num_tokens",
    "stop_bias": "descending numbers, one for each mean_count",
    "at_floor": "shares, one for each mean_count",
    "at_cap": "shares, one for each mean_count",
    "num_tokens": "a number",
    "questions": "an integer from 1",
}


def read_calibration(value: Any) -> Calibration:
    """Reads the result of `Calibration.as_json`.

    Raises:
        ValueError: it has another form; the message names the field.
    """
    if not isinstance(value, dict) or value.keys() != {*_EXPECTED}:
        raise ValueError(f"the calibration's fields are not {', '.join(_EXPECTED)}")
    wrong = _wrong_field(value)
    if wrong is not None:
        raise ValueError(f"the calibration's {wrong} is not {_EXPECTED[wrong]}")
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Calibration(**fields)


def _wrong_field(value: dict[str, Any]) -> str | None:
    """Returns the name of a field that is not as expected, or None."""

    def are_numbers(values: Any) -> bool:
        numbers = isinstance(values, list) and all(type(x) in (int, float) for x in values)
        return numbers and all(abs(x) < 1 << 128 for x in values)  # finite in float32

    means, biases, *shares = (value[name] for name in Calibration._fields[:4])
    tokens, questions = value["num_tokens"], value["questions"]
    for name in Calibration._fields[:4]:
        if not are_numbers(value[name]) or not len(value[name]) == len(means) > 0:
            return name
    if not are_numbers([tokens]):
        return "num_tokens"
    if type(questions) is not int or questions < 1:
        return "questions"
    ascends = all(a < b for a, b in itertools.pairwise(means))
    if not ascends or not 0 <= means[0] <= means[-1] <= tokens:
        return "mean_count"
    if not all(a > b for a, b in itertools.pairwise(biases)):
        return "stop_bias"
    names = zip(("at_floor", "at_cap"), shares, strict=True)
    return next((name for name, x in names if not all(0 <= y <= 1 for y in x)), None)
