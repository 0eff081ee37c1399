"""The small LLaVA of the shapes world, trained further on easy-VQA: docs/your-own-data.md.

    python -m experiments.datasets.easy_vqa --source FOLDER --out data/easy_vqa
    python -m experiments.pretrain --config experiments/configs/pretrain_easyvqa.py

The result is runs/pretrain_easyvqa/model. What is not said here is as in
`experiments/configs/pretrain_shapes.py`.
"""

from pathlib import Path

from ml_collections import ConfigDict

import stepprune_jax
from stepprune_jax import configurations


def get_config() -> ConfigDict:
    """Returns the configuration."""
    c = configurations.load(str(Path(__file__).with_name("pretrain_shapes.py")))
    c.init = str(Path(stepprune_jax.__file__).parent / "assets" / "shapes_llava")
    c.data.folder = "data/easy_vqa"

    c.tower.steps = 0  # the data have no patch labels

    c.language.steps = 500
    c.language.whole_steps = 250
    c.language.lr = 1e-3
    c.language.muon_lr = 0.01
    c.language.train_tower = True

    c.noise.steps = 200
    return c
