"""Names of Qwen2.5-VL's weights in checkpoint files, and their shardings.

Canonical names are the names in the published files. Newer versions of `transformers` put the
prefix "model." in front of all names.
"""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.weights import WeightRule, language_rules, linear_rules

VISION = "visual."
_MERGER = "visual.merger."
_LANGUAGE = "model."
HEAD = "lm_head"

# Prefixes and their canonical replacements. The first matching prefix is replaced.
PREFIXES = (("model.visual.", VISION), ("model.language_model.", _LANGUAGE))

# Sharding of weights, see `parallel.sharding`. First projections of attention and MLP are sharded
# by column and last projections by row. The tower has one matrix for queries, keys and values. Its
# columns are not sharded, because shards would not align with the three parts.
SHARDING_RULES = (
    (r"vision/layers/attention/qkv/kernel", P(None, "fsdp", None)),
    (r"vision/layers/attention/qkv/bias", P()),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/bias", P(None, "tensor")),
    # Matrices that `weights.join_kernels` joined are not sharded over heads.
    (r"layers/(attention/query_key_value|mlp/gate_up)/kernel", P(None, "fsdp", None)),
    (r"layers/(attention/query_key_value|mlp/gate_up)/bias", P()),
    (r"layers/(attention/out|mlp/down)/kernel", P(None, "tensor", "fsdp")),
    (r"layers/(attention/out|mlp/down)/bias", P()),
    (r"layers/norm[12]/scale", P()),
    (r"merger/up/kernel", P("fsdp", "tensor")),
    (r"merger/up/bias", P("tensor")),
    (r"merger/down/kernel", P("tensor", "fsdp")),
    (r"merger/down/bias", P()),
    (r"language/embed/embedding", P("tensor", "fsdp")),
    (r"language/head/kernel", P("fsdp", "tensor")),
    (r"(language|merger)/norm/scale", P()),
    (r"vision/patch_embedding/kernel", P()),
)


def rules(vision: QwenVisionConfig) -> tuple[WeightRule, ...]:
    """Returns the rules of all weights; with the output head, which may be tied."""
    block, p = VISION + "blocks.{}.", vision.patch_size
    return (
        WeightRule(
            "vision/patch_embedding/kernel",
            VISION + "patch_embed.proj.weight",
            "patches",
            (vision.temporal_patch_size, p, p),
        ),
        WeightRule("vision/layers/norm1/scale", block + "norm1.weight"),
        *linear_rules("vision/layers/attention/qkv", block + "attn.qkv", True),
        *linear_rules("vision/layers/attention/out", block + "attn.proj", True),
        WeightRule("vision/layers/norm2/scale", block + "norm2.weight"),
        *linear_rules("vision/layers/mlp/gate", block + "mlp.gate_proj", True),
        *linear_rules("vision/layers/mlp/up", block + "mlp.up_proj", True),
        *linear_rules("vision/layers/mlp/down", block + "mlp.down_proj", True),
        WeightRule("merger/norm/scale", _MERGER + "ln_q.weight"),
        *linear_rules("merger/up", _MERGER + "mlp.0", True),
        *linear_rules("merger/down", _MERGER + "mlp.2", True),
        *language_rules(_LANGUAGE, HEAD, True),
    )
