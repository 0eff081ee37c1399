"""Budgets of tokens per image: a count, a fraction, or a mean that a learned stop meets.

A `Budget` is a pytree whose leaf is its number, so one compiled program serves all budgets of a
kind. The kind is static.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from stepprune_jax.user_input import UserError

EXACT = ("count", "rate")
# Expected value of each kind, for error messages.
_VALUES = {
    "all": "no number",
    "none": "no number",
    "unset": "no number",
    "count": "an integer from 1",
    "rate": "a share in (0, 1]",
    "mean": "a positive number",
    "adaptive": "no number",
}
# Forms that `Budget.parse` reads, for error messages.
_READABLE = "a count such as 64, a share such as 1/3 or 22.2%, mean:32, adaptive, or all"
# Largest denominator of a fraction that is a leaf: products in `Budget.counts` fit in int32.
_LARGEST_LEAF = 10_000


class _Share(NamedTuple):
    """A fraction whose integers may be traced, which `Fraction` does not allow."""

    numerator: Any
    denominator: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Budget:
    """Number of tokens to keep per image.

    Attributes:
        kind: "all" keeps all tokens, and "none" no token. "count" is the same number for every
            image. "rate" is a fraction of each image's tokens. "mean" is the mean number of a
            learned stop with a calibrated bias. "adaptive" leaves the number to the method, such as
            an uncalibrated learned stop; "own" is accepted as an older name. "unset" is a missing
            budget of a method that needs one; see `Pruner.default_budget`.
        value: the number or fraction; None for all other kinds.

    Raises:
        ValueError: an unknown kind, or a value that the kind does not allow.
    """

    kind: str = "all"
    value: int | float | Fraction | None = None

    def __post_init__(self):
        if self.kind == "own":
            object.__setattr__(self, "kind", "adaptive")
        value = self.value
        if self.kind not in _VALUES:
            raise UserError(f"budget of kind {self.kind!r}, expected one of {', '.join(_VALUES)}")
        if self.kind in ("all", "none", "adaptive", "unset"):
            is_valid = value is None
        elif not isinstance(value, int | float | Fraction) or isinstance(value, bool):
            is_valid = False
        elif self.kind == "count":
            is_valid = isinstance(value, int) and value >= 1
        else:
            is_valid = 0 < value <= 1 if self.kind == "rate" else 0 < value < 1 << 31
        if not is_valid:
            raise UserError(f"budget is {value!r}, expected {_VALUES[self.kind]}")

    @classmethod
    def parse(cls, text: "Budget | str | int | float") -> "Budget":
        """Reads a budget: "64", "1/3", "22.2%", "mean:32", "adaptive" or "all".

        Args:
            text: the text or a count. A budget is returned unchanged.

        Returns:
            The budget. Fractions are exact: a third of 576 tokens is 192.

        Raises:
            ValueError: the text has another form, or the number is out of range.
        """
        if isinstance(text, Budget):
            return text
        if not isinstance(text, str | numbers.Number | jax.Array | np.ndarray):
            kind = type(text).__name__
            raise UserError(f"budget is a {kind}, expected {_READABLE}")
        text = str(text)
        if text in ("all", "none", "adaptive", "own"):
            return cls(text)
        # Fraction("1e999999999") would not finish, so exponents are not read.
        has_no_exponent = "e" not in text.lower()
        try:
            if text.startswith("mean:"):
                return cls("mean", float(text.removeprefix("mean:")))
            if has_no_exponent and text.endswith("%"):
                return cls("rate", Fraction(text[:-1]) / 100)
            if has_no_exponent and "/" in text:
                return cls("rate", Fraction(text))
            return cls("count", int(text))
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"budget is {text!r}, expected {_READABLE}") from error

    @property
    def is_exact(self) -> bool:
        """Whether the number of kept tokens follows from the size of the image."""
        return self.kind in (*EXACT, "all", "none", "unset")

    @property
    def number(self) -> int | float | Fraction:
        """The value of a kind that has one."""
        assert self.value is not None
        return self.value

    @property
    def _share(self) -> Fraction:
        """The value of a "rate", on the host."""
        if isinstance(self.value, _Share):
            return Fraction(*map(int, self.value))
        return Fraction(self.number)

    def count(self, num_tokens: int) -> int | None:
        """Returns the number of kept tokens of `num_tokens`; None if the method decides."""
        return self.exact_count(num_tokens) if self.is_exact else None

    def exact_count(self, num_tokens: int) -> int:
        """Returns the number of kept tokens of `num_tokens`; requires `is_exact`."""
        if self.kind in ("all", "unset"):
            return num_tokens
        if self.kind == "none":
            return 0
        if self.kind == "count":
            return min(int(self.number), num_tokens)
        assert self.kind == "rate"
        # share * num_tokens, rounded half up: floor(share * num_tokens + 1/2) in integers.
        share = self._share
        numerator = 2 * num_tokens * share.numerator + share.denominator
        return max(1, numerator // (2 * share.denominator))

    def counts(self, sizes: Int[Array, "b"], num_tokens: int) -> Int[Array, "b"]:
        """Returns the number of kept tokens of each image, for a budget that may be traced.

        Args:
            sizes: [b] number of tokens of each image; 0 keeps 0.
            num_tokens: static bound on the sizes.

        Returns:
            [b] int32 counts, equal to `exact_count` of each size.
        """
        if self.kind == "count":
            return jnp.minimum(jnp.asarray(self.value, jnp.int32), sizes)
        if isinstance(self.value, _Share):
            # The same rounding as in `exact_count`, in traced integers.
            numerator, denominator = self.value
            rounded = (2 * sizes * numerator + denominator) // (2 * denominator)
            return jnp.minimum(jnp.maximum(1, rounded), sizes)
        # Other fractions are static, so a table on the host holds the counts of all sizes.
        counts = [self.exact_count(size) for size in range(1, num_tokens + 1)]
        return jnp.array([0, *counts], jnp.int32)[sizes]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the number as leaves; the kind, and a fraction of many digits, are static."""
        if isinstance(self.value, _Share):
            return tuple(self.value), (self.kind,)
        if self.kind == "rate":
            share = self._share
            if share.denominator > _LARGEST_LEAF:
                return (), (self.kind, share)
            return (share.numerator, share.denominator), (self.kind,)
        return () if self.value is None else (self.value,), (self.kind,)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Sequence[Any]) -> "Budget":
        """Creates a budget without checks, because leaves may be tracers or placeholders."""
        kind, value = static[0], None
        if len(static) == 2:
            value = static[1]
        elif kind == "rate":
            is_concrete = all(isinstance(leaf, int) for leaf in leaves)
            value = Fraction(*leaves) if is_concrete else _Share(*leaves)
        elif leaves:
            (value,) = leaves
        budget = object.__new__(cls)
        object.__setattr__(budget, "kind", kind)
        object.__setattr__(budget, "value", value)
        return budget

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        if self.kind == "rate":
            share = self._share
            return f"{share.numerator}/{share.denominator}"
        if self.kind == "mean":
            return f"mean:{float(self.number)!r}".removesuffix(".0")
        return str(self.value) if self.kind == "count" else self.kind
