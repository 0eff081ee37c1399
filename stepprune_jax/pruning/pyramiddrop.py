"""PyramidDrop: drops visual tokens in stages, so that deeper layers process fewer tokens.

Xing et al. (https://arxiv.org/abs/2410.17247). At the end of each stage, visual tokens are ranked
by the attention of the prompt's last token in the next layer, averaged over heads, and the best
tokens remain. The authors renumber all position ids after each stage.
"""

import dataclasses
import itertools
from typing import ClassVar

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Schedule, Survivors
from stepprune_jax.pruning.schedule import (
    are_layers,
    choose_layers,
    geometric_counts,
    mean_ratio,
    stage_widths,
)

LAYERS = (8, 16, 24)
EARLY_LAYERS = (2, 10, 20)


@dataclasses.dataclass(frozen=True)
class PyramidDrop(LayerPruner):
    """Drops visual tokens before several layers of the language model.

    Attributes:
        layer_list: layers before which tokens are dropped. None for the authors' 8, 16 and 24, or
            for 2, 10 and 20 if the budget cannot be met with the former; the same relative depths
            in a model with fewer layers.
        image_token_ratio_list: fraction of an image's tokens from each of these layers on, rounded
            down; the authors use .5, .25 and .125. None for the powers of a single ratio that meets
            the budget. If given, the list replaces the budget, which is then only a label.
        average: whether the budget is the mean number of tokens over all layers, like the authors'
            budgets, or the number of tokens after the last stage.
    """

    layer_list: tuple[int, ...] | None = None
    image_token_ratio_list: tuple[float, ...] | None = None
    average: bool = True

    name = "pyramiddrop"
    label = "PyramidDrop"
    positions: ClassVar[str] = "compact"
    schedules: ClassVar[tuple[str, ...]] = ("image_token_ratio_list",)

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects layers that do not exist, ill-formed lists, and unreachable means."""
        super().check(config, num_tokens)
        depth, ratios = config.text.num_layers, self.image_token_ratio_list
        layers = self._layers(config)
        is_valid = are_layers(layers, 1, depth - 1)
        self.expect("layer_list", is_valid, f"ascending layers from 1 to {depth - 1}")
        if ratios is None:
            self.expect(
                "budget",
                not self.average or self._meets(layers, config),
                f"a larger mean over {depth} layers, as stages end at layers {layers}",
            )
            return
        never_grows = all(
            1 >= ratio >= next_ratio > 0 for ratio, next_ratio in itertools.pairwise((1, *ratios))
        )
        self.expect(
            "image_token_ratio_list",
            len(ratios) == len(layers) and never_grows,
            f"{len(layers)} shares in (0, 1], none larger than the one before",
        )

    def program(self) -> "PyramidDrop":
        """Returns a copy without the schedule; `drop` receives the counts as an argument."""
        return PyramidDrop()

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut before each layer of the list."""
        return tuple(LayerCut(layer, (Tap("attention", layer),)) for layer in self._layers(config))

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the counts from each listed layer on; small fractions may leave no token."""
        if self.image_token_ratio_list is None:
            widths = stage_widths(self._layers(config), config.text.num_layers)
            budget = self.budget.exact_count(num_tokens)
            counts = geometric_counts(num_tokens, budget, widths, self.average)
        else:
            counts = (int(num_tokens * ratio) for ratio in self.image_token_ratio_list)
        return Schedule(num_tokens, num_tokens, tuple(map(Survivors, counts)))

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers before which tokens are dropped."""
        if self.layer_list is not None:
            return self.layer_list
        layers, early = (choose_layers(x, config.text.num_layers) for x in (LAYERS, EARLY_LAYERS))
        if self.image_token_ratio_list is None and self.average:
            return layers if self._meets(layers, config) else early
        return layers

    def _meets(self, layers: tuple[int, ...], config: ModelConfig) -> bool:
        """Returns whether stages that end at `layers` can meet the budget as the mean over layers.

        At least one token of the largest image must remain after the last stage.
        """
        num_tokens = config.max_image_tokens
        widths = stage_widths(layers, config.text.num_layers)
        ratio = mean_ratio(widths, self.budget.exact_count(num_tokens) / num_tokens)
        return num_tokens * ratio ** len(layers) >= 1
