"""PyramidDrop: the deeper the layer, the fewer visual tokens, in stages.

Xing and others (https://arxiv.org/abs/2410.17247). At the end of each stage the attention that the
next layer would give, averaged over heads, from the prompt's last token to the visual tokens ranks
them; the best stay. Behind a stage the authors number all tokens anew.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Int

from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.vlm import Sequence
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Survivors, keep_best
from stepprune_jax.pruning.schedule import (
    check_layers,
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
        layer_list: layers before which tokens are dropped; None for the authors' 8, 16 and 24, or
            where these are too deep for the budget for 2, 10 and 20; in a model that has fewer
            layers for those at the same share of its depth.
        image_token_ratio_list: the share of an image's tokens that is left from each of these
            layers on, rounded down; the authors have .5, .25 and .125. None for the powers of one
            ratio that meets the budget. Given, it decides, and a budget is but a name.
        average: whether the budget is the mean over all layers, as the authors count, or the number
            of tokens that are left behind the last stage.
    """

    layer_list: tuple[int, ...] | None = None
    image_token_ratio_list: tuple[float, ...] | None = None
    average: bool = True

    name = "pyramiddrop"
    label = "PyramidDrop"
    positions: ClassVar[str] = "compact"
    schedules: ClassVar[tuple[str, ...]] = ("image_token_ratio_list",)

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Refuses layers that do not exist, lists that do not fit, and means out of reach."""
        super().check(config, num_tokens)
        depth, ratios = config.text.num_layers, self.image_token_ratio_list
        layers = self._layers(config)
        check_layers("pyramiddrop: layer_list", layers, 1, depth - 1)
        if ratios is None:
            if self.average and not self._meets(layers, config):
                raise ValueError(
                    f"pyramiddrop: a mean of {self.budget} over {depth} layers is out of reach "
                    f"with stages that end at {', '.join(map(str, layers))} of {num_tokens} tokens"
                )
        elif len(ratios) != len(layers) or not all(
            1 >= before >= ratio > 0 for before, ratio in itertools.pairwise((1, *ratios))
        ):
            raise ValueError(
                f"pyramiddrop: image_token_ratio_list is {list(ratios)}, expected "
                f"{len(layers)} shares in (0, 1], none larger than the one before"
            )

    def program(self) -> "PyramidDrop":
        """Drops the schedule: `drop` is given the counts."""
        return PyramidDrop()

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut before each layer of the list."""
        del num_tokens
        return tuple(LayerCut(layer, (Tap("attention", layer),)) for layer in self._layers(config))

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple[Survivors, ...]:
        """Returns what is left from each layer of the list on, at least one token."""
        if self.image_token_ratio_list is None:
            widths = stage_widths(self._layers(config), config.text.num_layers)
            budget = self.budget.exact_count(num_tokens)
            counts = geometric_counts(num_tokens, budget, widths, self.average)
        else:
            counts = (max(1, int(num_tokens * ratio)) for ratio in self.image_token_ratio_list)
        return tuple(map(Survivors, counts))

    def drop(
        self,
        params: Any,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the tokens that the last token would attend to most in the layer behind the cut."""
        del params, cut
        (attention,) = taps.values()
        return sequence, keep_best(attention[:, :, 0].mean(1), sequence.image, count)

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The list of layers."""
        if self.layer_list is not None:
            return self.layer_list
        layers, early = (choose_layers(x, config.text.num_layers) for x in (LAYERS, EARLY_LAYERS))
        if self.image_token_ratio_list is None and self.average:
            return layers if self._meets(layers, config) else early
        return layers

    def _meets(self, layers: tuple[int, ...], config: ModelConfig) -> bool:
        """Whether the mean over layers can be the budget with a token left in the last stage."""
        n = config.max_image_tokens
        widths = stage_widths(layers, config.text.num_layers)
        return n * mean_ratio(widths, self.budget.exact_count(n) / n) ** len(layers) >= 1
