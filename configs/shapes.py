"""StepPrune on the shapes world: a small frozen LLaVA, one-word answers, 144 visual tokens.

    python -m experiments.shapes --out data/shapes
    python train.py --config configs/shapes.py --workdir runs/shapes
    python eval.py --config configs/shapes.py --workdir runs/shapes

The values that are not set here are the defaults of the settings. `configs/shapes.py:literal`
follows the paper to the letter. For another model or other data, set `model` and `data` to folders
in LLaVA's format.
"""

from stepprune_jax import training
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig


def get_config(reading: str = "") -> training.Run:
    """Returns the settings; the reading "literal" follows the paper to the letter."""
    if reading not in ("", "literal"):
        raise ValueError(f"the argument of shapes is {reading!r}, expected literal or nothing")
    shape = {"width": 64, "num_heads": 4}
    run = training.Run(
        cpu_devices=2,  # if jax sees no other devices
        model=training.ModelSettings(folder="shapes", rows_at_once=4),
        data=training.DataSettings(folder="data/shapes"),
        policy=PolicyConfig(draw=1.0, **shape),  # the temperature chosen on validation questions
        autoselect=AutoSelectConfig(**shape),  # the one-shot baseline, with more weights
        eval=training.EvalSettings(
            rows={
                "AutoSelect-like": "experiments/policies/autoselect.safetensors",
                "StepPrune literal": "experiments/policies/literal.safetensors",
            },
        ),
    )
    if not reading:
        return run
    literal = PolicyConfig.literal(decoder_layers=1, **shape)
    return run.replace({"text_gate_anneal": 1.0, "policy": literal, "optimizer.muon_lr": 0.0})
