"""Budgets of tokens per image: a count, a share, or a mean met by a learned stop.

A `Budget` is a pytree whose leaf is its number, so that a jitted function of a policy serves all
numbers of a kind. Its kind is static.
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
# The value of each kind.
_VALUES = {
    "all": "no number",
    "unset": "no number",
    "count": "an integer from 1",
    "rate": "a share in (0, 1]",
    "mean": "a positive number",
    "own": "no number",
}
# Texts that `Budget.parse` reads.
_READABLE = "a count such as 64, a share such as 1/3 or 22.2%, mean:32, own, or all"
# Largest denominator of a share that is a leaf. The products of `Budget.counts` fit in int32 then.
_LARGEST_LEAF = 10_000


class _Share(NamedTuple):
    """A share in a jitted function, where `Fraction` cannot hold its two integers."""

    numerator: Any
    denominator: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Budget:
    """Number of tokens to keep per image.

    Attributes:
        kind: "all"; "count", the same number for every image; "rate", a share of each image's
            tokens, for images of different sizes; "mean", a learned stop whose bias was calibrated
            to a mean number; "own", a number that the method decides image by image, such as an
            uncalibrated learned stop; "unset", a budget that was not given to a method that needs
            one, see `Pruner.default_budget`.
        value: the number or the share; None for "all", "own" and "unset".

    Raises:
        ValueError: an unknown kind, or a value that does not belong to it.
    """

    kind: str = "all"
    value: int | float | Fraction | None = None

    def __post_init__(self):
        value = self.value
        if self.kind not in _VALUES:
            raise UserError(f"budget of kind {self.kind!r}, expected one of {', '.join(_VALUES)}")
        if self.kind in ("all", "own", "unset"):
            good = value is None
        elif not isinstance(value, int | float | Fraction) or isinstance(value, bool):
            good = False
        elif self.kind == "count":
            good = isinstance(value, int) and value >= 1
        else:
            good = 0 < value <= 1 if self.kind == "rate" else 0 < value < 1 << 31
        if not good:
            raise UserError(f"budget is {value!r}, expected {_VALUES[self.kind]}")

    @classmethod
    def parse(cls, text: "Budget | str | int | float") -> "Budget":
        """Reads a budget: "64", "1/3", "22.2%", "mean:32", "own" or "all".

        Args:
            text: the text, a count, or a budget, which is returned.

        Returns:
            The budget. Shares are exact: a third of 576 tokens is 192.

        Raises:
            ValueError: another form, or a number out of range.
        """
        if isinstance(text, Budget):
            return text
        if not isinstance(text, str | numbers.Number | jax.Array | np.ndarray):
            kind = type(text).__name__
            raise UserError(f"budget is a {kind}, expected {_READABLE}")
        text = str(text)
        if text in ("all", "own"):
            return cls(text)
        decimal = "e" not in text.lower()  # 1e999999999 as a fraction takes forever
        try:
            if text.startswith("mean:"):
                return cls("mean", float(text.removeprefix("mean:")))
            if decimal and text.endswith("%"):
                return cls("rate", Fraction(text[:-1]) / 100)
            if decimal and "/" in text:
                return cls("rate", Fraction(text))
            return cls("count", int(text))
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"budget is {text!r}, expected {_READABLE}") from error

    @property
    def is_exact(self) -> bool:
        """Whether the size of an image determines the number of tokens that are kept."""
        return self.kind in (*EXACT, "all", "unset")

    @property
    def number(self) -> int | float | Fraction:
        """The value, for kinds that have one."""
        assert self.value is not None
        return self.value

    @property
    def _share(self) -> Fraction:
        """The value of a share, on the host."""
        if isinstance(self.value, _Share):
            return Fraction(*map(int, self.value))
        return Fraction(self.number)

    def count(self, num_tokens: int) -> int | None:
        """Returns the tokens kept of `num_tokens`; None if the method decides."""
        return self.exact_count(num_tokens) if self.is_exact else None

    def exact_count(self, num_tokens: int) -> int:
        """Returns the tokens kept of `num_tokens`, where `is_exact`."""
        if self.kind in ("all", "unset"):
            return num_tokens
        if self.kind == "count":
            return min(int(self.number), num_tokens)
        assert self.kind == "rate"
        share = self._share
        half_up = 2 * num_tokens * share.numerator + share.denominator
        return max(1, half_up // (2 * share.denominator))

    def counts(self, sizes: Int[Array, "b"], num_tokens: int) -> Int[Array, "b"]:
        """Returns the tokens kept of images, for a budget that may be traced.

        Args:
            sizes: tokens of each image; an image without tokens keeps none.
            num_tokens: static bound on the sizes.
        """
        if self.kind == "count":
            return jnp.minimum(jnp.asarray(self.value, jnp.int32), sizes)
        if isinstance(self.value, _Share):
            numerator, denominator = self.value
            half_up = 2 * sizes * numerator + denominator
            return jnp.minimum(jnp.maximum(1, half_up // (2 * denominator)), sizes)
        counts = [self.exact_count(size) for size in range(1, num_tokens + 1)]
        return jnp.array([0, *counts], jnp.int32)[sizes]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the number as leaves, and the kind; a share of many digits is static."""
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
        """Builds a budget without checks: its leaves may be tracers, or anything else."""
        kind, value = static[0], None
        if len(static) == 2:
            value = static[1]
        elif kind == "rate":
            numbers = all(isinstance(leaf, int) for leaf in leaves)
            value = Fraction(*leaves) if numbers else _Share(*leaves)
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
