"""StepPrune on LLaVA-v1.5-7B, with LLaVA's own instruction data.

    python train.py --config configs/llava7b.py --workdir runs/llava7b --dry_run
    python train.py --config configs/llava7b.py --workdir runs/llava7b

The comment after a value is its source in the paper; "silent" where the paper gives none. All other
values are the defaults of the settings; docs/paper.md says where these differ from the paper,
whose values `configs/llava7b.py:literal` has to the letter. `:causal`, `:last`, `:uniform` and
`:alive` are the ablations of Table 4; `:literal,causal` and so on those of the paper's own values.
All of these are one epoch through the gate, as in the paper: 67 hours on two A6000 by the dry run.
`:gate` is that with our defaults. No run of this configuration has been made.

Without an argument, the recipe is "auto": 25,600 questions, on sampled sets if a few random tokens
sometimes suffice for an answer, in which case these are better than the gate at all budgets in the
small world; else through the gate for the first 1,280 updates. `:short` is those alone: the gate
with the rate x updates x width that teaches a policy in the small world with AdamW, 2.1 hours.
`configs/rloo.py:llava7b` is sampled sets whatever a few tokens suffice for, 4.4 hours.
"""

from stepprune_jax import training
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig

# Fields of the policy, by row of Table 4; the others of its rows are the defaults.
ABLATIONS = {
    "causal": {"encoder_attention": "causal"},
    "last": {"aggregation": "last"},
    "uniform": {"aggregation": "uniform"},
    "alive": {"aggregation": "alive"},
}


def get_config(argument: str = "") -> training.Run:
    """Returns the settings that suit any data; or "literal", "short", "gate", an ablation, ..."""
    names = [name for name in argument.split(",") if name]
    rows, literal = [name for name in names if name in ABLATIONS], "literal" in names
    # So that rate x updates x width is that of AdamW in the small world.
    short = "short" in names or not names
    if not {*names} <= {"gate", "literal", "short", *ABLATIONS} or len(rows) > 1:
        known = (
            f"literal, short, gate, one of {', '.join(ABLATIONS)}, or several, such as literal,last"
        )
        raise ValueError(f"the argument of llava7b is {argument!r}, expected {known}")
    policy = PolicyConfig.literal if literal else PolicyConfig
    shape = {"width": 1024, "num_heads": 16}  # D, Sec. 3.1; heads: silent, as in the tower
    return training.Run(
        recipe=None if names else "auto",
        # Silent: one epoch of the 625,000 samples with an image, or 20,000 of them.
        steps=1600 if not names else 1250 if short else 39000,
        batch_size=16,  # Sec. 4.1, "effective global batch size"
        text_gate_anneal=1.0 if literal else 0.0,  # Sec. 3.2 and 4.1 anneal it
        mesh="data",  # Sec. 4.1: two devices, each with the whole model
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
            **shape,
            **(ABLATIONS[rows[0]] if rows else {}),
        ),
        autoselect=AutoSelectConfig(**shape),
        optimizer=training.OptimizerSettings(
            lr=5e-5 if short else 5e-6,  # Sec. 4.1
            final_lr=5e-6 if short else 5e-7,  # Sec. 4.1; cosine
            warmup=0 if literal else 40,  # silent
            muon_lr=0.0,  # Sec. 4.1: AdamW
        ),
        accelerator=training.AcceleratorSettings(count=2),  # Sec. 4.1: two RTX A6000
        eval=training.EvalSettings(
            benchmarks="gqa,mmbench,mmbench_cn,mme,pope,scienceqa,vqav2,textvqa",  # Table 1
            budgets=(192, 128, 64),  # Table 1
            batch_size=1,  # silent: as in LLaVA's own programs
        ),
    )
