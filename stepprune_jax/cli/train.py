"""Trains a selector: `stepprune-train --config shapes --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. The exit status of an interrupted run is 130 after Ctrl-C
and 143 after SIGTERM. `--dry_run` reports what a run would cost. To use several processes, start
each with the same command (docs/devices.md).
"""

from collections.abc import Sequence

from stepprune_jax.cli.command_line import exit_with, read_config, signal_status
from stepprune_jax.cli.flags.train import NAME, build_parser
from stepprune_jax.parallel import distributed
from stepprune_jax.training.dry_run import dry_run, use_virtual_devices
from stepprune_jax.training.hooks import read_window
from stepprune_jax.training.run import train
from stepprune_jax.training.settings import Run
from stepprune_jax.user_input import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains a selector, or reports what the training would cost (`--dry_run`).

    Args:
        arguments: command-line arguments; None reads the arguments of the process.

    Returns:
        The exit status: 0, or 128 plus the number of the signal that stopped the run.
    """
    flags, run = read_config(build_parser(), arguments, Run)
    if flags.dry_run:
        if flags.profile is not None:
            raise UserError("--profile does not belong to --dry_run")
        use_virtual_devices(run, flags.target)
        dry_run(run, flags.workdir, flags.target)
        return 0
    if flags.target is not None:
        raise UserError("--target requires --dry_run")
    profile_window = None if flags.profile is None else read_window(flags.profile, run.steps)
    distributed.use_cores(run.cpu_devices)
    distributed.start()
    signal_number = train(run, flags.workdir, profile_window)
    return signal_status(signal_number)


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main, progress="stdout")


if __name__ == "__main__":
    command()
