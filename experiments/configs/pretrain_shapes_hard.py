r"""The small LLaVA of the second level of the shapes world, from scratch: 256 visual tokens.

    python -m experiments.shapes --out data/pretrain_shapes_hard --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --level 2
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_hard.py

The result is runs/pretrain_shapes_hard/model. A question of three steps passes from shape to shape
through the layers of the language model, which is therefore deep and narrow: each step takes two of
them, one to read where the last led and one to look there. What is not said here is as in
`experiments/configs/pretrain_shapes.py`.
"""

from pathlib import Path

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration; takes no argument."""
    if arg:
        raise ValueError(
            f"experiments/configs/pretrain_shapes_hard.py takes no argument, got {arg!r}"
        )
    c = configurations.load(str(Path(__file__).with_name("pretrain_shapes.py")))
    c.micro_batch = 2  # on a CPU faster than larger pieces
    c.data.folder = "data/pretrain_shapes_hard"

    c.model.image_size = 160
    c.model.patch_size = 10  # one shape or none
    c.model.text_width = 96
    c.model.text_mlp = 256
    c.model.text_layers = 12
    c.model.text_heads = 6

    c.tower.steps = 300

    c.language.steps = 3200
    c.language.whole_steps = 2400
    c.language.thinned_share = 0.5
    c.language.filled = 40  # every shape, and empty patches where there are fewer
    c.language.lr = 1.5e-3
    c.language.muon_lr = 0.015
    c.language.kept = (2, 4, 8, 16, 32, 64)

    c.noise.steps = 800
    c.noise.thinned_share = 0.25
    c.noise.lr = 5e-4
    c.noise.muon_lr = 0.005
    return c
