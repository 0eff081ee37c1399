"""The small LLaVA of the shapes world, trained further on Sort-of-CLEVR: docs/your-own-data.md.

    python -m experiments.datasets.sort_of_clevr --source FILE --out data/sort_of_clevr
    python -m experiments.pretrain --config experiments/configs/pretrain_sort_of_clevr.py

The result is runs/pretrain_sort_of_clevr/model.
"""

from pathlib import Path

from experiments.pretrain.settings import Pretraining
from stepprune_jax import configurations


def get_config() -> Pretraining:
    """Returns the settings of `pretrain_easyvqa.py` with other data and more steps."""
    run = configurations.load(str(Path(__file__).with_name("pretrain_easyvqa.py")))
    return run.replace(
        {
            "data.folder": "data/sort_of_clevr",
            "micro_batch": 2,  # faster on a CPU than 8, as rows of twenty questions are long
            # Half of the questions relate one object to all others, which takes long to learn.
            "language.steps": 1400,
            "language.whole_steps": 800,
            "noise.steps": 450,
        }
    )
