"""Trains a small model: `stepprune-pretrain --config pretrain_shapes`.

Any field of the configuration can be set by a flag, for example `--config.data.seed=7`. The same
command resumes an interrupted run.
"""

from pathlib import Path

from absl import flags

from stepprune_jax import command_line
from stepprune_jax.data.source import world_size
from stepprune_jax.parallel import distributed
from stepprune_jax.pretrain.run import pretrain
from stepprune_jax.pretrain.settings import Pretraining, read_pretraining
from stepprune_jax.user_input import local_path, user_input
from stepprune_jax.visualize.training import draw_training
from stepprune_jax.workdir.lock import locked
from stepprune_jax.workdir.metrics import METRICS


def main() -> None:
    """Runs the command."""
    command_line.define_config()
    flags.DEFINE_string("workdir", None, "Folder of the run; default: runs/CONFIG.")
    command_line.run("stepprune_jax.pretrain", _pretrain)


def _pretrain() -> None:
    """Reads the flags, writes the world if there is no data folder, trains, and draws curves."""
    workdir = local_path(flags.FLAGS.workdir)
    with user_input():
        settings = read_pretraining(flags.FLAGS.config)
        distributed.use_cores(settings.cpu_devices)
    with locked(workdir):
        with user_input():
            folder = _data(settings, workdir)
        if pretrain(settings, workdir, folder) is not None:
            draw_training(workdir / "language.png", workdir / "language" / METRICS)


def _data(settings: Pretraining, workdir: Path) -> str | Path:
    """Returns the folder of data."""
    if settings.data.folder:
        return settings.data.folder
    settings.check_world()
    # Imported here: a run on a data folder does not draw images.
    from stepprune_jax.data.shapes import write_world

    return write_world(
        workdir / "data",
        seed=settings.data.seed,
        train=settings.data.train_scenes,
        validation=0,
        test=0,
        patches=True,
        **world_size(settings),
    )


if __name__ == "__main__":
    main()
