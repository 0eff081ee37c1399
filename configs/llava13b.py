"""StepPrune on LLaVA-v1.5-13B: as `configs/llava7b.py`, which says where each value is from.

    python train.py --config configs/llava13b.py --workdir runs/llava13b --dry_run
    python train.py --config configs/llava13b.py --workdir runs/llava13b

The paper has no run of this model. `configs/llava13b.py:literal` likewise.
"""

from ml_collections import ConfigDict

from configs import llava7b


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/llava7b.py`, with another model.

    Args:
        arg: reading of the paper, as there.

    Returns:
        The configuration.
    """
    c = llava7b.get_config(arg)
    c.model.folder = "llava-hf/llava-1.5-13b-hf"
    return c
