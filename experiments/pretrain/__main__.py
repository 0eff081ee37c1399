"""Trains a small model: `python -m experiments.pretrain --config FILE`.

Flags can set any field of the configuration, for example `--config.seed=7`. The same command
resumes an interrupted run.
"""

from collections.abc import Sequence

from experiments.pretrain.run import pretrain
from experiments.pretrain.settings import Pretraining
from stepprune_jax.cli.command_line import Parser, add_config, exit_with, read_config, signal_status
from stepprune_jax.parallel import distributed
from stepprune_jax.workdir.lock import locked

_NAME = "experiments.pretrain"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = Parser(prog=_NAME, description=__doc__)
    add_config(parser)
    flags, settings = read_config(parser, arguments, Pretraining)
    distributed.use_cores(settings.cpu_devices)
    with locked(flags.workdir):
        result = pretrain(settings, flags.workdir, settings.data.folder)
    return signal_status(result) if isinstance(result, int) else 0


if __name__ == "__main__":
    exit_with(_NAME, main, progress="stdout")
