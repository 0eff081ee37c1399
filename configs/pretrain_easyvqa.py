"""The small LLaVA of the shapes world goes on with easy-VQA: docs/your-own-data.md.

    python -m stepprune_jax.data.easy_vqa --source FOLDER --out data/easy_vqa
    python -m stepprune_jax.pretrain --config configs/pretrain_easyvqa.py

The result is runs/pretrain_easyvqa/model.
"""

from pathlib import Path

from ml_collections import ConfigDict

import stepprune_jax
from configs import pretrain_shapes


def get_config() -> ConfigDict:
    """As `configs/pretrain_shapes.py`, from the shipped model on."""
    c = pretrain_shapes.get_config()
    c.init = str(Path(stepprune_jax.__file__).parent / "assets" / "shapes_llava")
    c.data.folder = "data/easy_vqa"
    c.tower.steps = 0  # there are no labels of patches
    c.language.train_tower = True
    c.language.steps = 500
    c.language.whole_steps = 250
    c.language.lr = 1e-3
    c.language.muon_lr = 0.01
    c.noise.steps = 200
    return c
