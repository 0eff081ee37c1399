"""No pruning: keeps every visual token."""

from typing import ClassVar

from stepprune_jax.pruning.base import Pruner


class AllTokens(Pruner):
    """Keeps every token."""

    name = "all"
    label = "all tokens"
    budgets: ClassVar[tuple[str, ...]] = ("all",)
