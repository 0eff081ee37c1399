r"""The small LLaVA of the shapes world, from scratch.

    python -m experiments.shapes --out data/pretrain_shapes --train 24000 --validation 0 --test 0 \
        --seed 1000 --emphasis 2 --patches
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes.py \
        --workdir runs/pretrain

The seed of the scenes is that of no other split; families of questions that are learned last are
twice as frequent. The result, runs/pretrain/model, is a folder in the Hugging Face layout. It can
be trained on any data in LLaVA's format; without patch labels (`train_patches.npz`) the tower has
no separate stage, so set `language.train_tower`.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings, whose defaults are those of this run."""
    return Pretraining()
