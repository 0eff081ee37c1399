"""The model and the data of a configuration."""

import logging
from pathlib import Path

import jax

from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.frozen import image_bounds, model_dtype, model_folders
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.source import data_folder, world_size
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.user_input import local_path

_LOG = logging.getLogger(__name__)


def load_model(run: EvaluationRun) -> VLM:
    """Loads the model of a run; every process has all of it, on its own devices."""
    folder, vision = model_folders(run)
    mesh = None if run.mesh == "single" else build_mesh(run.mesh, jax.local_devices())
    return load_vlm(folder, mesh, model_dtype(run), vision_folder=vision, **image_bounds(run))


def split_folders(run: EvaluationRun, workdir: str | Path) -> dict[str, Path]:
    """Returns the folders of the validation and the test split.

    Args:
        run: the settings of the run. `data.test_seed` selects a separate test world, which is
            written to workdir/data_test_SEED.
        workdir: folder of the run.

    Returns:
        Data folders of "validation" and "test".

    Raises:
        FileNotFoundError: `data.folder` does not exist.
        ValueError: a test seed for data that are not generated, or an error of `data_folder`.
    """
    seed = run.data.test_seed
    fresh = seed is not None and seed >= 0
    if run.data.folder:
        if fresh:
            raise ValueError(
                f"config.data.test_seed is {seed}, but the data of config.data.folder "
                f"({run.data.folder}) are files, not drawn from a seed"
            )
        folder = local_path(run.data.folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"config.data.folder: no folder {folder}")
        return {"validation": folder, "test": folder}
    folder = data_folder(run, workdir)
    if not fresh:
        return {"validation": folder, "test": folder}
    # Imported here: a run on a data folder does not draw images.
    from stepprune_jax.data.shapes import write_world

    other = Path(workdir) / f"data_test_{seed}"
    _LOG.info("Test world of seed %s: %s scenes in %s", seed, run.data.test_scenes, other)
    write_world(
        other,
        seed=run.data.seed,
        train=0,
        validation=0,
        test=run.data.test_scenes,
        test_seed=seed,
        **world_size(run),
    )
    return {"validation": folder, "test": other}
