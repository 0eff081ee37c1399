"""Trains a selector: `python train.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. `--dry_run` reports what a run would take. Several
processes are started with the same command each (docs/scale.md).
"""

from absl import flags
from ml_collections import config_flags

from stepprune_jax import command_line
from stepprune_jax.parallel import distributed
from stepprune_jax.training import read_run, train
from stepprune_jax.training.hooks import read_window
from stepprune_jax.training.plan import dry_run, use_virtual_devices
from stepprune_jax.user_input import user_input

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for metrics and checkpoints; default: runs/CONFIG."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check configuration and data, report memory, operations and hours, and exit."
)
_TARGET = flags.DEFINE_string(
    "target", None, "With --dry_run: devices that need not be here: h200:2, a6000:2, v5e:2x4."
)
_PROFILE = flags.DEFINE_string("profile", None, "FIRST:LAST, updates to profile, from 1.")


def main() -> None:
    """Reads the flags and trains."""
    with user_input():
        run = read_run(_CONFIG.value)
    if _DRY_RUN.value:
        with user_input():
            use_virtual_devices(run, _TARGET.value)
        dry_run(run, _WORKDIR.value, _TARGET.value)
        return
    window = None
    with user_input():
        if _TARGET.value is not None:
            raise ValueError("--target is for a dry run: add --dry_run")
        distributed.use_cores(run.cpu_devices)
        distributed.start()
        if _PROFILE.value is not None:
            window = read_window(_PROFILE.value, run.steps)
    train(run, _WORKDIR.value, window)


if __name__ == "__main__":
    command_line.run("train.py", main)
