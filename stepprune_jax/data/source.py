"""Where a run's data lies; the shapes world is written on first use."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

NAMES = ("shapes", "folder")
MANIFEST = "manifest.json"
TRAIN_FILE = "train.json"
IMAGES = "images"


def data_folder(config: Any, workdir: str | Path) -> Path:
    """The folder of a run's data.

    Args:
        config: the run's `ConfigDict`. With `data.folder` that folder is used as it is; otherwise
            the shapes world is written to workdir/data, unless it is there already.
        workdir: folder of the run.

    Returns:
        A folder with images/ and train.json in it.

    Raises:
        FileNotFoundError: `data.folder` or its training file does not exist.
        ValueError: an unknown name, no folder for "folder", or a world of other settings.
    """
    data = config.data
    if data.name not in NAMES:
        raise ValueError(f"config.data.name is {data.name!r}, expected one of {', '.join(NAMES)}")
    if data.name == "folder" and not data.folder:
        raise ValueError(
            "config.data.folder is empty, expected a folder with train.json and images/ "
            "(config.data.name is 'folder')"
        )
    if data.folder:
        folder = Path(data.folder).expanduser()
        if not (folder / TRAIN_FILE).is_file():
            raise FileNotFoundError(f"config.data.folder: no file {folder / TRAIN_FILE}")
        return folder
    return _world(data, Path(workdir) / "data")


def _world(data: Any, folder: Path) -> Path:
    """The shapes world of these settings."""
    settings = {
        "seed": data.seed,
        "train": data.train_scenes,
        "validation": data.validation_scenes,
        "test": data.test_scenes,
    }
    manifest = {"name": data.name} | settings
    if folder.exists():
        _check_manifest(folder, manifest)
        return folder
    # Imported here: it draws pictures, which a run on a folder of data does not need.
    from stepprune_jax.data import shapes

    print(f"Writing the shapes world ({data.train_scenes} training scenes) to {folder}", flush=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shapes.write_world(partial, **settings)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(partial, folder)
    return folder


def _check_manifest(folder: Path, wanted: dict[str, Any]):
    """Refuses a folder that holds another world, or something else."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} exists but has no {MANIFEST}: it was not written by this program. Set "
            "config.data.folder to use it as it is, or move it away"
        )
    try:
        found = json.loads(path.read_text())
        differing = sorted(k for k in wanted if found.get(k) != wanted[k])
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    if differing:
        listed = ", ".join(f"{k} {found.get(k)!r} -> {wanted[k]!r}" for k in differing)
        raise ValueError(
            f"{folder} holds a world of other settings ({listed}); give another --workdir or "
            "remove the folder"
        )
