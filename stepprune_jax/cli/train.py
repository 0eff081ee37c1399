"""Trains a selector: `stepprune-train --config shapes --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. The exit status of an interrupted run is 130 after Ctrl-C
and 143 after SIGTERM. `--dry_run` reports what a run would cost. To use several processes, start
each with the same command (docs/devices.md).
"""

from collections.abc import Sequence

from stepprune_jax.cli.command_line import (
    Parser,
    add_config,
    exit_with,
    program,
    read_config,
    signal_status,
)
from stepprune_jax.parallel import distributed
from stepprune_jax.training.dry_run import dry_run, use_virtual_devices
from stepprune_jax.training.hooks import read_window
from stepprune_jax.training.run import train
from stepprune_jax.training.settings import Run
from stepprune_jax.user_input import require

_NAME = "train.py"


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(_NAME, main, progress="stdout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments and trains.

    Returns:
        The exit status: 0, or that of the signal that stopped the run, as shells count it.
    """
    parser = Parser(prog=program(_NAME), description=__doc__, compiles=True)
    add_config(parser)
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check configuration and data, report memory, operations and hours, and exit",
    )
    text = "with --dry_run: devices to plan for, present or not: h200:2, a6000:2, v5e:2x4"
    parser.add_argument("--target", help=text)
    parser.add_argument("--profile", metavar="FIRST:LAST", help="updates to profile, from 1")
    given, run = read_config(parser, arguments, Run)
    if given.dry_run:
        require(given.profile is None, "--profile does not belong to --dry_run")
        use_virtual_devices(run, given.target)
        dry_run(run, given.workdir, given.target)
        return 0
    require(given.target is None, "--target requires --dry_run")
    window = None if given.profile is None else read_window(given.profile, run.steps)
    distributed.use_cores(run.cpu_devices)
    distributed.start()
    return signal_status(train(run, given.workdir, window))


if __name__ == "__main__":
    command()
