"""Trains a small LLaVA: `python -m stepprune_jax.pretrain --config configs/pretrain_shapes.py`."""

from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from stepprune_jax.pretrain.run import pretrain
from stepprune_jax.pretrain.settings import check_config, check_world

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")


def main(argv: list[str]) -> None:
    """Reads the flags, writes the world if no data is named, and trains."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # Orbax reports every file it touches
    config, workdir = _CONFIG.value, Path(_WORKDIR.value).expanduser()
    check_config(config)
    if config.cpu_devices:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    folder = config.data.folder
    if not folder:
        check_world(config)
        # Imported here: it draws pictures, which a run on a folder of data does not need.
        from stepprune_jax.data.shapes import write_world
        from stepprune_jax.data.source import world_size

        folder = write_world(
            workdir / "data", seed=config.data.seed, train=config.data.train_scenes, validation=0,
            test=0, patches=True, **world_size(config),
        )  # fmt: skip
    pretrain(config, workdir, folder)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
