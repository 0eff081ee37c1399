"""The StepPrune policy: pure functions over dicts of arrays, after arXiv:2606.16067.

Nothing here knows where features come from or what consumes the kept tokens: no Flax, no files, no
globals. It imports nothing from the rest of the package and can be used on its own.
"""

from stepprune_jax.policy.budget import (
    calibrate_stop_bias,
    differentiable_count,
    draw_budgets,
    draw_log_prices,
    soft_budget,
    update_running_count,
)
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import (
    Decoder,
    pointer_init,
    pointer_sequence,
    pointer_step,
)
from stepprune_jax.policy.denoiser import denoise
from stepprune_jax.policy.encoder import encode, memory
from stepprune_jax.policy.gather import Pruned, bucket_ladder, choose_bucket, gather
from stepprune_jax.policy.losses import length_penalty, total_loss
from stepprune_jax.policy.noise_gate import (
    FeatureStats,
    apply_gate,
    noise_gate,
    restore,
    scale_gate,
    standardise,
    update_stats,
)
from stepprune_jax.policy.objective import (
    Gated,
    choose,
    gate,
    gate_tokens,
    policy_metrics,
    prune,
    train_loss,
)
from stepprune_jax.policy.params import (
    ParamSpec,
    abstract_policy,
    cast_weights,
    draw_params,
    init_policy,
    param_paths,
    param_specs,
    partition_rules,
)
from stepprune_jax.policy.pick import Picks, Ranked, pick, rank
from stepprune_jax.policy.rollout import (
    hard_feedback,
    plain_rollout,
    saved_rollout,
    straight_through,
)
from stepprune_jax.policy.scores import (
    alive_probability,
    cosine_anneal,
    expected_count,
    log_soft_scores,
    polarisation_temperature,
    soft_scores,
    trajectory_scores,
)
from stepprune_jax.policy.select import select, select_parallel
from stepprune_jax.policy.soft_topk import soft_topk
from stepprune_jax.policy.trajectory import Limits, Trajectory, count_at_bias

__all__ = [
    "Decoder",
    "FeatureStats",
    "Gated",
    "Limits",
    "ParamSpec",
    "Picks",
    "PolicyConfig",
    "Pruned",
    "Ranked",
    "Trajectory",
    "abstract_policy",
    "alive_probability",
    "apply_gate",
    "bucket_ladder",
    "calibrate_stop_bias",
    "cast_weights",
    "choose",
    "choose_bucket",
    "cosine_anneal",
    "count_at_bias",
    "denoise",
    "differentiable_count",
    "draw_budgets",
    "draw_log_prices",
    "draw_params",
    "encode",
    "expected_count",
    "gate",
    "gate_tokens",
    "gather",
    "hard_feedback",
    "init_policy",
    "length_penalty",
    "log_soft_scores",
    "memory",
    "noise_gate",
    "param_paths",
    "param_specs",
    "partition_rules",
    "pick",
    "plain_rollout",
    "pointer_init",
    "pointer_sequence",
    "pointer_step",
    "polarisation_temperature",
    "policy_metrics",
    "prune",
    "rank",
    "restore",
    "saved_rollout",
    "scale_gate",
    "select",
    "select_parallel",
    "soft_budget",
    "soft_scores",
    "soft_topk",
    "standardise",
    "straight_through",
    "total_loss",
    "train_loss",
    "trajectory_scores",
    "update_running_count",
    "update_stats",
]
