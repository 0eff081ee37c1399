"""StepPrune on Sort-of-CLEVR, a public set of images of six shapes: docs/your-own-data.md.

    python train.py --config experiments/configs/sort_of_clevr.py
    python eval.py --config experiments/configs/sort_of_clevr.py

The frozen model is that of `experiments/configs/pretrain_sort_of_clevr.py`.
`experiments/configs/sort_of_clevr.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with another model and other data.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("shapes", arg)
    c.model.folder = "runs/pretrain_sort_of_clevr/model"
    c.data.folder = "data/sort_of_clevr"
    c.eval.budgets = (48, 32, 16, 8, 4)
    c.eval.rows = ConfigDict()  # left out until the file exists; shipped ones are for another model
    c.eval.rows["AutoSelect-like"] = "runs/sort_of_clevr_autoselect/policy.safetensors"
    return c
