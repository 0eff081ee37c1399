"""StepPrune on LLaVA-NeXT-7B (v1.6, Vicuna): `configs/llava7b.py` with another model.

    python train.py --config configs/llava_next_7b.py --workdir runs/llava_next_7b --dry_run
    python train.py --config configs/llava_next_7b.py --workdir runs/llava_next_7b

The paper has no run of this model. Budgets and benchmarks come from the tables of other papers. An
image has up to 2,928 visual tokens: 2,880 patches and the ends of 48 rows. By the dry run an update
takes 33.8 GiB on each of two devices. A policy trained on LLaVA-1.5 also fits this model, because
the tower is the same. `configs/llava_next_7b.py:literal` follows the paper to the letter. No run of
this configuration has been made yet.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/llava7b.py` with LLaVA-NeXT-7B."""
    run = configurations.load(f"llava7b:{reading}")
    return run.replace(
        {
            "model.folder": "llava-hf/llava-v1.6-vicuna-7b-hf",  # a hub id, or a folder
            "data.context_limit": 4096,  # the model's own
            "policy.max_steps": None,  # half of each image's tokens
            "eval.budgets": (640, 320, 160),  # 22.2, 11.1 and 5.6 % of 2,880: as in VisionZip
        }
    )
