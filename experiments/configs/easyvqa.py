r"""StepPrune on easy-VQA, a public set of images of one shape: docs/your-own-data.md.

    python train.py --config experiments/configs/easyvqa.py
    python train.py --config experiments/configs/easyvqa.py --workdir runs/easyvqa_autoselect \
        --config.method=autoselect --config.text_gate_anneal=0.1
    python eval.py --config experiments/configs/easyvqa.py

The frozen model is that of `experiments/configs/pretrain_easyvqa.py`.
`experiments/configs/easyvqa.py:literal` follows the paper to the letter.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with another model and other data.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("shapes", arg)
    c.model.folder = "runs/pretrain_easyvqa/model"
    c.data.folder = "data/easy_vqa"
    c.steps = 250  # half as many as for the shapes world: one large shape is found quickly
    c.eval.budgets = (48, 32, 16, 8)
    c.eval.rows = ConfigDict()  # left out until the file exists; shipped ones are for another model
    c.eval.rows["AutoSelect-like"] = "runs/easyvqa_autoselect/policy.safetensors"
    return c
