r"""StepPrune on the second level of the shapes world, where the order of choices can matter.

    python train.py --config configs/shapes_hard.py
    python eval.py --config configs/shapes_hard.py
    python -m stepprune_jax.studies.sequence --config configs/shapes_hard.py \
        --workdir runs/shapes_hard

The frozen model is that of `configs/pretrain_shapes_hard.py`, which is trained first.
`configs/shapes_hard.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with another level and its model.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("shapes", arg)
    c.model.folder = "runs/pretrain_shapes_hard/model"
    c.data.level = 2
    c.steps = 400  # an update takes four to five times as long as on the first level
    c.eval.budgets = (64, 32, 16, 8, 4)
    c.eval.rows = ConfigDict()  # those of the package were trained for another model
    return c
