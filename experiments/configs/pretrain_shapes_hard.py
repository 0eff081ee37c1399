r"""The small LLaVA of the second level of the shapes world, from scratch: 256 visual tokens.

    python -m experiments.shapes --out data/pretrain_shapes_hard --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --level 2
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_hard.py

The result is runs/pretrain_shapes_hard/model. A question of three steps passes from shape to shape
through the layers of the language model, which is therefore deep and narrow: each step takes two of
them, one to read where the last led and one to look there. What is not said here is as in the
defaults of the settings.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings."""
    return Pretraining().replace(
        {
            "micro_batch": 2,  # on a CPU faster than larger pieces
            "data.folder": "data/pretrain_shapes_hard",
            "model.image_size": 160,
            "model.patch_size": 10,  # one shape or none
            "model.text_width": 96,
            "model.text_mlp": 256,
            "model.text_layers": 12,
            "model.text_heads": 6,
            "tower.steps": 300,
            "language.steps": 3200,
            "language.whole_steps": 2400,
            "language.thinned_share": 0.5,
            "language.filled": 40,  # every shape, and empty patches where there are fewer
            "language.lr": 1.5e-3,
            "language.muon_lr": 0.015,
            "language.kept": (2, 4, 8, 16, 32, 64),
            "noise.steps": 400,
            "noise.thinned_share": 0.25,
            "noise.lr": 5e-4,
            "noise.muon_lr": 0.005,
        }
    )
