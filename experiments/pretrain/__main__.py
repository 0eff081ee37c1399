"""Trains a small model: `python -m experiments.pretrain --config FILE`.

Any field of the configuration can be set by a flag, for example `--config.seed=7`. The same command
resumes an interrupted run.
"""

from absl import flags

from experiments.pretrain.run import pretrain
from experiments.pretrain.settings import read_pretraining
from experiments.report.training import draw_training
from stepprune_jax import command_line
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import local_path, user_input
from stepprune_jax.workdir.lock import locked
from stepprune_jax.workdir.metrics import METRICS


def main() -> None:
    """Runs the command."""
    command_line.define_config()
    flags.DEFINE_string("workdir", None, "Folder of the run; default: runs/CONFIG.")
    command_line.run("experiments.pretrain", _pretrain)


def _pretrain() -> None:
    """Reads the flags, trains, and draws curves."""
    workdir = local_path(flags.FLAGS.workdir)
    with user_input():
        settings = read_pretraining(flags.FLAGS.config)
        distributed.use_cores(settings.cpu_devices)
    with locked(workdir):
        if pretrain(settings, workdir, settings.data.folder) is not None:
            draw_training(workdir / "language.png", workdir / "language" / METRICS)


if __name__ == "__main__":
    main()
