"""The small LLaVA of the shapes world, trained further on easy-VQA: docs/your-own-data.md.

    python -m stepprune_jax.data.easy_vqa --source FOLDER --out data/easy_vqa
    python -m stepprune_jax.pretrain --config configs/pretrain_easyvqa.py

The result is runs/pretrain_easyvqa/model.
"""

from pathlib import Path

from ml_collections import ConfigDict

import stepprune_jax


def get_config() -> ConfigDict:
    """Returns the configuration."""
    c = ConfigDict()
    c.method = "pretrain"
    c.seed = 0
    # The model to start from: the shipped one of the shapes world.
    c.init = str(Path(stepprune_jax.__file__).parent / "assets" / "shapes_llava")
    c.micro_batch = 8
    c.cpu_devices = 2  # CPU devices, each with its own rows; 0 leaves their number to jax
    c.log_every = 20
    c.checkpoint_every = 200
    c.dtype = "float16"  # dtype of the saved weights

    c.data = ConfigDict()
    c.data.folder = "data/easy_vqa"
    c.data.train_scenes = 24000  # for the shapes world, as the next two fields: not read here
    c.data.seed = 1000
    c.data.emphasis = 2.0

    c.model = ConfigDict()  # as in the initial model
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
    c.tower.steps = 0  # the data have no patch labels
    c.tower.batch_size = 64
    c.tower.lr = 1.5e-3
    c.tower.muon_lr = 0.02  # learning rate of Muon, for matrices; 0: AdamW for all weights

    c.language = ConfigDict()
    c.language.steps = 500
    c.language.whole_steps = 250  # steps before images are thinned
    c.language.batch_size = 32
    c.language.lr = 1e-3
    c.language.muon_lr = 0.01
    c.language.thinned_share = 0.75
    c.language.kept = (2, 4, 8, 16, 32, 48, 64)
    c.language.taste = 2.0  # how strongly the choice depends on the contents of patches
    c.language.train_tower = True

    c.noise = ConfigDict()  # every other step, most tokens are replaced by noise
    c.noise.steps = 200
    c.noise.batch_size = 32
    c.noise.lr = 1e-3
    c.noise.muon_lr = 0.01
    c.noise.thinned_share = 0.5  # share of the other steps with thinned images
    c.noise.taste = 4.0
    return c
