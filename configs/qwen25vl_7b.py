"""StepPrune on Qwen2.5-VL-7B: `configs/llava7b.py` with another model.

    python train.py --config configs/qwen25vl_7b.py --workdir runs/qwen25vl_7b --dry_run
    python train.py --config configs/qwen25vl_7b.py --workdir runs/qwen25vl_7b

The paper runs "the same protocol" on this model (Sec. 4.3). The comment after a value gives its
source: a section of the paper, or "silent" if the paper has no such value. `configs/llava7b.py` has
the sources of values that are not here. `configs/qwen25vl_7b.py:literal` follows the paper to the
letter. No run of this configuration has been made yet.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config(reading: str = "") -> Run:
    """Returns the settings of `configs/llava7b.py` with Qwen2.5-VL-7B."""
    run = configurations.load(f"llava7b:{reading}")
    return run.replace(
        {
            "model.folder": "Qwen/Qwen2.5-VL-7B-Instruct",  # Sec. 4.3; a hub id, or a folder
            # Silent; 256 to 2,048 visual tokens an image, as in lmms-eval.
            "model.min_pixels": 256 * 28 * 28,
            "model.max_pixels": 2048 * 28 * 28,
            "data.context_limit": 4096,  # silent; leaves 2,048 ids besides the largest image
            "policy.max_steps": None,  # T_max, Sec. 4.1: floor(N / 2), by image
            "eval.benchmarks": "mmbench,mme,pope,scienceqa,textvqa",  # Table 2
            "eval.textvqa_ocr": False,  # silent; the usual figures are without OCR tokens
            "eval.budgets": ("1/3", "2/9", "1/9"),  # Table 2: rates 66.7, 77.8 and 88.9 %
        }
    )
