"""Trains a selector: `python train.py --config configs/shapes.py --workdir runs/shapes`.

Flags can set any field of the configuration, for example `--config.optimizer.lr=1e-3`. The same
command resumes an interrupted run. `--dry_run` reports the cost of a run. To use several processes,
start each process with the same command (docs/devices.md).
"""

from stepprune_jax.extras import train

if __name__ == "__main__":
    train()
