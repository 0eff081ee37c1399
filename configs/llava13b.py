"""StepPrune on LLaVA-v1.5-13B: `configs/llava7b.py` with the larger model, and nothing else.

    python train.py --config configs/llava13b.py --workdir runs/llava13b --dry_run
    python train.py --config configs/llava13b.py --workdir runs/llava13b

`configs/llava7b.py` is the whole experiment, with the source of each value. The paper has no run of
this model. `configs/llava13b.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/llava7b.py` with the 13B model.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("llava7b", arg)
    c.model.folder = "llava-hf/llava-1.5-13b-hf"
    return c
