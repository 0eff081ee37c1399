"""The model and the data of a configuration."""

from pathlib import Path

import jax

from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.frozen import image_bounds, model_dtype, model_folders
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.source import data_folder
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.parallel.sharding import build_mesh


def load_model(run: EvaluationRun) -> VLM:
    """Loads the model of a run; every process has all of it, on its own devices."""
    folder, vision = model_folders(run)
    mesh = None if run.mesh == "single" else build_mesh(run.mesh, jax.local_devices())
    return load_vlm(folder, mesh, model_dtype(run), vision_folder=vision, **image_bounds(run))


def split_folders(run: EvaluationRun, workdir: str | Path) -> dict[str, Path]:
    """Returns the folders of "validation" and "test": that of the data, for both."""
    folder = data_folder(run.data)
    return {"validation": folder, "test": folder}
