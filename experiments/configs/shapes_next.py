r"""StepPrune on a small LLaVA-NeXT: 744 visual tokens, of the whole image and of 2 x 2 tiles.

    python -m experiments.shapes --out data/shapes_next --level 3 --train 1500 --validation 40 \
        --test 75
    python train.py --config configs/sampled.py:experiments/configs/shapes_next.py \
        --workdir runs/shapes_next
    python eval.py --config configs/sampled.py:experiments/configs/shapes_next.py \
        --workdir runs/shapes_next

The frozen model is that of `experiments/configs/pretrain_shapes_next.py`, which is trained first.
`experiments/configs/shapes_next.py:literal` follows the paper to the letter.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/shapes.py` with tiles; or "literal"."""
    run = configurations.load(f"shapes:{reading}")
    return run.replace(
        {
            "model.folder": "runs/pretrain_shapes_next/model",
            "data.folder": "data/shapes_next",
            "policy.max_steps": None,  # half of an image's tokens
            # The shares of 640, 320 and 160 of LLaVA-NeXT's 2,880 tokens, and half of the last.
            "eval.budgets": (160, 80, 40, 20),
            "eval.methods": "all,random,cls,visionzip,hiprune,fastv,autoselect,stepprune",
            "eval.rows": {},
        }
    )
