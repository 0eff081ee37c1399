"""StepPrune by RLOO on sampled subsets, instead of the noise gate.

    python train.py --config configs/rloo.py:shapes --workdir runs/shapes_rloo
    python train.py --config configs/rloo.py:llava7b --workdir runs/llava7b_rloo

The argument names the configuration of a run through the gate, which provides model, data and
policy. The frozen model answers each question from several sampled subsets of its tokens, and
subsets with better answers become more probable. RLOO needs no gradient of the model. In the small
world it is the best recipe so far (experiments/RESULTS.md); it is untested at 7B.

If a few random tokens never suffice for an answer, RLOO learns nothing from randomly initialized
weights. `--config.recipe=warm_start` begins with the warm start, which does not depend on random
tokens, `--config.recipe=auto` decides by a trial, and `--config.start=FILE` begins with the policy
of a file.

Subsets are small, because the choice of a few tokens is hard: at most 63 of LLaVA-7B's 576 tokens.
A quarter of them end at the learned stop. The group `rloo` has the settings and learning rates.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(name: str = "shapes") -> Run:
    """Returns the settings of the configuration `name`, with the recipe "rloo"."""
    return configurations.load(name).replace({"recipe": "rloo", "steps": 1600})
