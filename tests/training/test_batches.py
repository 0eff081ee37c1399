"""Batches of conversations: shapes, shards, unreadable images, resuming."""

import json
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from stepprune_jax import testing
from stepprune_jax.data.corpus import Corpus, Lengths, TrainingRow
from stepprune_jax.data.images import open_image
from stepprune_jax.models.config import Normalisation
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.llava.images import LlavaImageSettings, resize
from stepprune_jax.training.batches import Batches, Bucket, Loading, Preprocessing, plan_buckets
from stepprune_jax.user_input import UserError


def make_lengths(*rows):
    return Lengths(*np.array(rows, np.int32).T)


class FakeCorpus(Corpus):
    """Rows of given lengths with one supervised token, and an image named after the length."""

    identity = "5a"

    def __init__(self, ids):
        self.lengths = make_lengths(*((n, 1, 1) for n in ids))

    def __len__(self):
        return len(self.lengths.ids)

    def rows(self, numbers):
        one = np.ones(1, np.int32)
        return [
            TrainingRow(np.arange(self.lengths.ids[n], dtype=np.int32), one, one, one)
            for n in numbers
        ]

    def image(self, number):
        return Path(f"{self.lengths.ids[number]}.png")

    @property
    def file(self):
        return Path("train.json")

    def where(self, number):
        return f"train.json: sample {number}"


class FakeReader:
    """Reads the number in an image's name as pixels; `damaged` numbers cannot be read."""

    def __init__(self, *damaged):
        self.damaged, self.paths = damaged, []

    def __call__(self, path):
        self.paths.append(path)
        if int(path.stem) in self.damaged:
            raise UserError(f"{path} is a damaged image")
        return np.full((3, 2, 2), int(path.stem), np.float32)


def make_batches(ids, batch_size=4, seed=0, damaged=(), group=1, **loading):
    reader = FakeReader(*damaged)
    images = Preprocessing(reader, lambda pixels: np.ones((len(pixels), 2), np.int32))
    return Batches(
        FakeCorpus(ids),
        images,
        batch_size=batch_size,
        seed=seed,
        multiple=8,
        group=group,
        loading=Loading(**loading),
    )


def assert_equal(batches, expected):
    assert len(batches) == len(expected)
    jax.tree.map(np.testing.assert_array_equal, batches, expected)


def test_buckets_hold_every_batch_of_their_width():
    lengths = make_lengths((5, 9, 4), (20, 17, 1), (17, 3, 2), (8, 2, 1))
    assert plan_buckets(lengths, 8) == (Bucket(8, 16, 4), Bucket(24, 24, 4))
    no_words = make_lengths((8, 0, 1))
    assert plan_buckets(no_words, 8) == (Bucket(8, 8, 1),)


def test_a_resumed_stream_continues_with_the_next_batch():
    batches = make_batches(range(1, 11))
    stream = batches.stream(6)
    first = [next(stream) for _ in range(4)]
    state = json.loads(json.dumps(stream.state))
    last = list(stream)
    stream.close()
    assert state == {"next_batch": 4, "rows": "5a"} and len(last) == 2
    # As on another machine: other threads, and no batch has been built before.
    resumed = make_batches(range(1, 11), threads=5).stream(6, state)
    assert_equal(list(resumed), last)
    resumed.close()
    assert_equal([*first, *last], [batches[step] for step in range(6)])


def test_a_stream_of_other_rows_is_not_resumed():
    with pytest.raises(ValueError, match=r"other samples of .* than the 3 that can be used now"):
        make_batches([1, 2, 3]).stream(6, {"next_batch": 1, "rows": "5b"})


def test_batches_have_the_shapes_of_their_buckets_and_the_images_of_their_rows():
    batches = make_batches([3, 5, 12, 20, 7, 9], batch_size=2)
    shapes = set()
    for batch in map(batches.__getitem__, range(12)):
        targets = batch.targets
        shapes.add((targets.ids.shape, batch.text.shape, targets.target.shape))
        np.testing.assert_array_equal(batch.pixels[:, 0, 0, 0], targets.length)
        assert (targets.supervised.sum(1) == 1).all()
    assert len(shapes) <= len(batches.buckets) == 3


