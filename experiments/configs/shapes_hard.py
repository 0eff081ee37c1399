r"""StepPrune on the second level of the shapes world, where the order of choices can matter.

    python -m experiments.shapes --out data/shapes_hard --level 2
    python train.py --config experiments/configs/shapes_hard.py
    python eval.py --config experiments/configs/shapes_hard.py
    python -m experiments.studies.sequence --config experiments/configs/shapes_hard.py \
        --workdir runs/shapes_hard

The frozen model is that of `experiments/configs/pretrain_shapes_hard.py`, which is trained first.
`experiments/configs/shapes_hard.py:literal` follows the paper to the letter.
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
    c.data.folder = "data/shapes_hard"
    c.steps = 400  # an update takes four to five times as long as on the first level
    c.eval.budgets = (64, 32, 16, 8, 4)
    c.eval.rows = ConfigDict()  # those of the package were trained for another model
    return c
