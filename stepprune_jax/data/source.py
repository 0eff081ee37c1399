"""Where a run's data lies; the shapes world is written on first use."""

from pathlib import Path
from typing import Any

from stepprune_jax.data.survey import Source

NAMES = ("shapes", "folder")
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
        ValueError: an unknown name, no folder for "folder", no training scenes, or workdir/data
            holds a world of other settings.
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
    if data.train_scenes < 1:
        raise ValueError(f"config.data.train_scenes is {data.train_scenes}, expected 1 or more")
    # Imported here: it draws pictures, which a run on a folder of data does not need.
    from stepprune_jax.data.shapes import write_world

    folder = Path(workdir) / "data"
    if not folder.exists():
        print(f"Writing the shapes world to {folder}", flush=True)
    return write_world(
        folder, seed=data.seed, train=data.train_scenes, validation=data.validation_scenes,
        test=data.test_scenes, **world_size(config),
    )  # fmt: skip


def training_source(config: Any, workdir: str | Path) -> Source:
    """The training file of a run and its image folder.

    Args:
        config: the run's `ConfigDict`. `data.train_file` and `data.image_folder` name the two; one
            that is empty is the one of `data_folder`.
        workdir: folder of the run; counts of tokens are kept there unless `data.index_folder` says
            where.

    Returns:
        The source, of which the file exists.

    Raises:
        FileNotFoundError: `data.train_file` does not exist.
        ValueError, FileNotFoundError: as `data_folder`, where that folder is needed.
    """
    data = config.data
    if data.train_file and not Path(data.train_file).expanduser().is_file():
        raise FileNotFoundError(f"config.data.train_file: no file {data.train_file}")
    whole = data.train_file and data.image_folder
    folder = Path() if whole else data_folder(config, workdir)
    return Source(
        file=Path(data.train_file).expanduser() if data.train_file else folder / TRAIN_FILE,
        image_root=Path(data.image_folder).expanduser() if data.image_folder else folder / IMAGES,
        index_folder=Path(data.index_folder or workdir).expanduser(),
        split_turns=data.split_turns, missing=data.missing, unusable=data.unusable,
        linked_folders=tuple(data.linked_folders),
    )  # fmt: skip


def world_size(config: Any) -> dict[str, int | float]:
    """How finely the shapes world is drawn and what it asks about, as arguments of `write_world`.

    Args:
        config: the run's `ConfigDict`; `data.side` (pixels), `data.grid` (patches along an edge)
            and `data.emphasis` may be absent.

    Returns:
        Those that the configuration has.
    """
    return {name: config.data[name] for name in ("side", "grid", "emphasis") if name in config.data}
