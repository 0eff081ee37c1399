"""StepPrune on the shapes world with a small Qwen2.5-VL: images of 64 to 196 visual tokens.

    python -m experiments.shapes --out data/shapes_qwen --sizes 64 88 112
    python train.py --config configs/shapes_qwen.py
    python eval.py --config configs/shapes_qwen.py

The frozen model ships with the package; experiments/configs/pretrain_shapes_qwen.py trained it.
`configs/shapes_qwen.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/shapes.py`, with another model and three image sizes."""
    run = configurations.load(f"shapes:{reading}")
    return run.replace(
        {
            "model.folder": "shapes_qwen",
            # Tables name rates by the tokens of the largest image. The images have at most 196
            # tokens; thirds and ninths of 198 are integers.
            "model.max_pixels": 198 * 8 * 8,
            "data.folder": "data/shapes_qwen",
            "eval.budgets": ("1/3", "2/9", "1/9"),  # rates of 66.7, 77.8 and 88.9 %, as in Table 2
            "eval.rows": {},  # the rows of `configs/shapes.py` were trained for the small LLaVA
        }
    )
