"""StepPrune on the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m experiments.shapes --out data/shapes576 --side 336 --grid 24
    python train.py --config experiments/configs/shapes576.py --workdir runs/shapes576
    python eval.py --config experiments/configs/shapes576.py --workdir runs/shapes576

The frozen model is that of `experiments/configs/pretrain_shapes576.py`, which is trained first.
`experiments/configs/shapes576.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/shapes.py` at another size; or "literal"."""
    run = configurations.load(f"shapes:{reading}")
    return run.replace(
        {
            "model.folder": "runs/pretrain576/model",
            "data.folder": "data/shapes576",
            "policy.width": 128,
            "policy.max_steps": 288,
            "autoselect.width": 128,
            "eval.budgets": (192, 128, 64),
            "eval.rows": {},
        }
    )
