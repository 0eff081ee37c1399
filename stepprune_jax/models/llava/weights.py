"""Names of LLaVA's weights in checkpoint files, and their shardings.

Files use several naming schemes: two generations of Hugging Face LLaVA, the original LLaVA-1.5, and
a CLIP folder. `PREFIXES` translates each name to its canonical name, which is the name in the
published Hugging Face files of LLaVA-1.5. The rules use canonical names.
"""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.weights import WeightRule, language_rules, linear_rules, norm_rules

VISION = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_LANGUAGE = "language_model.model."
HEAD = "language_model.lm_head"

# The first matching prefix is replaced, so a longer prefix precedes a shorter prefix that it starts
# with.
PREFIXES = (
    ("model.vision_tower.vision_tower.vision_model.", VISION),  # original LLaVA-1.5
    ("model.vision_tower.vision_model.", VISION),
    ("model.vision_tower.", VISION),
    ("vision_tower.vision_model.", VISION),
    ("vision_tower.", VISION),
    ("model.mm_projector.0.", _PROJECTOR + "linear_1."),  # original LLaVA-1.5
    ("model.mm_projector.2.", _PROJECTOR + "linear_2."),
    ("model.multi_modal_projector.", _PROJECTOR),
    ("multi_modal_projector.", _PROJECTOR),
    ("language_model.lm_head.", HEAD + "."),
    ("lm_head.", HEAD + "."),
    ("language_model.model.", _LANGUAGE),
    ("model.language_model.", _LANGUAGE),
    ("model.", _LANGUAGE),  # the original LLaVA-1.5 has Llama's names
)

# Buffers that older versions of `transformers` stored with the weights. The model computes them.
UNUSED_ENDINGS = (".rotary_emb.inv_freq", ".embeddings.position_ids")
# Prefixes of the weights of a CLIP checkpoint that are not part of the image tower.
CLIP_EXTRAS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")

# Sharding of weights, see `parallel.sharding`. First projections of attention and MLP are sharded
# by column and last projections by row, so a block needs only two sums across devices.
SHARDING_RULES = (
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/(attention/(query|key|value)|mlp/up)/bias", P(None, "tensor")),
    # Matrices that `weights.join_kernels` joined are not sharded over heads.
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
    # These weights are small, and few meshes divide their sizes (577 positions, 588 patch values).
    (r"vision/(class_embedding|position_embedding|patch_embedding/kernel)", P()),
    (r"vision/(pre|post)_norm/(scale|bias)", P()),
)


def rules(patch_size: int) -> tuple[WeightRule, ...]:
    """Returns the rules of all weights of a LLaVA; with the output head, which may be tied."""
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
        *norm_rules("vision/pre_norm", tower + "pre_layrnorm"),
        *norm_rules("vision/layers/norm1", block + "layer_norm1"),
        *linear_rules("vision/layers/attention/query", block + "self_attn.q_proj", True),
        *linear_rules("vision/layers/attention/key", block + "self_attn.k_proj", True),
        *linear_rules("vision/layers/attention/value", block + "self_attn.v_proj", True),
        *linear_rules("vision/layers/attention/out", block + "self_attn.out_proj", True),
        *norm_rules("vision/layers/norm2", block + "layer_norm2"),
        *linear_rules("vision/layers/mlp/up", block + "mlp.fc1", True),
        *linear_rules("vision/layers/mlp/down", block + "mlp.fc2", True),
        *norm_rules("vision/post_norm", tower + "post_layernorm"),
        *linear_rules("projector/up", _PROJECTOR + "linear_1", True),
        *linear_rules("projector/down", _PROJECTOR + "linear_2", True),
        *language_rules(_LANGUAGE, HEAD, False),
    )
