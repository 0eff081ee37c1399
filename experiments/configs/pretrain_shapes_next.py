r"""A small LLaVA-NeXT of the shapes world: the shipped small LLaVA, taught to read tiles.

    python -m experiments.shapes --out data/pretrain_shapes_next --train 14000 --validation 0 \
        --test 0 --seed 1000 --emphasis 1.5 --level 3
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_next.py

The result is runs/pretrain_shapes_next/model. An image of 192 x 192 pixels has 744 visual tokens:
144 of the whole image, 144 of each of 2 x 2 tiles, and 24 ends of rows. The tower stays as it is,
so small shapes are legible in the tiles alone. What is not said here is as in the defaults of the
settings.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings."""
    return Pretraining().replace(
        {
            "init": "stepprune_jax/assets/shapes_llava",
            "micro_batch": 2,  # on a CPU faster than larger pieces
            "data.folder": "data/pretrain_shapes_next",
            "model.family": "llava_next",
            "model.tiles": 2,
            "tower.steps": 0,
            "language.steps": 160,
            "language.batch_size": 8,
            "language.whole_steps": 12,
            "language.thinned_share": 0.8,
            "language.lr": 1e-3,
            "language.muon_lr": 0.01,
            "language.kept": (64,),
            "noise.steps": 0,
        }
    )
