"""Trains a selector: `python train.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command again goes on where an interrupted run stopped. `--dry_run` says what a run would take.
Several processes are started with the same command each (docs/scale.md).
"""

from absl import flags
from ml_collections import config_flags

from stepprune_jax import distributed, program
from stepprune_jax.training import train
from stepprune_jax.training.dry_run import dry_run, use_virtual_devices
from stepprune_jax.training.profile import read_window
from stepprune_jax.user_input import user_input

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for metrics and checkpoints; default: runs/CONFIG."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check configuration and data, say memory, operations and hours, and leave."
)
_TARGET = flags.DEFINE_string(
    "target", None, "With --dry_run: devices that need not be here, as h200:2, a6000:2, v5e:2x4."
)
_PROFILE = flags.DEFINE_string("profile", None, "FIRST:LAST, updates to profile, from 1.")


def main() -> None:
    """Reads the flags and trains."""
    if _DRY_RUN.value:
        with user_input():
            use_virtual_devices(_CONFIG.value, _TARGET.value)
        dry_run(_CONFIG.value, _WORKDIR.value, _TARGET.value)
        return
    window = None
    with user_input():
        if _TARGET.value is not None:
            raise ValueError("--target is for a dry run: give --dry_run, too")
        program.use_cores(_CONFIG.value)
        distributed.start()
        if _PROFILE.value is not None:
            window = read_window(_PROFILE.value, _CONFIG.value.steps)
    train(_CONFIG.value, _WORKDIR.value, window)


if __name__ == "__main__":
    program.run("train.py", main)
