"""Trains a selector: `python train.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. `--dry_run` reports what a run would cost. To use several
processes, start each with the same command (docs/devices.md).
"""

from stepprune_jax.extras import train

if __name__ == "__main__":
    train()
