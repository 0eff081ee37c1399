"""StepPrune on LLaVA-v1.5-7B, with LLaVA's own instruction data.

    python train.py --config configs/llava7b.py --workdir runs/llava7b --dry_run
    python train.py --config configs/llava7b.py --workdir runs/llava7b

The comment after a value gives its source in the paper, or "silent" if the paper has no such value.
All other values are the defaults of the settings. docs/paper.md says where the defaults differ from
the paper. The arguments are:

* none: the recipe "auto" with 25,600 questions. If a trial helps, the first 640 updates are the
  warm start, which trains the policy with the gradient of the frozen model. All other updates are
  RLOO on sampled subsets, which is better than the gate at all budgets in the small world.
* `:short`: 1,250 updates through the gate, 2.1 hours. Rate x updates x width is the product that
  teaches a policy in the small world with AdamW.
* `:gate`: one epoch through the gate, as in the paper, with our defaults: 67 hours on two A6000 by
  the dry run.
* `:literal`: the same with the paper's values to the letter.
* `:causal`, `:last`, `:uniform`, `:alive`: ablations of Table 4, also with `:literal,causal` and so
  on.

`configs/rloo.py:llava7b` uses only RLOO, 4.4 hours. No run of this configuration has been made.
"""

from stepprune_jax import training
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig

# Fields of the policy by row of Table 4. Rows of the table that are not here are the defaults.
ABLATIONS = {
    "causal": {"encoder_attention": "causal"},
    "last": {"aggregation": "last"},
    "uniform": {"aggregation": "uniform"},
    "alive": {"aggregation": "alive"},
}


def get_config(argument: str = "") -> training.Run:
    """Returns the settings of a run; the argument is described in the module's docstring."""
    names = [name for name in argument.split(",") if name]
    ablations, is_literal = [name for name in names if name in ABLATIONS], "literal" in names
    is_short = "short" in names or not names
    if not {*names} <= {"gate", "literal", "short", *ABLATIONS} or len(ablations) > 1:
        expected = (
            f"literal, short, gate, one of {', '.join(ABLATIONS)}, or several, such as literal,last"
        )
        raise ValueError(f"the argument of llava7b is {argument!r}, expected {expected}")
    policy = PolicyConfig.literal if is_literal else PolicyConfig
    shape = {"width": 1024, "num_heads": 16}  # D, Sec. 3.1; heads: silent, as in the tower
    return training.Run(
        recipe="gate" if names else "auto",
        # Silent: one epoch of the 625,000 samples with an image, or 20,000 of them.
        steps=1600 if not names else 1250 if is_short else 39000,
        batch_size=16,  # Sec. 4.1, "effective global batch size"
        text_gate_anneal=1.0 if is_literal else 0.0,  # Sec. 3.2 and 4.1 anneal it
        mesh="data",  # Sec. 4.1: two devices, each with all of the model
        log_every=50,
        checkpoint_every=1000,
        model=training.ModelSettings(
            folder="llava-hf/llava-1.5-7b-hf",  # Sec. 4.1; a hub id, or a folder
            dtype="bfloat16",  # silent: of the frozen weights; the policy is float32
            remat=True,  # memory
            rows_at_once=1,  # memory: eight passes for the batch of 16 on two devices
        ),
        data=training.DataSettings(
            # Silent: LLaVA's own, where its instructions put them below the working directory.
            train_file="playground/data/llava_v1_5_mix665k.json",
            image_folder="playground/data",
            unusable="skip",
            split_turns=False,  # silent: a question follows the conversation so far
            length_multiple=128,  # speed: each width is one program
            length_group=100,
            threads=8,
        ),
        policy=policy(
            max_steps=288,  # T_max, Sec. 4.1
            dtype="float32",
            # Sec. 3.2: one. Four need fewer kernels (docs/devices.md), and cost the small world no
            # accuracy at the eighth part of its tokens or less (experiments/RESULTS.md).
            group=1 if names else 4,
            **shape,
            **(ABLATIONS[ablations[0]] if ablations else {}),
        ),
        autoselect=AutoSelectConfig(**shape),
        optimizer=training.OptimizerSettings(
            lr=5e-5 if is_short else 5e-6,  # Sec. 4.1
            final_lr=5e-6 if is_short else 5e-7,  # Sec. 4.1; cosine
            warmup=0 if is_literal else 40,  # silent
            muon_lr=0.0,  # Sec. 4.1: AdamW
        ),
        accelerator=training.AcceleratorSettings(count=2),  # Sec. 4.1: two RTX A6000
        eval=training.EvalSettings(
            benchmarks="gqa,mmbench,mmbench_cn,mme,pope,scienceqa,vqav2,textvqa",  # Table 1
            budgets=(192, 128, 64),  # Table 1
            batch_size=1,  # silent: as in LLaVA's own programs
        ),
    )
