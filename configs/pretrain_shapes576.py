r"""The small LLaVA of the shapes world at the resolution of LLaVA-1.5: 576 visual tokens.

    python -m stepprune_jax.pretrain --config configs/pretrain_shapes576.py \
        --workdir runs/pretrain576

Some 30 million weights; meant for an accelerator. All values but sizes and rates are those of
`configs/pretrain_shapes.py`.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration; takes no argument."""
    if arg:
        raise ValueError(f"configs/pretrain_shapes576.py takes no argument, got {arg!r}")
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
    c.data.folder = ""  # empty: the shapes world, written to workdir/data
    c.data.train_scenes = 24000
    c.data.seed = 1000  # different from that of any other split
    c.data.side = 336  # height and width of the images in pixels
    c.data.grid = 24  # patches along an edge
    c.data.emphasis = 2.0  # factor on the question families that are learned last

    c.model = ConfigDict()
    c.model.image_size = 336
    c.model.patch_size = 14
    c.model.vision_width = 384
    c.model.vision_mlp = 2304
    c.model.vision_layers = 6
    c.model.vision_heads = 8
    c.model.feature_layer = -1
    c.model.text_width = 384
    c.model.text_mlp = 1536
    c.model.text_layers = 6
    c.model.text_heads = 6
    c.model.rope_theta = 1e6  # slow, to match the contents of patches at any distance

    c.tower = ConfigDict()
    c.tower.steps = 800
    c.tower.batch_size = 64
    c.tower.lr = 6e-4
    c.tower.muon_lr = 0.02  # learning rate of Muon, for matrices; 0: AdamW for all weights

    c.language = ConfigDict()
    c.language.steps = 4000
    c.language.whole_steps = 2200  # steps before images are thinned
    c.language.batch_size = 32
    c.language.lr = 6e-4
    c.language.muon_lr = 0.02
    c.language.thinned_share = 0.75
    c.language.kept = (8, 16, 32, 64, 128, 256)
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
