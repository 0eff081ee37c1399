"""The questions of a benchmark, and LLaVA's usual list of them.

GQA, VQAv2, TextVQA, POPE and MME have lists of JSON lines whose `text` is the complete message.
ScienceQA and MMBench have other formats. Their readers add the request for a letter (LLaVA's
`--single-pred-prompt`).
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
        question_id: id in the list. The ids of TextVQA name the image and are not unique.
        text: the complete message of the user, without an image mark.
        prompt: the question as recorded in the answer file.
        image: path or bytes of an image file; None without an image.
        fields: further fields of the answer file: names to JSON values.
    """

    question_id: str | int
    text: str
    prompt: str
    image: Path | bytes | None
    fields: Mapping[str, object] = {}

    @property
    def key(self) -> tuple[str, str]:
        """Key that identifies a question in its benchmark and in answer lines."""
        return str(self.question_id), self.prompt


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads a list in LLaVA's usual format."""
    for where, value in read_json_lines(path):
        identity(value, "question_id", where)
        text = words(value, "text", where)
        image = images / words(value, "image", where)
        yield BenchmarkQuestion(value["question_id"], text, text, image)


def check_images(questions: Sequence[BenchmarkQuestion], source: str) -> None:
    """Checks that every image exists, before a model is loaded."""
    paths = dict.fromkeys(q.image for q in questions if isinstance(q.image, Path))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing):,} of {len(paths):,} images are missing, such as {missing[0]}"
            + (f": get them from {source}" if source else "")
        )
