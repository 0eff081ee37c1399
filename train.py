"""Trains a selector: `python train.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command again goes on where an interrupted run stopped.
"""

from absl import app, flags, logging
from ml_collections import config_flags

from stepprune_jax.training import train

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for metrics and checkpoints.")


def main(argv: list[str]):
    """Reads the flags and trains."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # Orbax reports every file it touches
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
