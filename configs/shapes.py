"""StepPrune on the shapes world: a small frozen LLaVA, one-word answers, 144 visual tokens.

    python -m experiments.shapes --out data/shapes
    python train.py --config configs/shapes.py --workdir runs/shapes
    python eval.py --config configs/shapes.py --workdir runs/shapes

`configs/shapes.py:literal` follows the paper to the letter. Set the groups `model` and `data` for
another model or other data: any folder in LLaVA's format.
"""

from ml_collections import ConfigDict, config_dict

from stepprune_jax.benchmarks import BENCHMARKS


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of the shapes world.

    Args:
        arg: reading of the paper, "literal" or nothing.
    """
    if arg not in ("", "default", "literal"):
        raise ValueError(
            f"the argument of shapes is {arg!r}, expected shapes:literal or shapes alone"
        )
    literal = arg == "literal"
    c = ConfigDict()
    c.method = "stepprune"  # or "autoselect"
    c.seed = 0
    c.steps = 500
    c.batch_size = 32
    # Share of the steps over which the text gate opens. A policy that cannot read the question yet
    # learns that some tokens matter for any question, and some runs never unlearn it
    # (experiments/RESULTS.md).
    c.text_gate_anneal = 1.0 if literal else 0.0
    c.cpu_devices = 2  # CPU devices, if jax sees no others; 0 leaves their number to jax
    c.mesh = "data"  # a preset of stepprune_jax.parallel.sharding.build_mesh, or "data=2,tensor=4"
    c.log_every = 10
    c.checkpoint_every = 100
    c.keep_checkpoints = 2
    c.max_skipped = 10  # updates in a row without finite loss and gradient before the run stops
    c.tensorboard = False
    c.wandb = ""  # a project of Weights & Biases

    c.model = ConfigDict()
    c.model.folder = "shapes"  # shipped; or a folder, or a hub id
    c.model.vision_folder = ""  # original LLaVA layout only: the CLIP folder
    c.model.dtype = "float32"
    c.model.attention = "matmul"
    c.model.remat = False
    c.model.rows_at_once = 4  # rows per pass of the frozen model on each device; 0: all

    c.data = ConfigDict()  # docs/training.md
    c.data.folder = "data/shapes"
    c.data.train_file = ""  # empty: train.json of the folder
    c.data.image_folder = ""  # empty: images/ of the folder
    c.data.linked_folders = ()  # folders that links in the image folder may lead to
    c.data.index_folder = ""  # for token counts; empty: the folder of the run
    c.data.missing = "stop"  # or "skip" samples whose image is missing or damaged
    c.data.unusable = "stop"  # or "skip" samples that cannot be trained on
    c.data.split_turns = True  # each question of a conversation is a separate sample
    c.data.stats_images = 1000  # images for the statistics of the features; 0: raw features
    c.data.length_multiple = 8  # ids are padded to a multiple; each width is one program
    c.data.length_group = 1  # batches whose rows are sorted by length together; 1: none
    c.data.context_limit = 2048
    c.data.policy_text_limit = 512  # tokens of the user's words that the policy sees
    c.data.cache_gb = 2.0
    c.data.threads = 2  # threads that build batches
    c.data.workers = 0  # processes that build batches, instead of threads

    c.policy = ConfigDict()  # stepprune_jax.policy.PolicyConfig; docs/paper.md
    c.policy.width = 64
    c.policy.num_heads = 4
    c.policy.mlp_ratio = 4
    c.policy.encoder_layers = 2
    c.policy.decoder_layers = 1
    c.policy.encoder_attention = "bidirectional"
    c.policy.text = True  # whether the policy reads the question
    c.policy.text_gate = "printed" if literal else "attention"
    c.policy.max_steps = config_dict.placeholder(int)  # T_max; empty: half of the tokens
    c.policy.min_tokens = 0 if literal else 1
    c.policy.temperature = 1.0
    c.policy.group = 1  # tokens taken from one pointer distribution
    c.policy.stop = "softmax" if literal else "hazard"
    c.policy.stop_temperature = 0.5
    c.policy.stop_bias = 0.0 if literal else -1.0
    c.policy.estimator = "straight_through" if literal else "parallel"
    c.policy.decay = 0.9
    c.policy.aggregation = "discounted"
    c.policy.score_space = "linear" if literal else "log"
    c.policy.polarisation_temperature = 0.05 if literal else 0.4
    c.policy.polarisation_share = 0.0 if literal else 0.9
    c.policy.soft_budget = "batch_mean" if literal else "straight_through"
    c.policy.batch_budget = "own" if literal else "probe"
    c.policy.gate = "vp"
    c.policy.length_weight = 0.01 if literal else 0.15
    c.policy.price_range = 0.0 if literal else 2.0
    c.policy.price_growth = 0.0 if literal else 1.0
    c.policy.dtype = config_dict.placeholder(str)

    c.autoselect = ConfigDict()  # the one-shot baseline, with more weights than the policy
    c.autoselect.text = True  # AutoSelect itself reads the image only
    c.autoselect.width = 64
    c.autoselect.num_heads = 4
    c.autoselect.mlp_ratio = 4
    c.autoselect.encoder_layers = 4
    c.autoselect.temperature_start = 2.0
    c.autoselect.temperature_end = 0.4
    c.autoselect.temperature_steps = 0.9  # share of the steps over which the temperature falls
    c.autoselect.random_budget = (0.02, 0.5)
    c.autoselect.dtype = config_dict.placeholder(str)

    c.optimizer = ConfigDict()
    c.optimizer.lr = 1e-3
    c.optimizer.final_lr = 1e-4
    c.optimizer.warmup = 40
    c.optimizer.weight_decay = 1e-4
    c.optimizer.clip = 1.0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    # Peak learning rate of Muon, for matrices; 0: AdamW for all weights, as in the paper.
    c.optimizer.muon_lr = 0.0 if literal else 0.015

    c.accelerator = ConfigDict()  # read by --dry_run only
    c.accelerator.name = "rtx-a6000"  # a name of stepprune_jax.parallel.accelerators
    c.accelerator.count = 1  # devices to plan for, if jax sees no accelerators
    c.accelerator.utilisation = 0.4  # assumed share of the peak

    c.validation = ConfigDict()  # validation during training
    c.validation.every = 0  # updates between validations; 0: none
    c.validation.folder = ""  # with validation.jsonl, ..._answers.jsonl, images/; empty: data's
    c.validation.questions = 64
    c.validation.budget = 0  # tokens to keep; 0: the policy decides
    c.validation.max_new_tokens = 3
    c.validation.overlays = 4  # questions whose selections are drawn
    c.validation.calibrate = 256  # questions to calibrate the stop on at the end; 0: none

    c.eval = ConfigDict()  # read by eval.py; docs/evaluation.md
    c.eval.benchmarks = "folder"  # that of data; or public ones, such as "pope,mme"
    c.eval.data = "playground/data/eval"  # root of LLaVA's folders, for public benchmarks
    c.eval.questions = ConfigDict({name: "" for name in BENCHMARKS})  # files of other splits
    c.eval.textvqa_ocr = True  # OCR tokens in TextVQA's prompts
    c.eval.methods = ""  # rows, such as "all,grid,stepprune"; empty: all
    c.eval.options = ""  # options of pruners, such as "fastv layer=3 average=False; holov crops=8"
    c.eval.positions = "original"  # or "compact", or "own", as in each method's program
    c.eval.max_new_tokens = config_dict.placeholder(int)  # empty: the benchmark's own limit
    c.eval.budgets = (48, 32, 16)
    c.eval.batch_size = 32
    c.eval.rows = ConfigDict()  # policy files of trained rows, by name of the row
    c.eval.rows["AutoSelect-like"] = "experiments/policies/autoselect.safetensors"
    c.eval.rows["StepPrune literal"] = "experiments/policies/literal.safetensors"
    return c
