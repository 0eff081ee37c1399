r"""The small LLaVA of the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m experiments.shapes --out data/pretrain_shapes576 --train 24000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --side 336 --grid 24
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes576.py \
        --workdir runs/pretrain576

Some 30 million weights; meant for an accelerator. What is not said here is as in the
defaults of the settings.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings."""
    return Pretraining().replace(
        {
            "data.folder": "data/pretrain_shapes576",
            "model.image_size": 336,
            "model.patch_size": 14,
            "model.vision_width": 384,
            "model.vision_mlp": 2304,
            "model.vision_layers": 6,
            "model.text_width": 384,
            "model.text_mlp": 1536,
            "model.text_layers": 6,
            "model.text_heads": 6,
            "tower.lr": 6e-4,
            "language.lr": 6e-4,
            "language.kept": (8, 16, 32, 64, 128, 256),
        }
    )
