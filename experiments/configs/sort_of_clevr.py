"""StepPrune on Sort-of-CLEVR, a public set of images of six shapes: docs/your-own-data.md.

    python train.py --config experiments/configs/sort_of_clevr.py
    python eval.py --config experiments/configs/sort_of_clevr.py

The frozen model is that of `experiments/configs/pretrain_sort_of_clevr.py`.
`experiments/configs/sort_of_clevr.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/shapes.py` with another model and other data."""
    run = configurations.load(f"shapes:{reading}")
    return run.replace(
        {
            "model.folder": "runs/pretrain_sort_of_clevr/model",
            "data.folder": "data/sort_of_clevr",
            "eval.budgets": (48, 32, 16, 8, 4),
            # Left out until the file exists; shipped policies are for another model.
            "eval.rows": {"AutoSelect-like": "runs/sort_of_clevr_autoselect/policy.safetensors"},
        }
    )
