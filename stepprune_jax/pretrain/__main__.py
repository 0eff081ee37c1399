"""Trains a small LLaVA: `python -m stepprune_jax.pretrain --config configs/pretrain_shapes.py`."""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from stepprune_jax import program
from stepprune_jax.pretrain.run import pretrain
from stepprune_jax.pretrain.settings import check_config, check_world
from stepprune_jax.user_input import user_input

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")


def main() -> None:
    """Reads the flags, writes the world if no data is named, and trains."""
    config, workdir = _CONFIG.value, Path(_WORKDIR.value).expanduser()
    pretrain(config, workdir, _data(config, workdir))


@user_input()
def _data(config: Any, workdir: Path) -> str | Path:
    """The folder of data, after the configuration is checked."""
    check_config(config)
    program.use_cores(config)
    if config.data.folder:
        return config.data.folder
    check_world(config)
    # Imported here: it draws pictures, which a run on a folder of data does not need.
    from stepprune_jax.data.shapes import write_world
    from stepprune_jax.data.source import world_size

    return write_world(
        workdir / "data", seed=config.data.seed, train=config.data.train_scenes, validation=0,
        test=0, patches=True, **world_size(config),
    )  # fmt: skip


if __name__ == "__main__":
    program.run("stepprune_jax.pretrain", main)
