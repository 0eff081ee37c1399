"""StepPrune on Qwen3-VL-8B: `configs/qwen25vl_7b.py` with another model.

    python train.py --config configs/qwen3vl_8b.py --workdir runs/qwen3vl_8b --dry_run
    python train.py --config configs/qwen3vl_8b.py --workdir runs/qwen3vl_8b

The paper has no run of this model. `configs/qwen3vl_8b.py:literal` follows the paper to the letter.
No run of this configuration has been made yet.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/qwen25vl_7b.py` with Qwen3-VL-8B."""
    run = configurations.load(f"qwen25vl_7b:{reading}")
    return run.replace(
        {
            "model.folder": "Qwen/Qwen3-VL-8B-Instruct",  # a hub id, or a folder
            # 256 to 2,048 visual tokens an image, as for Qwen2.5-VL; a token is 32 x 32 pixels.
            "model.min_pixels": 256 * 32 * 32,
            "model.max_pixels": 2048 * 32 * 32,
        }
    )
