"""The small LLaVA: shape, vocabulary and random weights; see `small` for the members."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from experiments.pretrain.settings import ShapeSettings
from experiments.pretrain.structure import init_tower, standardizing_projector
from experiments.pretrain.vocabulary import Template
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava, LlavaConfig, tower
from stepprune_jax.models.llava.config import ClipConfig
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.models.stack import Params

TEMPLATE = Template(
    special=("<unk>", "<s>", "</s>"),
    start="<s>",
    end="</s>",
    words="USER: ASSISTANT:",
    system=Llava.conversation([None]).partition(" USER:")[0],
    added=(IMAGE_MARK,),
)
TOWER = ("vision",)
CONNECTOR = ("projector",)


def make_backbone(shape: ShapeSettings, tokenizer: Any) -> Llava:
    """Returns a model of this shape and vocabulary."""
    vision = ClipConfig(
        hidden_size=shape.vision_width,
        intermediate_size=shape.vision_mlp,
        num_layers=shape.vision_layers,
        num_heads=shape.vision_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
    )
    config = LlavaConfig(
        vision=vision,
        text=shape.language(len(tokenizer)),
        feature_layer=shape.feature_layer,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_MARK),
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
    )
    return Llava(config)


def image_settings(shape: ShapeSettings) -> LlavaImageSettings:
    """Returns image settings that resize images to the size of the model."""
    return LlavaImageSettings(resize_to=shape.image_size, crop_to=shape.image_size)


def init_params(key: Array, backbone: Llava) -> Params:
    """Returns random weights whose tower attends to neighboring patches."""
    return vlm.init_params(key, backbone) | {"vision": init_tower(key, backbone.config.vision)}


def states(
    params: Params, backbone: Llava, pixels: UInt8[Array, "i 3 H W"]
) -> tuple[Float[Array, "i n d"], Float[Array, "i d"]]:
    """Returns the features of the patches that LLaVA reads, and the class token."""
    config = backbone.config
    values = backbone.normalise(pixels)
    hidden, _ = tower.encode(params["vision"], config.vision, values, config.feature_layer)
    return hidden[:, 1:], hidden[:, 0]


def connect(params: Params, features: Float[Array, "i n d"], real: Bool[Array, "i n"]) -> Params:
    """Folds the standardization of features into the projector's first layer."""
    features = features[jnp.asarray(real)][None]
    return params | {"projector": standardizing_projector(params["projector"], features)}
