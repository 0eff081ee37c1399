r"""StepPrune on the world of moving shapes, with a small Qwen3-VL: 200 visual tokens a clip.

    python -m experiments.moving_shapes --out data/moving_shapes --train 2000 --validation 64 \
        --test 150
    python train.py --config experiments/configs/moving_shapes.py --workdir runs/moving_shapes
    python eval.py --config experiments/configs/moving_shapes.py --workdir runs/moving_shapes

`python -m experiments.moving_shapes.pretrain` trained the frozen model, which is in
experiments/models/moving_shapes_qwen3. The argument "autoselect" trains the one-shot scorer:
`--config experiments/configs/moving_shapes.py:autoselect`.
"""

from stepprune_jax import training
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors import AutoSelectConfig


def get_config(method: str = "stepprune") -> training.Run:
    """Returns the settings; `method` is "stepprune" or "autoselect"."""
    shape = {"width": 32, "num_heads": 4}
    return training.Run(
        method=method,
        recipe="auto",
        steps=1200,
        batch_size=32,
        model=training.ModelSettings(
            folder="experiments/models/moving_shapes_qwen3", rows_at_once=8
        ),
        data=training.DataSettings(folder="data/moving_shapes"),
        policy=PolicyConfig(**shape),
        autoselect=AutoSelectConfig(**shape),
        eval=training.EvalSettings(
            methods="all,blind,evs,vidcom2,vcast,frames,random,stepprune",
            budgets=("1/4", "1/10", "1/20", "1/40"),
            samples=0,  # reports draw images only
        ),
    )
