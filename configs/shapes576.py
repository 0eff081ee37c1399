"""StepPrune on the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python train.py --config configs/shapes576.py --workdir runs/shapes576
    python eval.py --config configs/shapes576.py --workdir runs/shapes576

The frozen model is that of `configs/pretrain_shapes576.py`, which is trained first.
"""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/shapes.py`, with other sizes.

    Args:
        arg: reading of the paper, as there.

    Returns:
        The configuration.
    """
    c = shapes.get_config(arg)
    c.model.folder = "runs/pretrain576/model"
    c.data.side = 336  # of the pictures, in pixels
    c.data.grid = 24  # patches along an edge
    c.policy.max_steps = 288
    c.policy.width = c.autoselect.width = 128
    c.eval.budgets = (192, 128, 64)
    return c
