"""Reads the data of pretraining: conversations, images, and labels of patches."""

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
from stepprune_jax.user_input import UserError

PATCHES_FILE = "train_patches.npz"
# Types of label arrays by the first word of their names. All other arrays are numbers.
_KINDS = {"words": TEXT, "class": INTEGERS}


class Data(NamedTuple):
    """Data of all stages.

    Attributes:
        samples: conversations with one image each.
        groups: group of each sample. All images of a group have pixels of one shape.
        pixels: maps an image file to pixels.
        grids: maps pixels to rows and columns of visual tokens.
        labels: labels of patches and images, by name; empty without the file `PATCHES_FILE`.
        words: words of the classes of some labels, by the label's name; "" for a class without a
            word.
        mentions: mentions of the questions; None without the file `MENTIONS_FILE`.
    """

    samples: list[Sample]
    groups: Int[np.ndarray, " i"]
    pixels: Callable[[Path], Pixels]
    grids: Callable[[Pixels], Int[np.ndarray, "i 2"]]
    labels: dict[str, np.ndarray]
    words: dict[str, np.ndarray]
    mentions: Mentions | None

    def images(self, rows: Int[np.ndarray, " b"]) -> Images:
        """Returns the images of samples, padded to the largest image."""
        pixels = stack_images([self.pixels(self.samples[row].image) for row in rows])
        return Images(pixels, self.grids(pixels))


def read_samples(folder: Path) -> list[Sample]:
    """Reads conversations.

    Raises:
        UserError: a conversation has no image.
    """
    samples = read_conversations(folder / "train.json", folder / "images")
    for sample in samples:
        if sample.image is None:
            location = f"{folder / 'train.json'}: sample {sample.index}"
            raise UserError(f"{location} has no image, expected an image in every sample")
    return samples


def read_data(
    run: Pretraining, folder: Path, samples: list[Sample], backbone: Backbone, settings: Any
) -> Data:
    """Reads the labels, and checks the settings of model and stages against the data."""
    pixels = backbone.pixel_cache(settings, 4 << 30)
    groups, patches = _measure(backbone, samples, pixels)
    file = folder / PATCHES_FILE
    labels, words = _read_labels(file, len(samples), patches)
    has_tower_stage = bool(labels) and run.tower.steps > 0
    is_trained = has_tower_stage or run.language.train_tower
    expected = f"True, because no stage trains the tower without tower.steps and {file}"
    run.language.expect("train_tower", is_trained, expected)
    largest_group = int(np.bincount(groups).max())
    expected = (
        f"at most the {largest_group} samples of {folder / 'train.json'} with images of one size"
    )
    for stage in (
        [run.tower] * has_tower_stage + [run.language] + [run.noise] * (run.noise.steps > 0)
    ):
        stage.expect("batch_size", stage.batch_size <= largest_group, expected)
    mentions = read_mentions(folder / MENTIONS_FILE, len(samples))
    return Data(samples, groups, pixels, backbone.grids, labels, words, mentions)


def _measure(
    backbone: Backbone, samples: list[Sample], pixels: Callable[[Path], Pixels]
) -> tuple[Int[np.ndarray, " i"], int]:
    """Returns the group of each sample, and the number of patches of the largest image."""
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
    """Returns labels, and words of their classes, by label name; empty without a file."""
    if not path.is_file():
        return {}, {}
    arrays = read_arrays(path, lambda name: _KINDS.get(name.partition("_")[0], NUMBERS))
    words = {name: arrays.pop(name) for name in list(arrays) if name.startswith("words_")}
    shares = {name for name in arrays if name.startswith("share_")}
    prefixes = {
        name: "share_" if name.replace("words", "share", 1) in shares else "class_"
        for name in words
    }
    words = {name.replace("words_", prefixes[name], 1): array for name, array in words.items()}
    for name, array in arrays.items():
        _check_shape(path, name, array, images, patches)
    for name, array in words.items():
        classes = 2 if name in shares else int(arrays[name].max()) + 1 if name in arrays else 0
        if array.ndim != 1 or not classes or len(array) < classes:
            problem = f"has classes up to {classes - 1}" if classes else "is missing"
            raise UserError(
                f"{path}: words of {name} are {list(array.shape)}, and {name} {problem}; expected "
                "a word for each class"
            )
    return arrays, words


def _check_shape(path: Path, name: str, array: np.ndarray, images: int, patches: int) -> None:
    """Raises a UserError for an array of other images or of another grid."""
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
    """Returns the token of each class; -1 for a class without a word in the vocabulary."""
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
    """Returns the samples of batch `step`, which all belong to one group.

    An epoch has each sample at most once: it omits an incomplete batch of each group.
    """
    counts = np.bincount(groups) // size
    epoch, place = divmod(step, int(counts.sum()))
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(groups))
    group, group_batch = 0, place
    if len(counts) > 1:
        batch_groups = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        group = batch_groups[place]
        group_batch = int((batch_groups[:place] == group).sum())
    members = order[groups[order] == group]
    return members[group_batch * size : (group_batch + 1) * size]
