"""StepPrune on Qwen3-VL-2B: `configs/qwen3vl_8b.py` with the smaller model.

    python train.py --config configs/qwen3vl_2b.py --workdir runs/qwen3vl_2b --dry_run
    python train.py --config configs/qwen3vl_2b.py --workdir runs/qwen3vl_2b

The paper has no run of this model. `configs/qwen3vl_2b.py:literal` follows the paper to the
letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/qwen3vl_8b.py` with the 2B model."""
    run = configurations.load(f"qwen3vl_8b:{reading}")
    return run.replace({"model.folder": "Qwen/Qwen3-VL-2B-Instruct"})
