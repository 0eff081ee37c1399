r"""A small Qwen2.5-VL of the shapes world, from scratch, on images of three sizes.

    python -m experiments.shapes --out data/pretrain_shapes_qwen --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --sizes 64 88 112
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_qwen.py \
        --workdir runs/pretrain_qwen

The result, runs/pretrain_qwen/model, has the layout of the published models: a tower with windows
and a merger, three position ids per token, grouped keys, and biases. An image has 64, 121 or 196
visual tokens. All other settings are the defaults.
"""

from experiments.pretrain.settings import Pretraining, ShapeSettings


def get_config() -> Pretraining:
    """Returns the settings."""
    model = ShapeSettings(
        family="qwen2_5_vl",
        feature_layer=None,
        image_size=112,  # Larger images are reduced to this area.
        least_size=64,  # Smaller images are enlarged to this area.
        patch_size=4,  # A token is made of 2 x 2 patches.
        vision_width=64,
        vision_mlp=160,
        vision_layers=3,
        vision_heads=4,
        window_size=32,  # Pixels: 4 x 4 tokens, as in the published models.
        full_blocks=(2,),
        text_heads=4,
        text_kv_heads=2,
        # Channel pairs of a head for time, row and column. The base is low because the slowest
        # rotations, which encode the column, must distinguish 14 columns.
        rope_sections=(4, 6, 6),
        rope_theta=30.0,
    )
    return Pretraining().replace(
        {
            "data.folder": "data/pretrain_shapes_qwen",
            "model": model,
            "language.steps": 3600,
            "language.whole_steps": 2000,
            "language.kept": (4, 16, 48),  # Each number needs a program for each size.
            "noise.steps": 1000,
        }
    )
