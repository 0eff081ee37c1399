"""FastV: visual tokens that the prompt's last token ignores are dropped after a few layers.

Chen et al. (https://arxiv.org/abs/2403.06764). Visual tokens are ranked by the attention of layer
K - 1, averaged over heads, from the prompt's last token. The best remain from layer K on, at their
position ids. The caches of the first K layers keep all tokens.
"""

import dataclasses
from fractions import Fraction

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Schedule, Survivors
from stepprune_jax.pruning.budget import Budget


@dataclasses.dataclass(frozen=True)
class FastV(LayerPruner):
    """Drops visual tokens before a layer of the language model.

    Attributes:
        layer: K, layers that see all tokens.
        average: whether the budget is the mean over all layers, as in some tables, instead of the
            number that remains from layer K on, which is then chosen to give that mean, rounded
            half up.
    """

    layer: int = 2
    average: bool = False

    name = "fastv"
    label = "FastV"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer that does not exist, and averages that the first layers exceed."""
        super().check(config, num_tokens)
        depth = config.text.num_layers
        self.expect("layer", 1 <= self.layer < depth, f"1 to {depth - 1}")
        self.expect(
            "budget",
            not self.average or self._share(config, num_tokens) > 0,
            f"a larger mean over {depth} layers, as the first {self.layer} see all {num_tokens} "
            "tokens",
        )

    def program(self) -> "FastV":
        """Returns the pruner without its budget and `average`, as `drop` is given the counts."""
        return dataclasses.replace(self, budget=Budget(), average=False)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut before layer K."""
        return (LayerCut(self.layer, (Tap("attention", self.layer - 1),)),)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the tokens from layer K on."""
        if not self.average:
            return super().schedule(config, num_tokens)
        share = self._share(config, num_tokens)  # the mean of a small image may be out of reach
        left = Budget("rate", share).exact_count(num_tokens) if share > 0 else 1
        return Schedule(num_tokens, num_tokens, (Survivors(left),))

    def _share(self, config: ModelConfig, num_tokens: int) -> Fraction:
        """Returns the share from layer K on with which the mean is the budget."""
        depth = config.text.num_layers
        share = Fraction(self.budget.exact_count(num_tokens), num_tokens)
        return (depth * share - self.layer) / (depth - self.layer)
