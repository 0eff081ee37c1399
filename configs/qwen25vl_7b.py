"""StepPrune on Qwen2.5-VL-7B: `configs/llava7b.py` with another model.

    python train.py --config configs/qwen25vl_7b.py --workdir runs/qwen25vl_7b --dry_run
    python train.py --config configs/qwen25vl_7b.py --workdir runs/qwen25vl_7b

The paper runs "the same protocol" on this model (Sec. 4.3): `configs/llava7b.py` has the source of
each value that is not here. The comments give the source of a value: a section of the paper, or
"silent" if the paper gives none. `configs/qwen25vl_7b.py:literal` follows the paper to the letter.
No run of this configuration has been made yet.
"""

from ml_collections import ConfigDict, config_dict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/llava7b.py` with Qwen2.5-VL-7B.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    c = configurations.load("llava7b", arg)
    c.model.folder = "Qwen/Qwen2.5-VL-7B-Instruct"  # Sec. 4.3; a hub id, or a folder
    # Silent; 256 to 2,048 visual tokens an image, as in lmms-eval.
    c.model.min_pixels = 256 * 28 * 28
    c.model.max_pixels = 2048 * 28 * 28

    c.data.context_limit = 4096  # silent; leaves as many ids besides the largest image

    c.policy.max_steps = config_dict.placeholder(int)  # T_max, Sec. 4.1: floor(N / 2), by image

    c.eval.benchmarks = "mmbench,mme,pope,scienceqa,textvqa"  # Table 2
    c.eval.textvqa_ocr = False  # silent; the usual figure of this model is without them
    c.eval.budgets = ("1/3", "2/9", "1/9")  # Table 2: rates 66.7, 77.8 and 88.9 %
    return c
