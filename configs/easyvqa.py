"""StepPrune on easy-VQA, a public set of pictures of one shape: docs/your-own-data.md.

    python train.py --config configs/easyvqa.py
    python eval.py --config configs/easyvqa.py

The model is that of `configs/pretrain_easyvqa.py`.
"""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/shapes.py`, with another model and other data."""
    c = shapes.get_config(arg)
    c.model.folder = "runs/pretrain_easyvqa/model"
    c.data.name = "folder"
    c.data.folder = "data/easy_vqa"
    c.eval.rows = ConfigDict()  # trained for the model of the shapes world
    return c
