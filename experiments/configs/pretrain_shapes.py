r"""The small LLaVA of the shapes world, from scratch.

    python -m experiments.shapes --out data/pretrain_shapes --train 24000 --validation 0 --test 0 \
        --seed 1000 --emphasis 2 --patches
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes.py \
        --workdir runs/pretrain

No other split has this seed. Slowly learned families of questions are twice as frequent. The
result, runs/pretrain/model, is a folder in the Hugging Face layout. Any data in LLaVA's format can
be used. Without patch labels (`train_patches.npz`), no separate stage trains the tower:
set `language.train_tower`.
"""

from experiments.pretrain.settings import Pretraining


def get_config() -> Pretraining:
    """Returns the settings of this run, which are the defaults."""
    return Pretraining()
