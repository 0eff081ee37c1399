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

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration; takes no argument."""
    if arg:
        raise ValueError(f"pretrain_shapes takes no argument, got {arg!r}")
    c = ConfigDict()
    c.method = "pretrain"
    c.seed = 0
    c.init = ""  # model folder to start from, instead of random weights
    c.micro_batch = 8
    c.cpu_devices = 2  # CPU devices, each with its own rows; 0 leaves their number to jax
    c.log_every = 20
    c.checkpoint_every = 200
    c.dtype = "float16"  # dtype of the saved weights

    c.data = ConfigDict()
    c.data.folder = "data/pretrain_shapes"

    c.model = ConfigDict()
    c.model.image_size = 96
    c.model.patch_size = 8
    c.model.vision_width = 128
    c.model.vision_mlp = 384
    c.model.vision_layers = 4
    c.model.vision_heads = 8
    c.model.feature_layer = -1
    c.model.text_width = 128
    c.model.text_mlp = 344
    c.model.text_layers = 4
    c.model.text_heads = 8
    c.model.rope_theta = 1e6  # slow, to match the contents of patches at any distance

    c.tower = ConfigDict()
    c.tower.steps = 800
    c.tower.batch_size = 64
    c.tower.lr = 1.5e-3
    c.tower.muon_lr = 0.02  # learning rate of Muon, for matrices; 0: AdamW for all weights

    c.language = ConfigDict()
    c.language.steps = 4000
    c.language.whole_steps = 2200  # steps before images are thinned
    c.language.batch_size = 32
    c.language.lr = 2e-3
    c.language.muon_lr = 0.02
    c.language.thinned_share = 0.75
    c.language.kept = (2, 4, 8, 16, 32, 48, 64)
    c.language.taste = 2.0  # how strongly the choice depends on the contents of patches
    c.language.train_tower = False

    c.noise = ConfigDict()  # every other step, most tokens are replaced by noise
    c.noise.steps = 1200
    c.noise.batch_size = 32
    c.noise.lr = 1e-3
    c.noise.muon_lr = 0.01
    c.noise.thinned_share = 0.5  # share of the other steps with thinned images
    c.noise.taste = 4.0
    return c
