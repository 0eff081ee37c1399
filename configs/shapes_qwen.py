"""StepPrune on the shapes world with a small Qwen2.5-VL: images of 64 to 196 visual tokens.

    python -m experiments.shapes --out data/shapes_qwen --sizes 64 88 112
    python train.py --config configs/shapes_qwen.py
    python eval.py --config configs/shapes_qwen.py

The frozen model ships with the package; experiments/configs/pretrain_shapes_qwen.py trained it.
`configs/shapes_qwen.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with images of three sizes.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("shapes", arg)
    c.model.folder = "shapes_qwen"
    # Tables name rates by the tokens of the largest image: of 198, thirds and ninths are whole. The
    # images have 196 at most.
    c.model.max_pixels = 198 * 8 * 8
    c.data.folder = "data/shapes_qwen"
    c.eval.budgets = ("1/3", "2/9", "1/9")  # rates of 66.7, 77.8 and 88.9 %, as in Table 2
    c.eval.rows = ConfigDict()  # those of the package were trained for the small LLaVA
    return c
