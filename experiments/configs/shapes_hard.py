r"""StepPrune on the second level of the shapes world, where the order of choices can matter.

    python -m experiments.shapes --out data/shapes_hard --level 2
    python train.py --config experiments/configs/shapes_hard.py
    python eval.py --config experiments/configs/shapes_hard.py

The frozen model is that of `experiments/configs/pretrain_shapes_hard.py`, about three hours on two
cores. That of experiments/RESULTS.md is in the history of the repository, for
`--config.model.folder=experiments/models/shapes_hard`:

    git restore --source=29ac00a experiments/models

`experiments/configs/shapes_hard.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/shapes.py` with another level; or "literal"."""
    run = configurations.load(f"shapes:{reading}")
    return run.replace(
        {
            "model.folder": "runs/pretrain_shapes_hard/model",
            "data.folder": "data/shapes_hard",
            "steps": 400,  # an update takes four to five times as long as on the first level
            "eval.budgets": (64, 32, 16, 8, 4),
            "eval.rows": {},
        }
    )
