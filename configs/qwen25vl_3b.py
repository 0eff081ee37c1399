"""StepPrune on Qwen2.5-VL-3B: `configs/qwen25vl_7b.py` with the smaller model.

    python train.py --config configs/qwen25vl_3b.py --workdir runs/qwen25vl_3b --dry_run
    python train.py --config configs/qwen25vl_3b.py --workdir runs/qwen25vl_3b

The paper has no run of this model. `configs/qwen25vl_3b.py:literal` follows the paper to the
letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/qwen25vl_7b.py` with the 3B model."""
    run = configurations.load(f"qwen25vl_7b:{reading}")
    return run.replace({"model.folder": "Qwen/Qwen2.5-VL-3B-Instruct"})
