"""Names of Qwen3-VL's weights in checkpoint files, and their shardings."""

from jax.sharding import PartitionSpec as P

from stepprune_jax.models.qwen2_5_vl.weights import HEAD
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.models.weights import WeightRule, language_rules, linear_rules, norm_rules

VISION = "model.visual."
_LANGUAGE = "model.language_model."

# Sharding of weights, see `qwen2_5_vl.weights`. The MLP of a block has two layers, and DeepStack
# mergers are stacked.
SHARDING_RULES = (
    (r"vision/layers/attention/qkv/kernel", P(None, "fsdp", None)),
    (r"vision/layers/attention/qkv/bias", P()),
    (r"layers/(attention/(query|key|value)|mlp/(gate|up))/kernel", P(None, "fsdp", "tensor")),
    (r"layers/mlp/up/bias", P(None, "tensor")),
    # Matrices that `weights.join_kernels` joined are not sharded over heads.
    (r"layers/(attention/query_key_value|mlp/gate_up)/kernel", P(None, "fsdp", None)),
    (r"layers/(attention/out|mlp/down)/kernel", P(None, "tensor", "fsdp")),
    (r"layers/(attention/out|mlp/down)/bias", P()),
    (r"layers/(norm[12]|attention/(query|key)_norm)/scale", P()),
    (r"deepstack_mergers/up/kernel", P(None, "fsdp", "tensor")),
    (r"deepstack_mergers/up/bias", P(None, "tensor")),
    (r"deepstack_mergers/down/kernel", P(None, "tensor", "fsdp")),
    (r"merger/up/kernel", P("fsdp", "tensor")),
    (r"merger/up/bias", P("tensor")),
    (r"merger/down/kernel", P("tensor", "fsdp")),
    (r"(merger|deepstack_mergers)/down/bias", P()),
    (r"language/embed/embedding", P("tensor", "fsdp")),
    (r"language/head/kernel", P("fsdp", "tensor")),
    (r"(language|merger|deepstack_mergers)/norm/scale", P()),
    (r"(layers/norm[12]|merger/norm|deepstack_mergers/norm)/bias", P()),
    (r"vision/(patch_embedding/(kernel|bias)|positions)", P()),
)


def rules(vision: Qwen3VisionConfig) -> tuple[WeightRule, ...]:
    """Returns the rules of all weights; with the output head, which may be tied."""
    block, p = VISION + "blocks.{}.", vision.patch_size
    window = (vision.temporal_patch_size, p, p)
    patches = VISION + "patch_embed.proj."
    return (
        WeightRule("vision/patch_embedding/kernel", patches + "weight", "patches", window),
        WeightRule("vision/patch_embedding/bias", patches + "bias"),
        WeightRule("vision/positions", VISION + "pos_embed.weight"),
        *norm_rules("vision/layers/norm1", block + "norm1"),
        *linear_rules("vision/layers/attention/qkv", block + "attn.qkv", True),
        *linear_rules("vision/layers/attention/out", block + "attn.proj", True),
        *norm_rules("vision/layers/norm2", block + "norm2"),
        *linear_rules("vision/layers/mlp/up", block + "mlp.linear_fc1", True),
        *linear_rules("vision/layers/mlp/down", block + "mlp.linear_fc2", True),
        *_merger_rules("merger", VISION + "merger."),
        *_merger_rules("deepstack_mergers", VISION + "deepstack_merger_list.{}."),
        *language_rules(_LANGUAGE, HEAD, False),
    )


def _merger_rules(path: str, name: str) -> tuple[WeightRule, ...]:
    return (
        *norm_rules(f"{path}/norm", name + "norm"),
        *linear_rules(f"{path}/up", name + "linear_fc1", True),
        *linear_rules(f"{path}/down", name + "linear_fc2", True),
    )
