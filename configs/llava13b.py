"""StepPrune on LLaVA-v1.5-13B: `configs/llava7b.py` with the larger model.

    python train.py --config configs/llava13b.py --workdir runs/llava13b --dry_run
    python train.py --config configs/llava13b.py --workdir runs/llava13b

`configs/llava7b.py` gives the source of each value. The paper has no run of this model.
`configs/llava13b.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/llava7b.py` with the 13B model."""
    run = configurations.load(f"llava7b:{reading}")
    return run.replace({"model.folder": "llava-hf/llava-1.5-13b-hf"})
