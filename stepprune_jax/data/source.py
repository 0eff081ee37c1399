"""Location of a run's data, and settings of batches; writes the shapes world on first use."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stepprune_jax.data.survey import REMEDIES, Source
from stepprune_jax.settings import (
    Settings,
    choice,
    count,
    integer,
    is_count,
    number,
    setting,
    switch,
    text,
)
from stepprune_jax.user_input import local_path

_LOG = logging.getLogger(__name__)

NAMES = ("shapes", "folder")
TRAIN_FILE = "train.json"
IMAGES = "images"
MOST_WORKERS = 512  # processes, more than any machine has cores to spare


def sizes() -> Any:
    """A field that holds sizes of images, in pixels, or None."""
    return setting(
        "a tuple of numbers of pixels",
        lambda value: isinstance(value, tuple) and bool(value) and all(map(is_count, value)),
        optional=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Settings, group="data"):
    """The group `data` of a configuration; see docs/training-data.md.

    Attributes:
        name: "shapes" for the shapes world, "folder" for data in LLaVA's format.
        folder: folder with train.json and images/; empty: workdir/data, written on first use.
        train_file: training file; empty: train.json of the folder.
        image_folder: folder that images are relative to; empty: images/ of the folder.
        linked_folders: folders that links in the image folder may lead to.
        index_folder: folder for token counts; empty: that of the run.
        missing: what to do about a missing or damaged image, of `REMEDIES`.
        unusable: what to do about a sample that cannot be trained on, of `REMEDIES`.
        train_scenes: training scenes of the shapes world.
        validation_scenes: its validation scenes.
        test_scenes: its test scenes.
        seed: seed of the shapes world.
        test_seed: seed of a separate test world; None or negative for that of the run.
        level: level of the shapes world; None for 1.
        side: height and width of its images in pixels; None for the world's own.
        grid: patches along an edge of its images; None for the world's own.
        sizes: heights and widths of its images in turn, with patches as in `side` and `grid`; None
            for images of one size.
        emphasis: factor on the families of questions that are learned last; None for 1.
        split_turns: whether each question of a conversation is a separate sample; otherwise the
            conversation is one sample, up to one of its answers; see `index.scan`.
        stats_images: images for the statistics of the features; with 0, the policy and the noise
            gate see features that are not standardised.
        length_multiple: ids are padded to a multiple of this.
        length_group: batches whose rows are sorted by length together; 1 for none.
        context_limit: longest conversation in tokens, including visual ones.
        policy_text_limit: tokens of the user's words that the policy sees.
        cache_gb: memory for decoded images.
        threads: threads that build batches.
        workers: processes that build batches, instead of threads.
    """

    name: str = choice(NAMES)
    folder: str = text(free=True)
    train_file: str = text(free=True)
    image_folder: str = text(free=True)
    linked_folders: tuple[str, ...] = setting(
        "a tuple of folders",
        lambda names: isinstance(names, tuple) and all(isinstance(name, str) for name in names),
        free=True,
    )
    index_folder: str = text(free=True)
    missing: str = choice(REMEDIES)
    unusable: str = choice(REMEDIES)
    train_scenes: int = count(0)
    validation_scenes: int = count(0, free=True)
    test_scenes: int = count(0, free=True)
    seed: int = count(0)
    test_seed: int | None = integer(optional=True, free=True)
    level: int | None = count(optional=True)
    side: int | None = count(optional=True)
    grid: int | None = count(optional=True)
    sizes: tuple[int, ...] | None = sizes()
    emphasis: float | None = number(optional=True)
    split_turns: bool = switch()
    stats_images: int = count(0)
    length_multiple: int = count()
    length_group: int = count()
    context_limit: int = count()
    policy_text_limit: int = count()
    cache_gb: float = number(free=True)
    threads: int = count(free=True)
    workers: int = setting(
        f"an integer from 0 to {MOST_WORKERS}",
        lambda value: is_count(value, 0) and value <= MOST_WORKERS,
        free=True,
    )


@runtime_checkable
class HasData(Protocol):
    """A configuration with the group `data`, such as the settings of a training run."""

    @property
    def data(self) -> Any:
        """The group, `DataSettings` or an object with its fields."""


def data_folder(config: HasData, workdir: str | Path) -> Path:
    """Returns the folder of a run's data.

    Args:
        config: settings of the run. `data.folder` is used unchanged; if it is empty, the shapes
            world is written to workdir/data, unless it exists.
        workdir: folder of the run.

    Returns:
        A folder with images/ and train.json in it.

    Raises:
        FileNotFoundError: `data.folder` or its training file does not exist.
        ValueError: no folder for "folder", no training scenes, or workdir/data holds a world of
            other settings.
    """
    data = config.data
    if data.name == "folder" and not data.folder:
        raise ValueError(
            "config.data.folder is empty, expected a folder with train.json and images/ "
            "(config.data.name is 'folder')"
        )
    if data.folder:
        folder = local_path(data.folder)
        if not (folder / TRAIN_FILE).is_file():
            raise FileNotFoundError(f"config.data.folder: no file {folder / TRAIN_FILE}")
        return folder
    if data.train_scenes < 1:
        raise ValueError(f"config.data.train_scenes is {data.train_scenes}, expected 1 or more")
    # Imported here: a run on a data folder does not draw images.
    from stepprune_jax.data.shapes import write_world

    folder = Path(workdir) / "data"
    if not folder.exists():
        _LOG.info("Writing the shapes world to %s", folder)
    return write_world(
        folder,
        seed=data.seed,
        train=data.train_scenes,
        validation=data.validation_scenes,
        test=data.test_scenes,
        **world_size(config),
    )


def training_source(config: HasData, workdir: str | Path) -> Source:
    """Returns the training file of a run and its image folder.

    Args:
        config: settings of the run, with `data.train_file` and `data.image_folder`; an empty one is
            taken from `data_folder`.
        workdir: folder of the run; token counts are stored there unless `data.index_folder` is set.

    Returns:
        The source, whose file exists.

    Raises:
        FileNotFoundError: `data.train_file` does not exist.
        ValueError, FileNotFoundError: as `data_folder`, if that folder is needed.
    """
    data = config.data
    if data.train_file and not local_path(data.train_file).is_file():
        raise FileNotFoundError(f"config.data.train_file: no file {data.train_file}")
    whole = data.train_file and data.image_folder
    folder = Path() if whole else data_folder(config, workdir)
    return Source(
        file=local_path(data.train_file) if data.train_file else folder / TRAIN_FILE,
        image_root=local_path(data.image_folder) if data.image_folder else folder / IMAGES,
        index_folder=local_path(data.index_folder or workdir),
        split_turns=data.split_turns,
        missing=data.missing,
        unusable=data.unusable,
        linked_folders=data.linked_folders,
    )


def world_size(config: HasData) -> dict[str, Any]:
    """Returns level, resolution and emphasis of the shapes world.

    Args:
        config: settings of the run; `data.level`, `side`, `grid`, `sizes` and `emphasis` may be
            None.

    Returns:
        Those that are not None, as arguments of `write_world`.
    """
    names = ("level", "side", "grid", "sizes", "emphasis")
    given = {name: getattr(config.data, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}
