"""Settings of a run's training data, and the folders that they name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.settings import Settings, choice, count, setting
from stepprune_jax.user_input import UserError, local_path

TRAIN_FILE = "train.json"
IMAGES = "images"
REMEDIES = ("stop", "skip")
# Origins of the answers that a policy is trained on.
LABELS, MODEL = "labels", "model"


class VideoSampling(NamedTuple):
    """The sampling of the frames of all videos of a data folder; see `data.videos.Video`.

    Attributes:
        fps: number of frames per second; None selects the rate of the model's video processor.
        num_frames: number of frames of each video; None samples at a rate.
    """

    fps: float | None = None
    num_frames: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Settings, path="config.data"):
    """The group `data` of a configuration; see docs/training.md.

    Attributes:
        folder: folder with train.json, images/ and, for evaluation, the question files of splits.
        train_file: training file; empty selects train.json in `folder`.
        image_folder: folder that image names are relative to; empty selects images/ in `folder`.
        linked_folders: folders that links in the image folder may lead to.
        index_folder: folder that caches token counts; empty selects the run's folder.
        answers: "labels" trains on the file's answers. "model" trains on the greedy answers of the
            frozen model with all visual tokens, and needs no answers in the file.
        answer_tokens: longest answer of the frozen model in tokens, with answers = "model".
        missing: "stop" raises an error for a missing or damaged image; "skip" skips its samples.
        unusable: "stop" raises an error for a sample that cannot be trained on; "skip" skips it.
        split_turns: True makes each question of a conversation a row. False makes the conversation
            one row that ends with one of its answers, see `index.scan`.
        fps: number of frames to sample of each video per second; None selects the rate of the
            model's video processor, usually 2.
        num_frames: number of frames to sample of each video; None samples at a rate.
        stats_images: number of images and videos for the feature statistics. 0 leaves the features
            of the policy and the noise gate unstandardized.
        length_multiple: prompts are padded to a multiple of this number of ids.
        length_group: number of batches whose rows are sorted by length together; 1 sorts nothing.
        context_limit: longest conversation in tokens, including visual tokens.
        policy_text_limit: number of tokens of the user's text that the policy reads.
        cache_gb: memory for decoded images in gigabytes, and as much again for decoded videos.
        threads: number of threads that build batches.
    """

    folder: str = setting("", free=True)
    train_file: str = setting("", free=True)
    image_folder: str = setting("", free=True)
    linked_folders: tuple[str, ...] = setting((), free=True)
    index_folder: str = setting("", free=True)
    answers: str = choice(LABELS, (LABELS, MODEL))
    answer_tokens: int = count(64)
    missing: str = choice("stop", REMEDIES)
    unusable: str = choice("stop", REMEDIES)
    split_turns: bool = True
    fps: float | None = setting(None, "a rate above 0, up to 240", lambda value: 0 < value <= 240)
    num_frames: int | None = setting(None, "1 to 768", lambda value: 1 <= value <= 768)
    stats_images: int = count(1000, minimum=0)
    length_multiple: int = count(8)
    length_group: int = count(1)
    context_limit: int = count(2048)
    policy_text_limit: int = count(512)
    cache_gb: float = setting(2.0, "0 to 1,000,000", lambda value: 0 <= value <= 1e6, free=True)
    threads: int = count(2, free=True)

    def __post_init__(self):
        super().__post_init__()
        is_single = self.fps is None or self.num_frames is None
        self.expect("fps", is_single, "None, because config.data.num_frames is set")

    @property
    def sampling(self) -> VideoSampling:
        """The sampling of the frames of videos."""
        return VideoSampling(self.fps, self.num_frames)


class Source(NamedTuple):
    """Existing files and folders of a run's training data.

    Attributes:
        file: JSON list of conversations.
        image_root: folder that image names are relative to.
        linked_folders: folders that links in `image_root` may lead to.
        index_folder: folder that caches token counts for the next run.
        data: settings of the run.
        answers: answers that replace the answers of the file, by the index of the sample and of the
            question in the sample. A missing answer is replaced by a placeholder. None keeps the
            answers of the file.
    """

    file: Path
    image_root: Path
    linked_folders: tuple[Path, ...]
    index_folder: Path
    data: DataSettings
    answers: Mapping[tuple[int, int], str] | None = None


def data_folder(data: DataSettings) -> Path:
    """Returns the data folder of a run.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the setting is empty.
    """
    if not data.folder:
        raise UserError("config.data.folder is empty, expected a folder with train.json, images/")
    folder = local_path(data.folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"config.data.folder: no folder {folder}; name yours with --config.data.folder=DIR "
            "(docs/your-own-data.md), or draw one in a clone of the repository: python -m "
            f"experiments.shapes --out {data.folder}"
        )
    return folder


def training_source(data: DataSettings, workdir: str | Path) -> Source:
    """Finds the training file and the image folders that settings name.

    Args:
        data: the settings.
        workdir: folder of the run's results, the default place of the index.

    Returns:
        The files and folders. All of them exist, except possibly the index folder.

    Raises:
        FileNotFoundError: a file or folder is missing; the message names its setting.
        ValueError: a necessary setting is empty, or two settings contradict each other.
    """
    # The frozen model answers each question without the turns before it.
    is_answered = data.answers == LABELS or data.split_turns
    data.expect("answers", is_answered, f"{LABELS} if config.data.split_turns is False")
    # `train_file` and `image_folder` have precedence over their places inside `folder`.
    if data.train_file:
        file, file_setting = local_path(data.train_file), "train_file"
    else:
        file, file_setting = data_folder(data) / TRAIN_FILE, "folder"
    if data.image_folder:
        image_root, image_setting = local_path(data.image_folder), "image_folder"
    else:
        image_root, image_setting = data_folder(data) / IMAGES, "folder"
    linked_folders = tuple(map(local_path, data.linked_folders))
    if not file.is_file():
        raise FileNotFoundError(f"config.data.{file_setting}: no file {file}")
    if not image_root.is_dir():
        raise FileNotFoundError(f"config.data.{image_setting}: no folder {image_root}")
    for linked_folder in linked_folders:
        if not linked_folder.is_dir():
            raise FileNotFoundError(f"config.data.linked_folders: no folder {linked_folder}")
    index_folder = local_path(data.index_folder or workdir)
    answers = None if data.answers == LABELS else {}
    return Source(file, image_root, linked_folders, index_folder, data, answers)
