"""What a family adds to pretraining: the shape of its small model, where it starts, its vocabulary.

The stages ask no family; all they need besides `models.backbone` is here. A family is a module:

* `TEMPLATE`: tokens of its prompts.
* `TOWER`, `CONNECTOR`: parts of the weights that learn from labels of patches, and those before
  the language model that learn together with it.
* `make_backbone` and `image_settings` of a shape; `init_params`, whose tower looks at neighbouring
  patches from the start.
* `states`: what heads read labels from: visual tokens, and the class token, if any.
* `connect`: brings what the language model is given to a scale that it learns from.
"""

from typing import Any

from jaxtyping import Array, Float

from experiments.pretrain import small_llava, small_qwen
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig

SMALL: dict[str, Any] = {
    "llava": small_llava,
    "qwen2_5_vl": small_qwen,
}


def small_of(backbone: Backbone) -> Any:
    """Returns the small model of a backbone's family."""
    return SMALL[backbone.name]


def saliency_tap(config: ModelConfig) -> Tap:
    """Returns the tap that tells how much patches are looked at."""
    block = config.class_token_block
    return Tap("received", config.received_block) if block is None else Tap("attention", block)


def saliency(tap: Float[Array, "i *h t"]) -> Float[Array, "i n"]:
    """Returns how much each visual token is looked at, from `saliency_tap`.

    A class token's attention is averaged over heads, and that to itself left out.
    """
    return tap if tap.ndim == 2 else tap[..., 1:].mean(1)
