"""StepPrune without the gate: sets of tokens are drawn, and those that are answered well preferred.

    python train.py --config configs/rloo.py:shapes --workdir runs/shapes_sampled
    python train.py --config configs/rloo.py:llava7b --workdir runs/llava7b_sampled

The argument names the configuration of a run through the gate, whose model, data, policy and price
these are. In the small world this is the best recipe so far, without gradients of the model, see
experiments/RESULTS.md; it has not been tried at 7B. Where a few random tokens never suffice for an
answer, nothing is learned from drawn weights: `--config.recipe=auto` of a run through the gate
finds out, and `--config.start=FILE` begins with a policy that was trained through the gate.

Sets are small, because a few tokens are what is hard to choose: of LLaVA-7B's 576 tokens at most
63. A quarter of them end by the policy's stop. `training.rloo_run` has the other settings.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run, rloo_run


def get_config(gated: str = "shapes") -> Run:
    """Returns the settings of a run through the gate, with those of sampled sets."""
    return rloo_run(configurations.load(gated)).replace({"steps": 1600})
