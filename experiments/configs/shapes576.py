"""StepPrune on the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m experiments.shapes --out data/shapes576 --side 336 --grid 24
    python train.py --config experiments/configs/shapes576.py --workdir runs/shapes576
    python eval.py --config experiments/configs/shapes576.py --workdir runs/shapes576

The frozen model is that of `experiments/configs/pretrain_shapes576.py`, which is trained first.
`experiments/configs/shapes576.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` at another size.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("shapes", arg)
    c.model.folder = "runs/pretrain576/model"
    c.data.folder = "data/shapes576"
    c.policy.width = 128
    c.policy.max_steps = 288
    c.autoselect.width = 128
    c.eval.budgets = (192, 128, 64)
    c.eval.rows = ConfigDict()  # shipped policies are for the shapes world's model
    return c
