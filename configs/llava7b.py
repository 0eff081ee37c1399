"""StepPrune on LLaVA-v1.5-7B, with LLaVA's own instruction data.

    python train.py --config configs/llava7b.py --workdir runs/llava7b --dry_run
    python train.py --config configs/llava7b.py --workdir runs/llava7b

`configs/llava7b.py:literal` reads the paper to the letter. Behind a value stands where it is from:
a section of the paper; "silent" where the paper gives none, and the value is that of
`configs/shapes.py` or ours; "changed" where the paper says something else that does not learn in
the shapes world (docs/paper.md), and `literal` has the paper's. Every field that is not set here
is as in `configs/shapes.py`. No run of this configuration has been made yet.

The data are read where LLaVA's instructions put them, below the working directory:
playground/data/llava_v1_5_mix665k.json and its folders of pictures beside it.
"""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """The paper's run.

    Args:
        arg: reading of the paper, "literal" or nothing.

    Returns:
        The configuration.
    """
    shapes.check_reading("llava7b", arg)
    literal = arg == "literal"
    c = shapes.get_config(arg)
    c.steps = 39000  # silent; once through the 625,000 samples with a picture
    c.batch_size = 16  # Sec. 4.1, "effective global batch size"
    c.text_gate_anneal = 0.0  # changed; Sec. 3.2, "during early training"
    if literal:
        c.text_gate_anneal = 1.0  # Sec. 4.1, "over the course of training"
    c.cpu_devices = 0
    c.mesh = "data"  # Sec. 4.1: two devices, each with the whole model
    c.log_every = 50
    c.checkpoint_every = 1000

    c.model.folder = "llava-hf/llava-1.5-7b-hf"  # Sec. 4.1; a hub id, or a folder
    c.model.dtype = "bfloat16"  # silent; of the frozen weights, the policy is float32
    c.model.remat = True  # memory only
    c.model.rows_at_once = 1  # memory only: eight passes for the batch of 16 on two devices

    c.data.name = "folder"  # silent; the data that the model was tuned on
    c.data.train_file = "playground/data/llava_v1_5_mix665k.json"
    c.data.image_folder = "playground/data"
    c.data.unusable = "skip"  # silent
    c.data.split_turns = False  # silent; whole conversations, as LLaVA's own training has them
    c.data.length_multiple = 128
    c.data.length_group = 100
    c.data.threads = 8

    c.optimizer.lr = 5e-6  # Sec. 4.1
    c.optimizer.final_lr = 5e-7  # Sec. 4.1; cosine
    c.optimizer.warmup = 0 if literal else 40  # silent; configs/shapes.py
    c.optimizer.weight_decay = 1e-4  # silent; configs/shapes.py
    c.optimizer.clip = 1.0  # silent; configs/shapes.py
    c.optimizer.b1 = 0.9  # silent; configs/shapes.py
    c.optimizer.b2 = 0.999  # silent; configs/shapes.py
    c.optimizer.muon_lr = 0.0  # Sec. 4.1: AdamW

    set_policy(c.policy, literal)
    c.autoselect.width = 1024
    c.autoselect.num_heads = 16

    c.accelerator.count = 2  # Sec. 4.1: two RTX A6000
    c.eval.benchmarks = "gqa,mmbench,mmbench_cn,mme,pope,scienceqa,vqav2,textvqa"  # Table 1
    c.eval.budgets = (192, 128, 64)  # Table 1
    c.eval.batch_size = 1  # silent; as LLaVA's own programs
    c.eval.rows = ConfigDict()  # none are shipped for this model
    return c


def set_policy(policy: ConfigDict, literal: bool) -> None:
    """Sets what is not as in the shapes world."""
    policy.width = 1024  # D, Sec. 3.1
    policy.num_heads = 16  # silent; as many as the tower has
    policy.encoder_layers = 2  # Sec. 3.2
    policy.decoder_layers = 2  # silent; with one, the printed MLP would have no gradient
    policy.max_steps = 288  # T_max, Sec. 4.1
    policy.decay = 0.9  # beta, Sec. 4.1
    policy.length_weight = 0.01  # lambda, Eq. (15)
    policy.dtype = "float32"  # silent
    if literal:
        return
    # All of these are those of configs/shapes.py.
    policy.text_gate = "attention"  # changed
    policy.min_tokens = 8  # silent
    policy.stop = "hazard"  # changed
    policy.stop_bias = -1.0  # silent
    policy.estimator = "parallel"  # changed
    policy.score_space = "log"  # changed
    policy.temperature = 1.0  # silent
    policy.polarisation_temperature = 0.4  # silent
    policy.polarisation_share = 0.9  # changed
    policy.soft_budget = "straight_through"  # changed
    policy.batch_budget = "probe"  # changed
    policy.probe_window = 0.25  # changed
    policy.random_budget = (0.02, 0.5)  # changed
    policy.price_range = 2.0  # changed
    policy.price_growth = 1.0  # changed; a penalty in K^2
