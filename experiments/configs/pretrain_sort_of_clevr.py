"""The small LLaVA of the shapes world, trained further on Sort-of-CLEVR: docs/your-own-data.md.

    python -m experiments.datasets.sort_of_clevr --source FILE --out data/sort_of_clevr
    python -m experiments.pretrain --config experiments/configs/pretrain_sort_of_clevr.py

The result is runs/pretrain_sort_of_clevr/model. What is not said here is as in the defaults of the
settings.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings."""
    return Pretraining().replace(
        {
            "init": "stepprune_jax/assets/shapes_llava",
            "micro_batch": 2,  # faster on a CPU than 8, as rows of twenty questions are long
            "data.folder": "data/sort_of_clevr",
            "tower.steps": 0,  # the data have no patch labels
            # Half of the questions relate one object to all others, which takes long to learn.
            "language.steps": 1400,
            "language.whole_steps": 800,
            "language.lr": 1e-3,
            "language.muon_lr": 0.01,
            "language.train_tower": True,
            "noise.steps": 450,
        }
    )
