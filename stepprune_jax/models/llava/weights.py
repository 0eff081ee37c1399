"""LLaVA's weights: the name of each in the files, and its sharding.

Files come in several dialects (two generations of Hugging Face LLaVA, the original LLaVA-v1.5, a
CLIP folder). Each name is first translated to a canonical form, the names of the published Hugging
Face LLaVA-1.5 files, by its prefix alone; the rules are written in that form once.
"""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.weights import WeightRule, language_rules, linear

VISION = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_LANGUAGE = "language_model.model."
HEAD = "language_model.lm_head"

# First match wins, so a longer prefix comes before a shorter one that it starts with.
PREFIXES = (
    ("model.vision_tower.vision_tower.vision_model.", VISION),  # original LLaVA-v1.5
    ("model.vision_tower.vision_model.", VISION),
    ("model.vision_tower.", VISION),
    ("vision_tower.vision_model.", VISION),
    ("vision_tower.", VISION),
    ("model.mm_projector.0.", _PROJECTOR + "linear_1."),  # original LLaVA-v1.5
    ("model.mm_projector.2.", _PROJECTOR + "linear_2."),
    ("model.multi_modal_projector.", _PROJECTOR),
    ("multi_modal_projector.", _PROJECTOR),
    ("language_model.lm_head.", HEAD + "."),
    ("lm_head.", HEAD + "."),
    ("language_model.model.", _LANGUAGE),
    ("model.language_model.", _LANGUAGE),
    ("model.", _LANGUAGE),  # original LLaVA-v1.5 is a plain Llama file
)

# Buffers that older versions stored with the weights; they are computed here.
HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".embeddings.position_ids")
# The half of a CLIP checkpoint that is not the image tower.
CLIP_EXTRAS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")


# Sharding of weights, see `parallel.sharding`. Projections that open heads or MLP
# channels are cut by column, those that close them by row, so that a block needs two sums only.
SHARDING_RULES = (
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/(attention/(query|key|value)|mlp/up)/bias", P(None, "tensor")),
    # Joined matrices, by `weights.join`; not where heads are split.
    (r"layers/(attention/query_key_value|mlp/gate_up)/kernel", P(None, "fsdp", None)),
    (r"layers/(attention/query_key_value|mlp/gate_up)/bias", P()),
    (r"layers/(attention/out|mlp/down)/kernel", P(None, "tensor", "fsdp")),
    (r"layers/(attention/out|mlp/down)/bias", P()),
    (r"layers/norm[12]/(scale|bias)", P()),
    (r"projector/up/kernel", P("fsdp", "tensor")),
    (r"projector/up/bias", P("tensor")),
    (r"projector/down/kernel", P("tensor", "fsdp")),
    (r"projector/down/bias", P()),
    (r"language/embed/embedding", P("tensor", "fsdp")),
    (r"language/head/kernel", P("fsdp", "tensor")),
    (r"language/norm/scale", P()),
    # Small, and with sizes (577 positions, 588 values of a patch) that few meshes divide.
    (r"vision/(class_embedding|position_embedding|patch_embedding/kernel)", P()),
    (r"vision/(pre|post)_norm/(scale|bias)", P()),
)


def _layer_norm(path: str, name: str) -> tuple[WeightRule, ...]:
    return WeightRule(f"{path}/scale", f"{name}.weight"), WeightRule(f"{path}/bias", f"{name}.bias")


def rules(patch_size: int) -> tuple[WeightRule, ...]:
    """Returns all rules of a LLaVA with an untied output head."""
    tower, block = VISION, VISION + "encoder.layers.{}."
    return (
        WeightRule("vision/class_embedding", tower + "embeddings.class_embedding"),
        WeightRule(
            "vision/patch_embedding/kernel",
            tower + "embeddings.patch_embedding.weight",
            "patches",
            (patch_size, patch_size),
        ),
        WeightRule("vision/position_embedding", tower + "embeddings.position_embedding.weight"),
        *_layer_norm("vision/pre_norm", tower + "pre_layrnorm"),
        *_layer_norm("vision/layers/norm1", block + "layer_norm1"),
        *linear("vision/layers/attention/query", block + "self_attn.q_proj", True),
        *linear("vision/layers/attention/key", block + "self_attn.k_proj", True),
        *linear("vision/layers/attention/value", block + "self_attn.v_proj", True),
        *linear("vision/layers/attention/out", block + "self_attn.out_proj", True),
        *_layer_norm("vision/layers/norm2", block + "layer_norm2"),
        *linear("vision/layers/mlp/up", block + "mlp.fc1", True),
        *linear("vision/layers/mlp/down", block + "mlp.fc2", True),
        *_layer_norm("vision/post_norm", tower + "post_layernorm"),
        *linear("projector/up", _PROJECTOR + "linear_1", True),
        *linear("projector/down", _PROJECTOR + "linear_2", True),
        *language_rules(_LANGUAGE, HEAD, False),
    )
