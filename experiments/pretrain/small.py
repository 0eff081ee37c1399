"""What a family adds to pretraining: the shape of its small model, where it starts, its vocabulary.

The stages ask no family; all that they need besides `models.family` is here.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float

from experiments.pretrain import small_llava, small_qwen
from experiments.pretrain.settings import ShapeSettings
from experiments.pretrain.vocabulary import Template
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Params


@runtime_checkable
class Small(Protocol):
    """A small model of a family.

    Attributes:
        TEMPLATE: tokens of the family's prompts.
        TOWER: parts of the weights that learn from labels of patches.
        CONNECTOR: the part before the language model that learns together with it.
    """

    TEMPLATE: Template
    TOWER: tuple[str, ...]
    CONNECTOR: str

    def model_config(self, shape: ShapeSettings, tokenizer: Any) -> ModelConfig:
        """Returns the configuration of a model of this shape and vocabulary."""
        ...

    def image_settings(self, shape: ShapeSettings) -> Any:
        """Returns the settings of an image processor that leaves images of the shape's size."""
        ...

    def init_params(self, key: Array, config: ModelConfig) -> Params:
        """Draws weights whose tower looks at neighbouring patches from the start."""
        ...

    def states(
        self, params: Params, config: ModelConfig, pixels: Any
    ) -> tuple[Float[Array, "i n d"], Float[Array, "i d"] | None]:
        """Returns what heads read labels from: visual tokens, and the class token, if any."""
        ...

    def connect(
        self, params: Params, features: Float[Array, "i n d"], real: Bool[Array, "i n"]
    ) -> Params:
        """Brings what the language model is given to a scale that it learns from."""
        ...


SMALL: dict[str, Any] = {"llava": small_llava, "qwen2_5_vl": small_qwen}


def small_of(config: ModelConfig) -> Any:
    """Returns the small model of a configuration's family."""
    return SMALL[config.family.name]


def saliency_tap(config: ModelConfig) -> Tap:
    """Returns the tap that tells how much patches are looked at."""
    block = config.class_token_block
    return Tap("received", config.received_block) if block is None else Tap("attention", block)


def saliency(tap: Float[Array, "i *h t"]) -> Float[Array, "i n"]:
    """Returns how much each visual token is looked at, from `saliency_tap`.

    A class token's attention is averaged over heads, and that to itself left out.
    """
    return tap if tap.ndim == 2 else tap[..., 1:].mean(1)
