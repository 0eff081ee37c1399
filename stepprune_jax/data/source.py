"""Location of a run's data, and settings of batches."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.settings import Settings, choice, count, setting
from stepprune_jax.user_input import UserError, local_path

TRAIN_FILE = "train.json"
IMAGES = "images"
REMEDIES = ("stop", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Settings, path="config.data"):
    """The group `data` of a configuration; see docs/training.md.

    Attributes:
        folder: folder with train.json, images/ and, for evaluation, the question files of splits.
        train_file: training file; empty: train.json of the folder.
        image_folder: folder that images are relative to; empty: images/ of the folder.
        linked_folders: folders that links in the image folder may lead to.
        index_folder: folder for token counts; empty: that of the run.
        missing: what to do about a missing or damaged image, of `REMEDIES`.
        unusable: what to do about a sample that cannot be trained on, of `REMEDIES`.
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
    """

    folder: str = setting("", free=True)
    train_file: str = setting("", free=True)
    image_folder: str = setting("", free=True)
    linked_folders: tuple[str, ...] = setting((), free=True)
    index_folder: str = setting("", free=True)
    missing: str = choice("stop", REMEDIES)
    unusable: str = choice("stop", REMEDIES)
    split_turns: bool = True
    stats_images: int = count(1000, least=0)
    length_multiple: int = count(8)
    length_group: int = count(1)
    context_limit: int = count(2048)
    policy_text_limit: int = count(512)
    cache_gb: float = setting(2.0, "0 to 1,000,000", lambda value: 0 <= value <= 1e6, free=True)
    threads: int = count(2, free=True)


class Source(NamedTuple):
    """Where training samples are, and how they are read.

    Attributes:
        file: JSON list of conversations.
        image_root: folder that images are relative to.
        linked_folders: folders that links in it may lead to.
        index_folder: folder that caches token counts for the next run.
        data: the settings.
    """

    file: Path
    image_root: Path
    linked_folders: tuple[Path, ...]
    index_folder: Path
    data: DataSettings


def data_folder(data: DataSettings) -> Path:
    """Returns the folder of a run's data."""
    if not data.folder:
        raise UserError("config.data.folder is empty, expected a folder with train.json, images/")
    folder = local_path(data.folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"config.data.folder: no folder {folder}")
    return folder


def training_source(data: DataSettings, workdir: str | Path) -> Source:
    """Returns the training file of a run and its image folders, which are there."""
    file, images = map(local_path, (data.train_file, data.image_folder))
    if not data.train_file or not data.image_folder:
        folder = data_folder(data)
        file = file if data.train_file else folder / TRAIN_FILE
        images = images if data.image_folder else folder / IMAGES
    if not file.is_file():
        field = "train_file" if data.train_file else "folder"
        raise FileNotFoundError(f"config.data.{field}: no file {file}")
    linked = tuple(map(local_path, data.linked_folders))
    root = "image_folder" if data.image_folder else "folder"
    for field, folder in ((root, images), *(("linked_folders", path) for path in linked)):
        if not folder.is_dir():
            raise FileNotFoundError(f"config.data.{field}: no folder {folder}")
    return Source(file, images, linked, local_path(data.index_folder or workdir), data)
