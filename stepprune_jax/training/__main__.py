"""Trains a selector: `stepprune-train --config shapes --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. `--dry_run` reports what a run would cost. To use several
processes, start each with the same command (docs/devices.md).
"""

from absl import flags

from stepprune_jax import command_line
from stepprune_jax.parallel import distributed
from stepprune_jax.training import read_run, train
from stepprune_jax.training.hooks import read_window
from stepprune_jax.training.plan import dry_run, use_virtual_devices
from stepprune_jax.user_input import user_input


def main() -> None:
    """Runs the command."""
    command_line.define_config()
    flags.DEFINE_string(
        "workdir", None, "Folder for metrics and checkpoints; default: runs/CONFIG."
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Check configuration and data, report memory, operations and hours, and exit.",
    )
    flags.DEFINE_string(
        "target",
        None,
        "With --dry_run: devices to plan for, present or not: h200:2, a6000:2, v5e:2x4.",
    )
    flags.DEFINE_string("profile", None, "FIRST:LAST, updates to profile, from 1.")
    command_line.run("train.py", _train)


def _train() -> None:
    """Reads the flags and trains."""
    given = flags.FLAGS
    with user_input():
        run = read_run(given.config)
    if given.dry_run:
        with user_input():
            use_virtual_devices(run, given.target)
        dry_run(run, given.workdir, given.target)
        return
    window = None
    with user_input():
        if given.target is not None:
            raise ValueError("--target requires --dry_run")
        distributed.use_cores(run.cpu_devices)
        distributed.start()
        if given.profile is not None:
            window = read_window(given.profile, run.steps)
    train(run, given.workdir, window)


if __name__ == "__main__":
    main()
