r"""The small LLaVA of the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m experiments.shapes --out data/pretrain_shapes576 --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --side 336 --grid 24
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes576.py \
        --workdir runs/pretrain576

Some 30 million weights; meant for an accelerator. What is not said here is as in
`experiments/configs/pretrain_shapes.py`.
"""

from pathlib import Path

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration; takes no argument."""
    if arg:
        raise ValueError(
            f"experiments/configs/pretrain_shapes576.py takes no argument, got {arg!r}"
        )
    c = configurations.load(str(Path(__file__).with_name("pretrain_shapes.py")))
    c.data.folder = "data/pretrain_shapes576"

    c.model.image_size = 336
    c.model.patch_size = 14
    c.model.vision_width = 384
    c.model.vision_mlp = 2304
    c.model.vision_layers = 6
    c.model.text_width = 384
    c.model.text_mlp = 1536
    c.model.text_layers = 6
    c.model.text_heads = 6

    c.tower.lr = 6e-4

    c.language.lr = 6e-4
    c.language.kept = (8, 16, 32, 64, 128, 256)
    return c
