"""StepPrune without the gate: sets of tokens are drawn, and those that are answered well preferred.

    python train.py --config configs/sampled.py:shapes --workdir runs/shapes_sampled
    python train.py --config configs/sampled.py:llava7b --workdir runs/llava7b_sampled

The argument names the configuration of a run through the gate, whose model, data, policy and price
these are. In the small world this is the best recipe so far, without gradients of the model, see
experiments/RESULTS.md; it has not been tried at 7B. Where a few random tokens never suffice for an
answer, nothing is learned from drawn weights: `--config.start=FILE` begins with a policy that was
trained through the gate.

Sets are small, because a few tokens are what is hard to choose: of LLaVA-7B's 576 tokens at most
63. A quarter of them end by the policy's stop. A token's price is four times that of the gate, as
what it gains is measured in probability here, and in nats there.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(gated: str = "shapes") -> Run:
    """Returns the settings of a run through the gate, with those of sampled sets."""
    run = configurations.load(gated)
    lr = 1e-3 * 64 / run.policy.policy_width  # half the rates served twice the width, one run each
    return run.replace(
        {
            "steps": 1600,
            "text_gate_anneal": 0.0,
            "policy.draw": 1.0,  # inference draws as training does
            "policy.length_weight": 4 * run.policy.length_weight,
            "policy_gradient.samples": 8,
            "optimizer.lr": lr,
            "optimizer.final_lr": lr / 10,
            "optimizer.muon_lr": 0.0,
        }
    )
