"""Qwen3-VL's weights: the name of each in the files, and its sharding."""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.qwen2_5_vl.weights import HEAD
from stepprune_jax.models.qwen2_5_vl.weights import SHARDING_RULES as QWEN_RULES
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.models.weights import WeightRule, language_rules, linear

VISION = "model.visual."
_LANGUAGE = "model.language_model."

SHARDING_RULES = (
    (r"deep_mergers/up/kernel", P(None, "fsdp", "tensor")),
    (r"deep_mergers/up/bias", P(None, "tensor")),
    (r"deep_mergers/down/kernel", P(None, "tensor", "fsdp")),
    (r"deep_mergers/down/bias", P()),
    *QWEN_RULES,
    (r"layers/attention/(query|key)_norm/scale", P()),
    (r"(layers/norm[12]|(deep_)?mergers?/norm)/(scale|bias)", P()),
    (r"vision/(patch_embedding/bias|positions)", P()),
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
