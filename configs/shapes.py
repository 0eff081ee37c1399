"""StepPrune on the shapes world: a small frozen LLaVA, one-word answers, 144 visual tokens.

    python train.py --config configs/shapes.py --workdir runs/shapes
    python eval.py --config configs/shapes.py --workdir runs/shapes

`configs/shapes.py:literal` reads the paper to the letter. Another model and other data are other
values of `model` and `data`: with `data.name = "folder"` any data in LLaVA's format.
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.policy import PolicyConfig

READINGS = ("", "default", "literal")


def get_config(arg: str = "") -> ConfigDict:
    """The configuration of the shapes world.

    Args:
        arg: reading of the paper, "literal" or nothing.

    Returns:
        The configuration.
    """
    check_reading("shapes", arg)
    c = ConfigDict()
    c.method = "stepprune"  # or "autoselect"
    c.seed = 0
    c.steps = 500
    c.batch_size = 32
    # Share of the steps over which the text gate opens. Open from the start it is never learned
    # that some things are worth a look whatever is asked: docs/experiments.md.
    c.text_gate_anneal = 0.1 if arg == "literal" else 0.0
    c.cpu_devices = 2  # cores, each a device, where jax sees no others; 0 leaves it to jax
    c.mesh = "data"  # a preset of stepprune_jax.parallel.sharding.build_mesh, or "data=2,tensor=4"
    c.log_every = 10
    c.checkpoint_every = 100
    c.keep_checkpoints = 2
    c.max_skipped = 10  # updates in a row without finite loss and gradient before the run stops
    c.tensorboard = False
    c.wandb = ""  # a project of Weights & Biases

    c.model = ConfigDict()
    c.model.folder = ""  # or a hub id; empty: the small LLaVA of the shapes world
    c.model.vision_folder = ""  # original LLaVA layout only: the CLIP folder
    c.model.dtype = "float32"
    c.model.attention = "matmul"
    c.model.remat = False
    c.model.rows_at_once = 4  # of the frozen model on each device; 0 for all of them

    c.data = data_fields()
    c.policy = policy_fields(arg)
    c.autoselect = autoselect_fields()

    c.optimizer = ConfigDict()
    c.optimizer.lr = 1e-3
    c.optimizer.final_lr = 1e-4
    c.optimizer.warmup = 40
    c.optimizer.weight_decay = 1e-4
    c.optimizer.clip = 1.0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    # Of Muon, for matrices; 0: AdamW for all weights, as in the paper.
    c.optimizer.muon_lr = 0.0 if arg == "literal" else 0.015

    c.accelerator = ConfigDict()  # read by --dry_run alone
    c.accelerator.name = "rtx-a6000"  # of stepprune_jax.parallel.accelerators
    c.accelerator.count = 1  # devices to plan for, where jax sees no accelerators
    c.accelerator.utilisation = 0.4  # share of the peak that is assumed

    c.validation = validation_fields()

    c.eval = eval_fields()
    return c


def check_reading(name: str, arg: str) -> None:
    """Refuses an argument of a configuration that is no reading of the paper."""
    if arg not in READINGS:
        raise ValueError(f"configs/{name}.py:{arg}: expected configs/{name}.py:literal or no :")


def eval_fields() -> ConfigDict:
    """What `eval.py` reads and answers: docs/evaluation.md."""
    c = ConfigDict()
    c.benchmarks = "shapes"  # or public ones, as "pope,mme"
    c.data = "playground/data/eval"  # root of LLaVA's folders, for public benchmarks
    c.questions = ConfigDict({name: "" for name in BENCHMARKS})  # files of other splits
    c.textvqa_ocr = True  # OCR tokens in TextVQA's prompts
    c.methods = ""  # rows on public benchmarks, as "all tokens,StepPrune"; all without any
    c.max_new_tokens = config_dict.placeholder(int)  # without one, as the benchmark has it
    c.budgets = (48, 32, 16)
    c.batch_size = 32
    c.rows = ConfigDict()  # rows trained beforehand, by name: policy files of the package
    c.rows["AutoSelect-like"] = "assets/policies/autoselect.safetensors"
    c.rows["StepPrune literal"] = "assets/policies/literal.safetensors"
    return c


def data_fields() -> ConfigDict:
    """Where the data are, and how batches are made of them: docs/training-data.md."""
    c = ConfigDict()
    c.name = "shapes"  # or "folder"
    c.folder = ""  # empty: workdir/data, written on first use
    c.train_file = ""  # empty: train.json of the folder
    c.image_folder = ""  # empty: images/ of the folder
    c.linked_folders = ()  # folders that links in the image folder may lead to
    c.index_folder = ""  # for the counts of tokens; empty: the run's own folder
    c.missing = "stop"  # or "skip": leave out samples whose picture is missing or damaged
    c.unusable = "stop"  # or "skip": leave out samples that cannot be trained on
    c.train_scenes = 3000
    c.validation_scenes = 150
    c.test_scenes = 520
    c.seed = 0
    c.test_seed = config_dict.placeholder(int)
    c.split_turns = True  # each question of a conversation is a sample of its own
    c.stats_images = 1000  # pictures for the statistics of the features
    c.length_multiple = 8  # ids are padded to a multiple; each width is one program
    c.length_group = 1  # batches whose rows are sorted by length together; 1: none
    c.context_limit = 2048
    c.policy_text_limit = 512  # tokens of the user's words that the policy sees
    c.cache_gb = 2.0
    c.threads = 2  # that make batches
    c.workers = 0  # processes that make batches, instead of threads
    return c


def validation_fields() -> ConfigDict:
    """Questions that are asked while a policy is trained."""
    c = ConfigDict()
    c.every = 0  # updates between them; 0: none
    c.folder = ""  # with validation.jsonl, validation_answers.jsonl, images/; empty: the data's
    c.questions = 64
    c.budget = 0  # tokens to keep; 0: where the policy stops
    c.max_new_tokens = 3
    c.overlays = 4  # questions of which a picture is drawn
    return c


def policy_fields(reading: str) -> ConfigDict:
    """Every field of `PolicyConfig` but the widths that the model has."""
    size = {"width": 64, "num_heads": 4, "decoder_layers": 1}
    if reading == "literal":
        shape = PolicyConfig.literal(**size)
    else:
        shape = PolicyConfig(
            **size, stop="hazard", batch_budget="probe", probe_window=0.25,
            random_budget=(0.02, 0.5), price_range=2.0, price_growth=1.0, length_weight=0.3,
            min_tokens=8, polarisation_temperature=0.4, polarisation_share=0.9,
        )  # fmt: skip
    fields = dataclasses.asdict(shape)
    for name in ("feature_width", "text_width"):
        del fields[name]
    # Fields that may be None keep their type, so that flags can set them.
    fields["max_steps"] = config_dict.placeholder(int)
    fields["dtype"] = config_dict.placeholder(str)
    return ConfigDict({k: float(v) if k in _NUMBERS else v for k, v in fields.items()})


_NUMBERS = (
    "temperature", "stop_temperature", "stop_bias", "decay", "polarisation_temperature",
    "length_weight", "price_range", "price_growth", "probe_window", "probe_weight", "gain_bound",
    "polarisation_start", "polarisation_share",
)  # fmt: skip


def autoselect_fields() -> ConfigDict:
    """The one-shot rival, as large as the policy's encoder."""
    c = ConfigDict()
    c.width = 64
    c.num_heads = 4
    c.mlp_ratio = 4
    c.encoder_layers = 2
    c.temperature_start = 2.0
    c.temperature_end = 0.4
    c.temperature_steps = 0.9  # share of the steps over which it falls
    c.random_budget = (0.08, 0.36)
    c.dtype = config_dict.placeholder(str)
    return c
