"""A second stage for a policy: sets of tokens are drawn, those that are answered well preferred.

    python train.py --config configs/shapes.py --workdir runs/shapes
    python train.py --config configs/sampled.py:shapes --workdir runs/shapes_sampled
    python train.py --config configs/sampled.py:llava7b --workdir runs/llava7b_sampled

The argument names the configuration of the first stage, whose policy is expected in its workdir,
such as runs/llava7b-short for `llava7b:short`; `--config.start=FILE` names another. In the small
world it repairs weak runs and gains at all budgets, without gradients of the model, see
experiments/RESULTS.md; it has not been tried at 7B.

Sets are small, because a few tokens are what is hard to choose: of LLaVA-7B's 576 tokens at most
63. A quarter of them end by the policy's stop. A token's price is four times that of the first
stage, as what it gains is measured in probability here, and in nats there.

`--config.start=` begins from drawn weights, without a first stage: better still in the first runs.
"""

from stepprune_jax import configurations
from stepprune_jax.command_line import default_workdir
from stepprune_jax.training import Run


def get_config(first: str = "shapes") -> Run:
    """Returns the settings of the first stage with those of the second."""
    run = configurations.load(first)
    lr = 1e-3 * 64 / run.policy.policy_width  # best rates fall as 1 / width
    return run.replace(
        {
            "start": f"{default_workdir(first)}/policy.safetensors",
            "steps": 1600,
            "text_gate_anneal": 0.0,  # the first stage has opened it
            "policy.draw": 1.0,  # inference draws as training does
            "policy.length_weight": 4 * run.policy.length_weight,
            "policy_gradient.samples": 8,
            "optimizer.lr": lr,
            "optimizer.final_lr": lr / 10,
            "optimizer.muon_lr": 0.0,
        }
    )
