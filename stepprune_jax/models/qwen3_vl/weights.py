"""Qwen3-VL's weights: the name of each in the files, and its sharding."""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.qwen2_5_vl.weights import HEAD
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.models.weights import WeightRule, language_rules, linear

VISION = "model.visual."
_LANGUAGE = "model.language_model."

# As those of Qwen2.5-VL, with two layers in a block's MLP and stacked mergers of deep features.
SHARDING_RULES = (
    (r"vision/layers/attention/qkv/kernel", P(None, "fsdp", None)),
    (r"vision/layers/attention/qkv/bias", P()),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/mlp/up/bias", P(None, "tensor")),
    # Joined matrices, by `weights.join`; not where heads are split.
    (r"layers/(attention/query_key_value|mlp/gate_up)/kernel", P(None, "fsdp", None)),
    (r"layers/(attention/out|mlp/down)/kernel", P(None, "tensor", "fsdp")),
    (r"layers/(attention/out|mlp/down)/bias", P()),
    (r"layers/(norm[12]|attention/(query|key)_norm)/scale", P()),
    (r"deep_mergers/up/kernel", P(None, "fsdp", "tensor")),
    (r"deep_mergers/up/bias", P(None, "tensor")),
    (r"deep_mergers/down/kernel", P(None, "tensor", "fsdp")),
    (r"merger/up/kernel", P("fsdp", "tensor")),
    (r"merger/up/bias", P("tensor")),
    (r"merger/down/kernel", P("tensor", "fsdp")),
    (r"(merger|deep_mergers)/down/bias", P()),
    (r"language/embed/embedding", P("tensor", "fsdp")),
    (r"language/head/kernel", P("fsdp", "tensor")),
    (r"(language|merger|deep_mergers)/norm/scale", P()),
    (r"(layers/norm[12]|merger/norm|deep_mergers/norm)/bias", P()),
    (r"vision/(patch_embedding/(kernel|bias)|positions)", P()),
)


def rules(vision: Qwen3VisionConfig) -> tuple[WeightRule, ...]:
    """Returns all rules of a model with an untied output head."""
    block, p = VISION + "blocks.{}.", vision.patch_size
    window = (vision.temporal_patch_size, p, p)
    patches = VISION + "patch_embed.proj."
    return (
        WeightRule("vision/patch_embedding/kernel", patches + "weight", "patches", window),
        WeightRule("vision/patch_embedding/bias", patches + "bias"),
        WeightRule("vision/positions", VISION + "pos_embed.weight"),
        *_norm("vision/layers/norm1", block + "norm1"),
        *linear("vision/layers/attention/qkv", block + "attn.qkv", True),
        *linear("vision/layers/attention/out", block + "attn.proj", True),
        *_norm("vision/layers/norm2", block + "norm2"),
        *linear("vision/layers/mlp/up", block + "mlp.linear_fc1", True),
        *linear("vision/layers/mlp/down", block + "mlp.linear_fc2", True),
        *_merger("merger", VISION + "merger."),
        *_merger("deep_mergers", VISION + "deepstack_merger_list.{}."),
        *language_rules(_LANGUAGE, HEAD, False),
    )


def _norm(path: str, name: str) -> tuple[WeightRule, ...]:
    return WeightRule(f"{path}/scale", f"{name}.weight"), WeightRule(f"{path}/bias", f"{name}.bias")


def _merger(path: str, name: str) -> tuple[WeightRule, ...]:
    return (
        *_norm(f"{path}/norm", name + "norm"),
        *linear(f"{path}/up", name + "linear_fc1", True),
        *linear(f"{path}/down", name + "linear_fc2", True),
    )