def test_hosts_build_the_rows_of_one_batch():
    ids = range(1, 30)
    batches = make_batches(ids, 6)
    parts = [make_batches(ids, 6, local=slice(start, start + 2)) for start in (0, 2, 4)]
    for step in range(8):
        joined = jax.tree.map(lambda *x: np.concatenate(x), *(part[step] for part in parts))
        assert_equal(joined, batches[step])


def test_a_stream_builds_a_few_batches_ahead_and_none_after_it_is_closed():
    batches, num_threads = make_batches(range(1, 11), threads=3), threading.active_count()
    stream = batches.stream(100)
    next(stream)
    stream.close()
    # Three batches in work and two that wait, of four rows each.
    assert len(batches._images.read.paths) <= (3 + 2) * 4
    assert threading.active_count() == num_threads


def test_first_images_are_distinct_and_in_the_order_of_training():
    def first_images(count, **options):
        batches = make_batches([4, 4, 6, 8], **options)
        return [int(pixels[0, 0, 0]) for pixels in batches.first_images(count)]

    images = first_images(10)
    assert sorted(images) == [4, 6, 8]
    assert (first_images(2), first_images(0)) == (images[:2], [])
    damaged = {"damaged": (6,)}
    readable = [number for number in images if number != 6]
    assert first_images(2, **damaged, skip_unreadable=True) == readable
    with pytest.raises(ValueError, match=r'json: sample 2: "image": 6\.png is a dam') as error:
        first_images(3, **damaged)
    assert isinstance(error.value, UserError)


def test_the_next_row_of_the_batch_replaces_a_row_whose_image_is_unreadable(capsys):
    ids, damaged = range(1, 9), (3, 4)
    batches = make_batches(ids, 8, damaged=damaged, skip_unreadable=True)
    rows = [ids[i] for i in batches.indices(0)]
    expected = []
    for position in range(8):
        candidates = rows[position:] + rows[:position]
        expected.append(next(n for n in candidates if n not in damaged))
    assert batches[0].targets.length.tolist() == expected
    assert batches[0].pixels[:, 0, 0, 0].tolist() == expected
    assert 'train.json: sample 2: "image": 3.png is a damaged image; skipped' in (
        capsys.readouterr().err
    )
    # Each row is the same if this host builds no other row.
    for position in range(8):
        local = {"local": slice(position, position + 1), "skip_unreadable": True}
        batch = make_batches(ids, 8, damaged=damaged, **local)[0]
        assert batch.targets.length == expected[position]
    with pytest.raises(ValueError, match="no image of its batch can be read"):
        make_batches([3, 4], 2, damaged=damaged, skip_unreadable=True)[0]


def save_image(path, width, height, seed=0):
    random = np.random.default_rng(seed)
    Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return path


def make_cache(settings, side, limit):
    config = LlavaConfig.from_hf(testing.tiny_hf_config(vision={"image_size": side}))
    return Llava(config).pixel_cache(settings, limit)


def test_cached_pixels_equal_the_image_processors_bit_for_bit(tmp_path):
    settings = LlavaImageSettings()._replace(resize_to=24, crop_to=24)
    cache = make_cache(settings, 24, 1 << 20)
    for number, size in enumerate([(24, 24), (50, 31), (9, 70)]):
        path = save_image(tmp_path / f"{number}.png", *size, seed=number)
        expected = resize(open_image(path), settings, Normalisation())
        np.testing.assert_array_equal(cache(path), expected)
        path.unlink()
        np.testing.assert_array_equal(cache(path), expected)  # the file is not read again


def test_the_cache_drops_the_least_recently_used_image(tmp_path):
    settings = LlavaImageSettings()._replace(resize_to=8, crop_to=8)
    paths = [save_image(tmp_path / f"{i}.png", 8, 8, i) for i in range(3)]
    cache = make_cache(settings, 8, 2 * 3 * 8 * 8)  # bytes of two images
    for number in (0, 1, 0, 2):
        cache(paths[number])
    for path in paths:
        path.unlink()
    cache(paths[0]), cache(paths[2])
    with pytest.raises(FileNotFoundError, match=r"1\.png"):
        cache(paths[1])


def test_an_image_processor_of_another_size_than_the_models_is_refused(tmp_path):
    path = save_image(tmp_path / "a.png", 24, 24)
    cache = make_cache(LlavaImageSettings()._replace(resize_to=16, crop_to=16), 24, 1)
    with pytest.raises(ValueError, match=r"a\.png: the image processor makes 16 x 16 pixels"):
        cache(path)
