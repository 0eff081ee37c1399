"""StepPrune on Qwen2.5-VL-3B: `configs/qwen25vl_7b.py` with the smaller model, and nothing else.

    python train.py --config configs/qwen25vl_3b.py --workdir runs/qwen25vl_3b --dry_run
    python train.py --config configs/qwen25vl_3b.py --workdir runs/qwen25vl_3b

The paper has no run of this model. `configs/qwen25vl_3b.py:literal` follows the paper to the
letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/qwen25vl_7b.py` with the 3B model.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("qwen25vl_7b", arg)
    c.model.folder = "Qwen/Qwen2.5-VL-3B-Instruct"
    return c
