"""Reads the questions of benchmarks in LLaVA's usual format.

The question files of GQA, VQAv2, TextVQA, POPE and MME have JSON lines whose `text` is the complete
message. ScienceQA and MMBench have other formats. Their readers add the request for a letter
(LLaVA's `--single-pred-prompt`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.data.json_files import identity, read_json_lines, words

WORD_OR_PHRASE = "\nAnswer the question using a single word or phrase."
OPTION_LETTER = "\nAnswer with the option's letter from the given choices directly."
IMAGE_MARK = "<image>"


class BenchmarkQuestion(NamedTuple):
    """A question of a benchmark.

    Attributes:
        question_id: id in the question file. Ids of TextVQA name the image and are not unique.
        text: the complete message of the user, without an image mark.
        prompt: the question as stored in the answer file.
        image: path or bytes of an image file; None without an image.
        fields: further fields of the answer line, JSON values by name.
        video: the `Video` of a question about a video, whose path is `image`; None for an image.
    """

    question_id: str | int
    text: str
    prompt: str
    image: Path | bytes | None
    fields: Mapping[str, object] = {}
    video: Any = None

    @property
    def sampling(self) -> str:
        """Describes the frames of the video that answers depend on; "" for the model's own rate."""
        if self.video is None or (self.video.fps is None and self.video.num_frames is None):
            return ""
        return f" fps={self.video.fps} num_frames={self.video.num_frames}"

    @property
    def key(self) -> tuple[str, str]:
        """Id and prompt, which together identify a question in a benchmark and in answer lines."""
        return str(self.question_id), self.prompt


def read_list(
    path: Path, images: Path, subfolder_of: Callable[[str], str] = lambda image: ""
) -> Iterator[BenchmarkQuestion]:
    """Reads a question file in LLaVA's usual format.

    Args:
        path: the question file.
        images: folder of the images.
        subfolder_of: returns the subfolder of `images` that contains an image, from the path of the
            image in the question file. The default is no subfolder.
    """
    for place, value in read_json_lines(path):
        identity(value, "question_id", place)
        text = words(value, "text", place)
        image = words(value, "image", place)
        image = images / subfolder_of(image) / image
        yield BenchmarkQuestion(value["question_id"], text, text, image)


def check_images(questions: Sequence[BenchmarkQuestion], source: str) -> None:
    """Raises a FileNotFoundError with the images' source if an image is missing."""
    paths = dict.fromkeys(q.image for q in questions if isinstance(q.image, Path))
    # `os.path.isfile` is also False for names that no file can have.
    missing_paths = [path for path in paths if not os.path.isfile(path)]
    if missing_paths:
        raise FileNotFoundError(
            f"{len(missing_paths):,} of {len(paths):,} images are missing, such as "
            f"{missing_paths[0]}" + (f": get them from {source}" if source else "")
        )
