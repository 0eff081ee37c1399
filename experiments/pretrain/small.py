"""The small models that pretraining can build, one module for each model family.

Pretraining uses `models.backbone` and these members of a module:

* `TEMPLATE`: tokens of the prompts.
* `TOWER`: names of the weights that learn from labels of patches.
* `CONNECTOR`: names of the weights between the tower and the language model.
* `make_backbone` and `image_settings`: build the model and its image processor from a shape.
* `init_params`: returns random weights whose tower attends to neighboring patches.
* `states`: returns the features that the heads of labels read.
* `connect`: scales the features of the tower to the scale that the language model needs.
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
    """Returns the module of a backbone's family."""
    return SMALL[backbone.name]


def saliency_tap(config: ModelConfig) -> Tap:
    """Returns the tap of the attention that the patches receive."""
    block = config.class_token_block
    return Tap("received", config.received_block) if block is None else Tap("attention", block)


def saliency(tap: Float[Array, "i *h t"]) -> Float[Array, "i n"]:
    """Returns the attention that each visual token receives.

    Args:
        tap: value of `saliency_tap`. The attention of a class token is averaged over heads, and its
            attention to itself is dropped.
    """
    return tap if tap.ndim == 2 else tap[..., 1:].mean(1)
