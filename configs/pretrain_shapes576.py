r"""The small LLaVA of the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m stepprune_jax.pretrain --config configs/pretrain_shapes576.py \
        --workdir runs/pretrain576

Some 30 million weights; meant for an accelerator.
"""

from ml_collections import ConfigDict

from configs import pretrain_shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/pretrain_shapes.py`, with other sizes; takes no argument."""
    c = pretrain_shapes.get_config(arg)
    c.data.side = 336  # of the pictures, in pixels
    c.data.grid = 24  # patches along an edge

    c.model.image_size = 336
    c.model.patch_size = 14
    c.model.vision_width = c.model.text_width = 384
    c.model.vision_mlp = 2304
    c.model.text_mlp = 1536
    c.model.vision_layers = c.model.text_layers = 6
    c.model.vision_heads = 8
    c.model.text_heads = 6

    c.tower.lr = c.language.lr = 6e-4
    c.language.kept = (8, 16, 32, 64, 128, 256)
    return c
