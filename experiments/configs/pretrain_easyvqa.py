"""The small LLaVA of the shapes world, trained further on easy-VQA: docs/your-own-data.md.

    python -m experiments.datasets.easy_vqa --source FOLDER --out data/easy_vqa
    python -m experiments.pretrain --config experiments/configs/pretrain_easyvqa.py

The result is runs/pretrain_easyvqa/model. What is not said here is as in the
defaults of the settings.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings."""
    return Pretraining().replace(
        {
            "init": "stepprune_jax/assets/shapes_llava",
            "data.folder": "data/easy_vqa",
            "tower.steps": 0,  # the data have no patch labels
            "language.steps": 500,
            "language.whole_steps": 250,
            "language.lr": 1e-3,
            "language.muon_lr": 0.01,
            "language.train_tower": True,
            "noise.steps": 200,
        }
    )
