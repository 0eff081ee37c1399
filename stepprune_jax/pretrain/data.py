"""Data of pretraining: conversations, images, and labels of their patches."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.data.llava import Sample, read_conversations
from stepprune_jax.models.llava.images import ImageSettings
from stepprune_jax.models.llava.pixels import PixelCache
from stepprune_jax.pretrain.mentions import MENTIONS_FILE, Mentions, read_mentions
from stepprune_jax.pretrain.settings import Pretraining

PATCHES_FILE = "train_patches.npz"


class Data(NamedTuple):
    """Data of all stages.

    Attributes:
      samples: Conversations, each with an image.
      pixels: Maps a path to pixels.
      labels: Labels of patches and images by name, empty without their file.
      words: For some `class_*` labels by name, the word of each class; "" if it has none.
      mentions: What the questions mention; None without their file.
    """

    samples: list[Sample]
    pixels: PixelCache
    labels: dict[str, np.ndarray]
    words: dict[str, np.ndarray]
    mentions: Mentions | None

    def images(self, rows: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b 3 H W"]:
        """Returns the pixels of some samples."""
        return np.stack([self.pixels(self.samples[row].image) for row in rows])


def read_data(run: Pretraining, folder: Path, settings: ImageSettings) -> Data:
    """Reads conversations and labels, and checks them against the model and the stages.

    Args:
      run: Settings of the run.
      folder: Data in LLaVA's format, with or without labels of patches.
      settings: Of the image processor.

    Returns:
      The data; images are read on demand.

    Raises:
      FileNotFoundError: The training file or an image is missing.
      ValueError: A sample without an image, labels of another shape, more rows in a batch than
        samples, or no stage that trains the tower.
    """
    samples = read_conversations(folder / "train.json", folder / "images")
    bare = next((sample for sample in samples if sample.image is None), None)
    if bare is not None:
        raise ValueError(
            f"{folder / 'train.json'}: sample {bare.index} ({bare.id}) has no image; all must have "
            "one here"
        )
    patches = run.model.grid**2
    labels, words = _read_labels(folder / PATCHES_FILE, len(samples), patches)
    tower = bool(labels) and run.tower.steps > 0
    if not tower and not run.language.train_tower and not run.init:
        why = "config.tower.steps is 0" if labels else f"{folder} has no {PATCHES_FILE}"
        raise ValueError(
            f"nothing would train the tower: {why}, and config.language.train_tower is False; set "
            "it to True"
        )
    expected = f"at most the {len(samples)} samples of {folder / 'train.json'}"
    for stage in [run.tower] * tower + [run.language] + [run.noise] * (run.noise.steps > 0):
        stage.require("batch_size", stage.batch_size <= len(samples), expected)
    mentions = read_mentions(folder / MENTIONS_FILE, len(samples))
    pixels = PixelCache(settings, run.model.image_size, 4 << 30)
    return Data(samples, pixels, labels, words, mentions)


def _read_labels(
    path: Path, images: int, patches: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reads labels, and words of classes, by label name; empty if there is no such file."""
    if not path.is_file():
        return {}, {}
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    words = {name: arrays.pop(name) for name in list(arrays) if name.startswith("words_")}
    shares = {name for name in arrays if name.startswith("share_")}
    kinds = {n: "share_" if n.replace("words", "share", 1) in shares else "class_" for n in words}
    words = {name.replace("words_", kinds[name], 1): array for name, array in words.items()}
    for name, array in arrays.items():
        _check_shape(path, name, array, images, patches)
    for name, array in words.items():
        classes = 2 if name in shares else int(arrays[name].max()) + 1 if name in arrays else 0
        if array.ndim != 1 or not classes or len(array) < classes:
            labels = f"has classes up to {classes - 1}" if classes else "is not there"
            raise ValueError(
                f"{path}: words of {name} are {list(array.shape)}, and {name} {labels}; expected a "
                "word for each class"
            )
    return arrays, words


def _check_shape(path: Path, name: str, array: np.ndarray, images: int, patches: int) -> None:
    """Rejects labels of other images or of another grid."""
    expected = {"class_": (images, patches), "value_": (images, patches, -1)}
    expected |= {"image_": (images, -1), "share_": (images, patches)}
    shape = expected.get(name[:6])
    if shape is None:
        raise ValueError(f"{path}: unknown label {name!r}, expected {', '.join(expected)}...")
    fits = array.ndim == len(shape) and all(
        size in (-1, given) for size, given in zip(shape, array.shape, strict=True)
    )
    if not fits:
        shown = str(list(shape)).replace("-1", "any")
        raise ValueError(
            f"{path}: {name} is {list(array.shape)}, expected {shown}: train.json has {images} "
            f"samples, and config.model makes {patches} patches of an image"
        )


def word_tokens(tokenizer: Any, words: dict[str, np.ndarray]) -> dict[str, Int[np.ndarray, "c"]]:
    """Looks up the tokens of the words for classes of patches.

    Args:
      tokenizer: The model's tokenizer.
      words: `Data.words`.

    Returns:
      For each label the token of each class; -1 if it has no word, or an unknown one.
    """
    unknown = tokenizer.unk_token_id

    def token(word: str) -> int:
        number = tokenizer.convert_tokens_to_ids(word) if word else unknown
        return -1 if number in (None, unknown) else number

    return {
        name: np.asarray([token(str(word)) for word in array], np.int32)
        for name, array in words.items()
    }


def batch_indices(seed: int, step: int, size: int, total: int) -> Int[np.ndarray, " b"]:
    """Returns the rows of batch `step`; each epoch is a permutation without its last, short batch.

    Args:
      seed: Seed of the order.
      step: Number of the batch, from 0.
      size: Rows of a batch, at most `total`.
      total: Number of rows.

    Returns:
      Distinct indices of rows.
    """
    epoch, place = divmod(step, total // size)
    order = np.random.default_rng([seed, epoch]).permutation(total)
    return order[place * size : (place + 1) * size]
