"""Reads the questions of benchmarks in LLaVA's usual format.

The question files of GQA, VQAv2, TextVQA, POPE and MME have JSON lines whose `text` is the complete
message. ScienceQA and MMBench have other formats. Their readers add the request for a letter
(LLaVA's `--single-pred-prompt`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    """

    question_id: str | int
    text: str
    prompt: str
    image: Path | bytes | None
    fields: Mapping[str, object] = {}

    @property
    def key(self) -> tuple[str, str]:
        """Id and prompt, which together identify a question in a benchmark and in answer lines."""
        return str(self.question_id), self.prompt


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads a question file in LLaVA's usual format; image paths are relative to `images`."""
    for place, value in read_json_lines(path):
        identity(value, "question_id", place)
        text = words(value, "text", place)
        image = images / words(value, "image", place)
        yield BenchmarkQuestion(value["question_id"], text, text, image)


def check_images(questions: Sequence[BenchmarkQuestion], source: str) -> None:
    """Raises a FileNotFoundError with the images' source if an image is missing."""
    paths = dict.fromkeys(q.image for q in questions if isinstance(q.image, Path))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing):,} of {len(paths):,} images are missing, such as {missing[0]}"
            + (f": get them from {source}" if source else "")
        )
