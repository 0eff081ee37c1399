"""The policy on random features with a toy loss: shows the mechanics, proves nothing else.

    python train.py --config configs/toy.py --workdir runs/toy
    python eval.py --config configs/toy.py --workdir runs/toy

Runs on a CPU in about a minute.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """The toy's configuration; takes no argument."""
    if arg:
        raise ValueError(f"configs/toy.py takes no argument, got {arg!r}")
    c = ConfigDict()
    c.task = "toy"
    c.seed = 0
    c.num_tokens = 48
    c.batch_size = 32
    c.steps = 600
    c.text_gate_anneal = 0.1
    c.log_every = 50

    c.policy = ConfigDict()
    c.policy.feature_width = 32
    c.policy.text_width = 32
    c.policy.num_heads = 4
    c.policy.decoder_layers = 1
    c.policy.random_budget = (0.04, 0.4)
    c.policy.length_weight = 0.3

    c.optimizer = ConfigDict()
    c.optimizer.lr = 2e-3
    c.optimizer.final_lr = 1e-4
    c.optimizer.warmup = 0.07  # share of all steps

    c.eval = ConfigDict()
    c.eval.questions = 1000
    c.eval.seed = 12345
    c.eval.budgets = (2, 5, 10)
    return c
