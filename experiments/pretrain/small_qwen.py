"""The small Qwen2.5-VL: shape, vocabulary and random weights; see `small` for the members.

The tower knows only relative positions of patches, from rotary angles. Heads that attend to
neighbors are therefore biases of queries and keys, and labels of patches must not depend on the
place in the image. The language model learns places from its position ids.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.pretrain.settings import ShapeSettings
from experiments.pretrain.structure import AROUND
from experiments.pretrain.vocabulary import Template
from stepprune_jax.models import vlm
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches, QwenImageSettings
from stepprune_jax.models.qwen2_5_vl.tower import rotary_frequencies
from stepprune_jax.models.stack import Params, unstack

TEMPLATE = Template(
    special=("<unk>", "<|endoftext|>", "<|im_end|>"),
    start=None,
    end="<|im_end|>",
    words="user assistant",
    system=Qwen2_5_VL.conversation([None]).partition("\n<|im_start|>user")[0],
    added=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
# The merger makes a token of four patches, so it learns labels of patches together with the tower.
TOWER = ("vision", "merger")
CONNECTOR = ("merger",)

_SHARPNESS = 10.0  # A local head weights its neighbor e^4.6 times as much as any other patch.
_CONTENT = 0.1  # Factor on the contents of patches in the score of a local head.
_TOKEN_STD = 0.5  # Standard deviation of the language model's initial word embeddings.


def make_backbone(shape: ShapeSettings, tokenizer: Any) -> Qwen2_5_VL:
    """Returns a model of this shape and vocabulary."""
    token = tokenizer.convert_tokens_to_ids
    vision = QwenVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=shape.vision_mlp,
        num_layers=shape.vision_layers,
        num_heads=shape.vision_heads,
        patch_size=shape.patch_size,
        window_size=shape.window_size,
        full_blocks=shape.full_blocks,
        out_size=shape.text_width,
    )
    config = QwenConfig(
        vision=vision,
        text=shape.language(len(tokenizer), rope_sections=shape.rope_sections, qkv_bias=True),
        image_token_id=token("<|image_pad|>"),
        eos_token_ids=(token("<|im_end|>"), token("<|endoftext|>")),
        pad_token_id=token("<|endoftext|>"),
        min_pixels=shape.least_size**2,
        max_pixels=shape.image_size**2,
    )
    return Qwen2_5_VL(config)


def image_settings(shape: ShapeSettings) -> QwenImageSettings:
    """Returns image settings. The configuration of the model limits the size of images."""
    del shape
    return QwenImageSettings()


def init_params(key: Array, backbone: Qwen2_5_VL) -> Params:
    """Returns random weights whose tower attends to neighboring patches.

    Each head of a block with windows prefers the patch at one offset: the first eight heads the
    eight neighbors, the next eight heads the patches at distance 2, and so on in turn. All keys
    have the same bias. The bias of a head's queries is this bias, rotated by the rotary angle of
    the offset.
    """
    params, vision = vlm.init_params(key, backbone), backbone.config.vision
    width, heads = vision.hidden_size, vision.num_heads
    c, frequency = width // heads, rotary_frequencies(vision)
    strength = math.sqrt(_SHARPNESS * math.sqrt(c))
    attention = params["vision"]["layers"]["attention"]
    kernel, bias = (np.array(attention["qkv"][name]) for name in ("kernel", "bias"))
    window_layers = [n for n in range(vision.num_layers) if n not in vision.full_blocks]
    for number, layer in enumerate(window_layers):
        for head in range(heads):
            reach, direction = divmod(number * heads + head, len(AROUND))
            row, column = ((1 + reach % 2) * step for step in AROUND[direction])
            angle = np.concatenate([row * frequency, column * frequency])
            query, keys = (slice(start, start + c) for start in (head * c, width + head * c))
            kernel[layer, :, query] *= _CONTENT
            kernel[layer, :, keys] *= _CONTENT
            bias[layer, query] = strength * np.concatenate([np.cos(angle), np.sin(angle)])
            bias[layer, keys] = strength * np.repeat([1.0, 0.0], c // 2)
    attention["qkv"] = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    return params


def states(
    params: Params, backbone: Qwen2_5_VL, pixels: Patches
) -> tuple[Float[Array, "i n d"], None]:
    """Returns the merged tokens, and None in place of a class token."""
    # The blocks are unrolled. A scan would store the residuals of full attention for every block,
    # including blocks with windows.
    return backbone.encode_image(unstack(params), pixels)[0], None


def connect(params: Params, features: Float[Array, "i n d"], real: Bool[Array, "i n"]) -> Params:
    """Folds a standardization of the merged tokens into the merger's last layer."""
    merger, real_features = params["merger"], features[jnp.asarray(real)]
    scale = _TOKEN_STD / (jnp.std(real_features, 0) + 1e-6)
    down = {
        "kernel": merger["down"]["kernel"] * scale,
        "bias": (merger["down"]["bias"] - jnp.mean(real_features, 0)) * scale,
    }
    return params | {"merger": merger | {"down": down}}
