"""The StepPrune policy (arXiv:2606.16067) as pure functions over dicts of arrays.

The functions map image tokens and word embeddings to kept tokens. They do not depend on a vision
tower or language model, and use no Flax, files or global state. This package imports nothing from
other packages of the project, so it can be used separately.
"""

from stepprune_jax.policy.base import (
    DecoderFns,
    FeatureStats,
    FeedbackFn,
    Gated,
    InitFn,
    Inputs,
    Limits,
    Picks,
    Progress,
    Pruned,
    SampledSubsets,
    SequenceFn,
    StepFn,
    StopPrice,
    Trajectory,
)
from stepprune_jax.policy.budget import calibrate_stop_bias
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import encode
from stepprune_jax.policy.gathering import gather, prune
from stepprune_jax.policy.noise import noise_gate, update_stats
from stepprune_jax.policy.objective import gate, policy_metrics, train_loss
from stepprune_jax.policy.params import (
    abstract_policy,
    cast_weights,
    init_policy,
    partition_rules,
)
from stepprune_jax.policy.sampling import leave_one_out, price_stop, sample
from stepprune_jax.policy.scores import trajectory_scores
from stepprune_jax.policy.selection import choose, rank, select
from stepprune_jax.policy.soft_topk import soft_topk
from stepprune_jax.policy.warm_start import WarmStart, token_importance, warm_start_loss

__all__ = [
    "POINTER",
    "DecoderFns",
    "FeatureStats",
    "FeedbackFn",
    "Gated",
    "InitFn",
    "Inputs",
    "Limits",
    "Picks",
    "PolicyConfig",
    "Progress",
    "Pruned",
    "SampledSubsets",
    "SequenceFn",
    "StepFn",
    "StopPrice",
    "Trajectory",
    "WarmStart",
    "abstract_policy",
    "calibrate_stop_bias",
    "cast_weights",
    "choose",
    "encode",
    "gate",
    "gather",
    "init_policy",
    "leave_one_out",
    "noise_gate",
    "partition_rules",
    "policy_metrics",
    "price_stop",
    "prune",
    "rank",
    "sample",
    "select",
    "soft_topk",
    "token_importance",
    "train_loss",
    "trajectory_scores",
    "update_stats",
    "warm_start_loss",
]
