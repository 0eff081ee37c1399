"""Qwen2.5-VL's weights: the name of each in the files, and its sharding.

Each name is first translated to that of the published files; newer `transformers` put the whole
model below "model.".
"""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig
from stepprune_jax.models.weights import WeightRule, language_rules, linear

VISION = "visual."
_MERGER = "visual.merger."
_LANGUAGE = "model."
HEAD = "lm_head"

# First match wins, so a longer prefix comes before a shorter one that it starts with.
PREFIXES = (("model.visual.", VISION), ("model.language_model.", _LANGUAGE))

# Sharding of weights, see `parallel.sharding`. Projections that open heads or MLP channels are cut
# by column, those that close them by row. The tower's queries, keys and values are one matrix; its
# columns are not cut, as that would split its parts.
SHARDING_RULES = (
    (r"vision/layers/attention/qkv/kernel", P(None, "fsdp", None)),
    (r"vision/layers/attention/qkv/bias", P()),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/bias", P(None, "tensor")),
    # Joined matrices, by `weights.join`; not where heads are split.
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
    """Returns all rules of a model with an untied output head."""
    block, p = VISION + "blocks.{}.", vision.patch_size
    return (
        WeightRule(
            "vision/patch_embedding/kernel",
            VISION + "patch_embed.proj.weight",
            "patches",
            (vision.temporal_patch_size, p, p),
        ),
        WeightRule("vision/layers/norm1/scale", block + "norm1.weight"),
        *linear("vision/layers/attention/qkv", block + "attn.qkv", True),
        *linear("vision/layers/attention/out", block + "attn.proj", True),
        WeightRule("vision/layers/norm2/scale", block + "norm2.weight"),
        *linear("vision/layers/mlp/gate", block + "mlp.gate_proj", True),
        *linear("vision/layers/mlp/up", block + "mlp.up_proj", True),
        *linear("vision/layers/mlp/down", block + "mlp.down_proj", True),
        WeightRule("merger/norm/scale", _MERGER + "ln_q.weight"),
        *linear("merger/up", _MERGER + "mlp.0", True),
        *linear("merger/down", _MERGER + "mlp.2", True),
        *language_rules(_LANGUAGE, HEAD, True),
    )
