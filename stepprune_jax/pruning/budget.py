"""Budgets of tokens per image: a count, a share, or a mean met by a learned stop."""

import dataclasses
from fractions import Fraction

EXACT = ("count", "rate")
KINDS = ("all", *EXACT, "mean", "own")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Number of tokens to keep per image.

    Attributes:
        kind: "all"; "count", the same number for every image; "rate", a share of each image's
            tokens, for images of different sizes; "mean", a learned stop whose bias was calibrated
            to a mean number; "own", a number that the method decides image by image, such as an
            uncalibrated learned stop.
        value: the number or the share; None for "all" and "own".
    """

    kind: str = "all"
    value: int | float | Fraction | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"budget of kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        value = self.value
        good = {
            "all": value is None,
            "own": value is None,
            "count": isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            "rate": isinstance(value, int | float | Fraction) and 0 < value <= 1,
            "mean": isinstance(value, int | float | Fraction) and 0 < value < 1 << 31,
        }[self.kind]
        if not good:
            expected = {
                "count": "an integer from 1",
                "rate": "a share in (0, 1]",
                "mean": "a positive number",
            }.get(self.kind, "no number")
            raise ValueError(f"budget is {value!r}, expected {expected}")

    @classmethod
    def parse(cls, text: str | int | float | None) -> "Budget":
        """Reads a budget: "64", "1/3", "22.2%", "mean:32", "own" or "all".

        Args:
            text: the text, or a count; None is "all".

        Returns:
            The budget. Shares are exact: a third of 576 tokens is 192.

        Raises:
            ValueError: another form, or a number out of range.
        """
        text = "all" if text is None else str(text)
        if text in ("all", "own"):
            return cls(text)
        try:
            if text.startswith("mean:"):
                return cls("mean", float(text.removeprefix("mean:")))
            if "e" in text.lower():  # 1e999999999 as a fraction takes forever
                raise ValueError(text)
            if text.endswith("%"):
                return cls("rate", Fraction(text[:-1]) / 100)
            if "/" in text:
                return cls("rate", Fraction(text))
            return cls("count", int(text))
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"budget is {text!r}, expected a count such as 64, a share such as 1/3 or 22.2%, "
                "mean:32, own, or all"
            ) from error

    @property
    def is_exact(self) -> bool:
        """Whether the number kept of an image follows from its size alone."""
        return self.kind in (*EXACT, "all")

    @property
    def number(self) -> int | float | Fraction:
        """The value, for kinds that have one."""
        if self.value is None:
            raise ValueError(f"a budget of kind {self.kind!r} has no number")
        return self.value

    def count(self, num_tokens: int) -> int | None:
        """Returns the tokens kept of `num_tokens`; None if the method decides."""
        if self.kind == "all":
            return num_tokens
        if self.kind == "count":
            return min(int(self.number), num_tokens)
        if self.kind == "rate":
            share = Fraction(self.number)
            half_up = 2 * num_tokens * share.numerator + share.denominator
            return max(1, half_up // (2 * share.denominator))
        return None

    def exact_count(self, num_tokens: int) -> int:
        """Returns the tokens kept of `num_tokens`, where `is_exact`."""
        count = self.count(num_tokens)
        if count is None:
            raise ValueError(f"budget is {self}, expected one that gives a number of tokens")
        return count

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        if self.kind == "rate":
            share = Fraction(self.number)
            return f"{share.numerator}/{share.denominator}"
        if self.kind == "mean":
            return f"mean:{float(self.number):g}"
        return str(self.value) if self.kind == "count" else self.kind
