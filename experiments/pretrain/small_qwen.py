"""The small Qwen2.5-VL: its shape, its vocabulary, and where it starts; see `small`.

Patches of this tower have no position of their own: rotary angles tell how far apart two of them
are. So heads that look at neighbours are biases of queries and keys here, and labels of patches
must not ask where in the image something is; the language model learns that, from its position ids.
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
# The merger reads four patches for a token, so it learns their labels with the rest of the tower.
TOWER = ("vision", "merger")
CONNECTOR = ("merger",)

_SHARPNESS = 10.0  # of a local head: the neighbour meant gets e^4.6 times the weight of the next
_CONTENT = 0.1  # of what patches show in the score of a local head
_TOKEN_STD = 0.5  # as wide as embeddings of words are when the language model starts


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
    """Returns the settings of an image processor; sizes are bounded by the configuration."""
    del shape
    return QwenImageSettings()


def init_params(key: Array, backbone: Qwen2_5_VL) -> Params:
    """Draws weights whose tower looks at neighbouring patches from the start.

    Each head of the blocks that attend within windows prefers one patch: the first eight their
    neighbours, the next eight those at distance 2, and so on in turn. Its keys' bias is the same
    everywhere, and its queries' is that one turned by the angle of the step to the patch.
    """
    params, vision = vlm.init_params(key, backbone), backbone.config.vision
    width, heads = vision.hidden_size, vision.num_heads
    c, frequency = width // heads, rotary_frequencies(vision)
    strength = math.sqrt(_SHARPNESS * math.sqrt(c))
    attention = params["vision"]["layers"]["attention"]
    kernel, bias = (np.array(attention["qkv"][name]) for name in ("kernel", "bias"))
    windows = [layer for layer in range(vision.num_layers) if layer not in vision.full_blocks]
    for number, layer in enumerate(windows):
        for head in range(heads):
            reach, direction = divmod(number * heads + head, len(AROUND))
            row, column = ((1 + reach % 2) * step for step in AROUND[direction])
            turn = np.concatenate([row * frequency, column * frequency])
            query, keys = (slice(first, first + c) for first in (head * c, width + head * c))
            kernel[layer, :, query] *= _CONTENT
            kernel[layer, :, keys] *= _CONTENT
            bias[layer, query] = strength * np.concatenate([np.cos(turn), np.sin(turn)])
            bias[layer, keys] = strength * np.repeat([1.0, 0.0], c // 2)
    attention["qkv"] = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    return params


def states(
    params: Params, backbone: Qwen2_5_VL, pixels: Patches
) -> tuple[Float[Array, "i n d"], None]:
    """Returns the merged tokens; there is no class token."""
    # Blocks one by one: a scan would keep, of every block, what attention to the whole image needs
    # for its gradient, even if the block attends within windows.
    return backbone.encode_image(unstack(params), pixels)[0], None


def connect(params: Params, features: Float[Array, "i n d"], real: Bool[Array, "i n"]) -> Params:
    """Folds a standardisation of the merged tokens into the merger's last layer."""
    merger, real_features = params["merger"], features[jnp.asarray(real)]
    scale = _TOKEN_STD / (jnp.std(real_features, 0) + 1e-6)
    down = {
        "kernel": merger["down"]["kernel"] * scale,
        "bias": (merger["down"]["bias"] - jnp.mean(real_features, 0)) * scale,
    }
    return params | {"merger": merger | {"down": down}}
