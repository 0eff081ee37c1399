"""FastV: tokens that the prompt's last token does not attend to leave the model after a few layers.

Chen and others (https://arxiv.org/abs/2403.06764). The attention of layer K - 1, averaged over
heads, from the prompt's last token to the visual tokens ranks them; from layer K on the best stay,
at the position ids they had. The caches of the first K layers keep all tokens.
"""

import dataclasses
from fractions import Fraction
from typing import Any

from jaxtyping import Array, Bool, Int

from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.vlm import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Survivors, keep_best
from stepprune_jax.pruning.budget import Budget


@dataclasses.dataclass(frozen=True)
class FastV(LayerPruner):
    """Drops visual tokens before a layer of the language model.

    Attributes:
        layer: K, layers that see all tokens.
        average: whether the budget is the mean over all layers, as some tables count, in place of
            the tokens that stay from layer K on. Of these there are then as many as give the mean,
            rounded half up.
    """

    layer: int = 2
    average: bool = False

    name = "fastv"
    label = "FastV"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Refuses a layer that does not exist, and averages below what the first layers take."""
        super().check(config, num_tokens)
        depth = config.text.num_layers
        if not 1 <= self.layer < depth:
            raise ValueError(f"fastv: layer is {self.layer}, expected 1 to {depth - 1}")
        if self.average and self._budget(config, num_tokens) is None:
            raise ValueError(
                f"fastv: an average of {self.budget} over {depth} layers is out of reach, as the "
                f"first {self.layer} see all {num_tokens} tokens"
            )

    def program(self) -> "FastV":
        """Drops how the number is counted as well."""
        return dataclasses.replace(self, budget=Budget(), average=False)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut before layer K."""
        del config, num_tokens
        return (LayerCut(self.layer, (Tap("attention", self.layer - 1),)),)

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple[Survivors, ...]:
        """Returns what stays from layer K on."""
        budget = self._budget(config, num_tokens) if self.average else self.budget
        assert budget is not None  # `check` has refused it
        return (Survivors(budget.exact_count(num_tokens)),)

    def _budget(self, config: ModelConfig, num_tokens: int) -> Budget | None:
        """What has to stay from layer K on for the budget to be the mean; None if nothing may."""
        depth, share = (
            config.text.num_layers,
            Fraction(self.budget.exact_count(num_tokens), num_tokens),
        )
        share = (depth * share - self.layer) / (depth - self.layer)
        return Budget("rate", share) if share > 0 else None

    def drop(
        self,
        params: Any,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the tokens that the last token attends to most."""
        del params, cut
        (attention,) = taps.values()
        return sequence, keep_best(attention[:, :, 0].mean(1), sequence.image, count)
