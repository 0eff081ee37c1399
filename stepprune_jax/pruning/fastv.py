"""FastV: drops visual tokens with little attention of the prompt's last token, after a few layers.

Chen et al. (https://arxiv.org/abs/2403.06764). Visual tokens are ranked by the attention of the
prompt's last token in layer K - 1, averaged over heads. The best tokens remain from layer K on and
keep their position ids. The caches of the first K layers keep all tokens.
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
        layer: K, the number of layers that process all tokens.
        average: whether the budget is the mean number of tokens over all layers, as in some tables,
            or the number of tokens from layer K on. A mean is converted to the number from layer K
            on, rounded half up.
    """

    layer: int = 2
    average: bool = False

    name = "fastv"
    label = "FastV"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects a layer that does not exist, and means that the first K layers exceed."""
        super().check(config, num_tokens)
        depth = config.text.num_layers
        self.expect("layer", 1 <= self.layer < depth, f"1 to {depth - 1}")
        self.expect(
            "budget",
            not self.average or self._remaining_fraction(config, num_tokens) > 0,
            f"a larger mean over {depth} layers, as the first {self.layer} see all {num_tokens} "
            "tokens",
        )

    def program(self) -> "FastV":
        """Returns a copy without budget and `average`; `drop` receives the counts."""
        return dataclasses.replace(self, budget=Budget(), average=False)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut before layer K."""
        return (LayerCut(self.layer, (Tap("attention", self.layer - 1),)),)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the counts: the number of tokens from layer K on."""
        if not self.average:
            return super().schedule(config, num_tokens)
        fraction = self._remaining_fraction(config, num_tokens)
        # The mean may be unreachable for small images, which then keep one token.
        num_remaining = Budget("rate", fraction).exact_count(num_tokens) if fraction > 0 else 1
        return Schedule(num_tokens, num_tokens, (Survivors(num_remaining),))

    def _remaining_fraction(self, config: ModelConfig, num_tokens: int) -> Fraction:
        """Returns the fraction of tokens from layer K on that makes the budget the mean."""
        depth = config.text.num_layers
        mean = Fraction(self.budget.exact_count(num_tokens), num_tokens)
        return (depth * mean - self.layer) / (depth - self.layer)
