r"""A small Qwen2.5-VL of the shapes world, from scratch, on images of three sizes.

    python -m experiments.shapes --out data/pretrain_shapes_qwen --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --sizes 64 88 112
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_qwen.py \
        --workdir runs/pretrain_qwen

The result, runs/pretrain_qwen/model, is a folder as those of the published models: a tower with
windows and a merger, three position ids a token, grouped keys, biases. An image has 64, 121 or 196
visual tokens. What is not said here is as in `experiments/configs/pretrain_shapes.py`.
"""

from pathlib import Path

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration; takes no argument."""
    if arg:
        raise ValueError(
            f"experiments/configs/pretrain_shapes_qwen.py takes no argument, got {arg!r}"
        )
    c = configurations.load(str(Path(__file__).with_name("pretrain_shapes.py")))
    c.data.folder = "data/pretrain_shapes_qwen"

    del c.model.feature_layer
    c.model.family = "qwen2_5_vl"
    c.model.image_size = 112  # larger images are reduced to its area
    c.model.least_size = 64  # smaller ones are enlarged to its area
    c.model.patch_size = 4  # a token is made of 2 x 2
    c.model.vision_width = 64
    c.model.vision_mlp = 160
    c.model.vision_layers = 3
    c.model.vision_heads = 4
    c.model.window_size = 32  # pixels; 4 x 4 tokens, as in the published models
    c.model.full_blocks = (2,)
    c.model.text_heads = 4
    c.model.text_kv_heads = 2
    # Pairs of a head's channels that turn with time, row and column. The base is low: the slow
    # ones, the column's, must tell two of fourteen columns apart.
    c.model.rope_sections = (4, 6, 6)
    c.model.rope_theta = 30.0

    c.language.steps = 3600
    c.language.whole_steps = 2000
    c.language.kept = (4, 16, 48)  # each is a program for each size

    c.noise.steps = 1000
    return c
