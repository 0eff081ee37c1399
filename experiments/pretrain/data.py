"""Data of pretraining: conversations, images, and labels of their patches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from experiments.pretrain.array_files import INTEGERS, NUMBERS, TEXT, read_arrays
from experiments.pretrain.conversations import Sample, read_conversations
from experiments.pretrain.images import Images
from experiments.pretrain.mentions import MENTIONS_FILE, Mentions, read_mentions
from experiments.pretrain.settings import Pretraining
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels, stack_images
from stepprune_jax.user_input import UserError, require

PATCHES_FILE = "train_patches.npz"
_KINDS = {"words": TEXT, "class": INTEGERS}  # by the first word of a name; of the others: numbers


class Data(NamedTuple):
    """Data of all stages.

    Attributes:
        samples: conversations, each with an image.
        groups: group of each sample; the pixels of a group have one shape.
        pixels: maps a path to pixels.
        grids: maps pixels to the grids of their visual tokens.
        labels: labels of patches and images by name, empty without their file.
        words: for some `class_*` labels by name, the word of each class; "" if it has none.
        mentions: what the questions mention; None without their file.
    """

    samples: list[Sample]
    groups: Int[np.ndarray, " i"]
    pixels: Callable[[Path], Pixels]
    grids: Callable[[Pixels], Int[np.ndarray, "i 2"]]
    labels: dict[str, np.ndarray]
    words: dict[str, np.ndarray]
    mentions: Mentions | None

    def images(self, rows: Int[np.ndarray, " b"]) -> Images:
        """Returns the images of some samples, padded to the largest."""
        pixels = stack_images([self.pixels(self.samples[row].image) for row in rows])
        return Images(pixels, self.grids(pixels))


def read_samples(folder: Path) -> list[Sample]:
    """Reads conversations, each of which must have an image."""
    samples = read_conversations(folder / "train.json", folder / "images")
    for sample in samples:
        where = f"{folder / 'train.json'}: sample {sample.index}"
        require(sample.image is not None, f"{where} has no image; all must have one here")
    return samples


def read_data(
    run: Pretraining, folder: Path, samples: list[Sample], backbone: Backbone, settings: Any
) -> Data:
    """Reads labels, and checks them against the model and the stages."""
    pixels = backbone.pixel_cache(settings, 4 << 30)
    groups, patches = _measure(backbone, samples, pixels)
    file = folder / PATCHES_FILE
    labels, words = _read_labels(file, len(samples), patches)
    tower = bool(labels) and run.tower.steps > 0
    trains = tower or run.language.train_tower
    expected = f"True: nothing else trains the tower, without steps or {folder / PATCHES_FILE}"
    run.language.expect("train_tower", trains, expected)
    largest_group = int(np.bincount(groups).max())
    expected = (
        f"at most the {largest_group} samples of {folder / 'train.json'} with images of one size"
    )
    for stage in [run.tower] * tower + [run.language] + [run.noise] * (run.noise.steps > 0):
        stage.expect("batch_size", stage.batch_size <= largest_group, expected)
    if run.language.filled is not None:
        has_share = [np.isfinite(a) for name, a in labels.items() if name.startswith("share_")]
        needed = int(np.any(has_share, axis=0).sum(axis=1).max()) if has_share else 0
        expected = f"none, as {folder / PATCHES_FILE} has no labels share_..."
        if has_share:
            expected = f"at least {needed}: so many patches of an image have labels share_..."
        run.language.expect("filled", 0 < needed <= run.language.filled, expected)
    mentions = read_mentions(folder / MENTIONS_FILE, len(samples))
    return Data(samples, groups, pixels, backbone.grids, labels, words, mentions)


def _measure(
    backbone: Backbone, samples: list[Sample], pixels: Callable[[Path], Pixels]
) -> tuple[Int[np.ndarray, " i"], int]:
    """The group of each sample, by the shape of its pixels, and the patches of the largest."""
    if not backbone.config.sizes_vary:
        return np.zeros(len(samples), int), backbone.config.max_image_tokens
    shapes, groups, patches = {}, [], 0
    for sample in samples:
        image = stack_images([pixels(sample.image)])
        shape = tuple(leaf.shape for leaf in jax.tree.leaves(image))
        groups.append(shapes.setdefault(shape, len(shapes)))
        patches = max(patches, int(backbone.grids(image).prod()))
    return np.asarray(groups), patches


def _read_labels(
    path: Path, images: int, patches: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reads labels, and words of classes, by label name; empty if there is no such file."""
    if not path.is_file():
        return {}, {}
    arrays = read_arrays(path, lambda name: _KINDS.get(name.partition("_")[0], NUMBERS))
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
            raise UserError(
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
        raise UserError(f"{path}: unknown label {name!r}, expected {', '.join(expected)}...")
    is_valid = array.ndim == len(shape) and all(
        size in (-1, actual) for size, actual in zip(shape, array.shape, strict=True)
    )
    if not is_valid:
        expected_shape = str(list(shape)).replace("-1", "any")
        raise UserError(
            f"{path}: {name} is {list(array.shape)}, expected {expected_shape}: train.json has "
            f"{images} samples, and config.model makes {patches} patches of the largest image"
        )


def word_tokens(tokenizer: Any, words: dict[str, np.ndarray]) -> dict[str, Int[np.ndarray, "c"]]:
    """Looks up the tokens of the words for classes of patches."""
    unknown = tokenizer.unk_token_id

    def token(word: str) -> int:
        number = tokenizer.convert_tokens_to_ids(word) if word else unknown
        return -1 if number in (None, unknown) else number

    return {
        name: np.asarray([token(str(word)) for word in array], np.int32)
        for name, array in words.items()
    }


def batch_indices(
    seed: int, step: int, size: int, groups: Int[np.ndarray, " i"]
) -> Int[np.ndarray, " b"]:
    """Returns the rows of batch `step`, all of one group.

    Each epoch is a permutation without the last, short batch of each group.
    """
    counts = np.bincount(groups) // size
    epoch, place = divmod(step, int(counts.sum()))
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(groups))
    group, before = 0, place
    if len(counts) > 1:
        turns = random.permutation(np.repeat(np.arange(len(counts)), counts))
        group = turns[place]
        before = int((turns[:place] == group).sum())
    mine = order[groups[order] == group]
    return mine[before * size : (before + 1) * size]
