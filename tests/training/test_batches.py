"""Conversations as batches: places of targets by hand, shapes, order, pixels."""

import jax
import numpy as np
import pytest
from PIL import Image

from stepprune_jax import testing
from stepprune_jax.data.images import LLAVA_SETTINGS, open_image, preprocess_clip
from stepprune_jax.data.llava import Sample, encode_conversation
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.training.batches import Batches, Bucket, Row, encode_rows, plan_buckets
from stepprune_jax.training.pixels import PixelCache


def row(ids, text=1, targets=1):
    place = np.arange(targets, dtype=np.int32)
    return Row(f"{ids}.png", np.arange(ids, dtype=np.int32), np.arange(text), place, place)


def make_batches(lengths, batch_size=4, seed=0):
    rows = [row(n) for n in lengths]
    pixels = lambda path: np.full((3, 2, 2), int(path[:-4]), np.float32)  # noqa: E731
    return Batches(rows, batch_size, seed, 8, pixels)


def test_targets_are_predicted_one_place_before_their_own(tmp_path):
    tokenizer = testing.tiny_tokenizer()
    turns = ("is this a dog ?", "no", "two ?", "yes")
    (found,) = encode_rows([Sample("a", tmp_path / "a.png", turns, 0)], tokenizer, 9, 2048)
    encoded = encode_conversation(tokenizer, turns, 1)
    at = encoded.ids.index(IMAGE_TOKEN)
    expanded = [*encoded.ids[:at], *[None] * 9, *encoded.ids[at + 1 :]]
    assert [expanded[p + 1] for p in found.place] == found.target.tolist()
    assert found.target.tolist() == [label for label in encoded.labels if label != -100]
    # Two answers of a word, each with its end; the word is predicted by the colon before it.
    text = [tokenizer.decode([token]) for token in found.target]
    assert text == ["no", "</s>", "yes", "</s>"]
    assert tokenizer.decode([expanded[found.place[0]]]).endswith(":")
    assert found.text.tolist() == encoded.text


def test_conversations_that_cannot_be_trained_on_are_named(tmp_path):
    tokenizer, image = testing.tiny_tokenizer(), tmp_path / "a.png"
    fine = Sample("good", image, ("two ?", "yes"), 0)
    with pytest.raises(ValueError, match=r"conversation 7 \(id 'x'\) has no image"):
        encode_rows([fine, Sample("x", None, ("two ?", "yes"), 7)], tokenizer, 9, 2048)
    length = len(encode_conversation(tokenizer, fine.turns, 1).ids) + 8
    (whole,) = encode_rows([fine], tokenizer, 9, length)
    (cut,) = encode_rows([fine], tokenizer, 9, length - 1)  # without its </s>
    assert cut.target.tolist() == whole.target[:-1].tolist()
    with pytest.raises(ValueError, match=r"'good'\) has no answer within the first \d+ embeddings"):
        encode_rows([fine], tokenizer, 9, length - 2)
    with pytest.raises(ValueError, match=r"has 0 images within the first 12"):
        encode_rows([fine], tokenizer, 9, 12)
    with pytest.raises(ValueError, match="no conversation"):
        encode_rows([], tokenizer, 9, 2048)


def test_buckets_hold_whatever_may_come_in_them():
    rows = [row(5, 9, 4), row(8, 2, 1), row(17, 3, 2), row(20, 17, 1)]
    assert plan_buckets(rows, 8) == (Bucket(8, 16, 4), Bucket(24, 24, 4))


def test_batches_are_functions_of_seed_and_step():
    lengths = range(1, 11)
    a, b = make_batches(lengths), make_batches(lengths)
    assert [a.indices(s).tolist() for s in range(6)] == [b.indices(s).tolist() for s in range(6)]
    assert a.indices(0).tolist() != make_batches(lengths, seed=1).indices(0).tolist()
    drawn = np.concatenate([a.indices(step) for step in range(5)])  # two epochs of ten
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()
    # A stream from the middle is the end of the stream from the start.
    whole, rest = list(a.stream(0, 6)), list(b.stream(4, 6))
    for x, y in zip(whole[4:], rest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, x, y)


def test_batches_have_the_shapes_of_their_buckets_and_their_own_pictures():
    batches = make_batches([3, 5, 12, 20, 7, 9], batch_size=2)
    shapes = set()
    for batch in batches.stream(0, 12):
        targets = batch.targets
        shapes.add((targets.ids.shape, batch.text.shape, targets.target.shape))
        np.testing.assert_array_equal(batch.pixels[:, 0, 0, 0], targets.length)
        assert (targets.supervised.sum(1) == 1).all()
    assert len(shapes) <= len(batches.buckets) == 3


def test_one_row_fills_a_batch():
    assert make_batches([4]).indices(3).tolist() == [0, 0, 0, 0]


def test_first_images_are_distinct_and_in_the_order_of_training():
    batches = make_batches([4, 4, 6, 8], batch_size=4)
    first = batches.first_images(10)
    assert sorted(first) == ["4.png", "6.png", "8.png"]
    assert batches.first_images(2) == first[:2]


def test_an_unreadable_picture_stops_the_stream_with_its_name(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    rows = [row(4)._replace(image=tmp_path / "bad.png")]
    batches = Batches(rows, 2, 0, 8, PixelCache(LLAVA_SETTINGS, 336, 1 << 20))
    with pytest.raises(ValueError, match=r"bad\.png is not an image"):
        next(batches.stream(0, 3))


def save_picture(path, width, height, seed=0):
    random = np.random.default_rng(seed)
    Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return path


def test_cached_pixels_are_those_of_the_processor_to_the_last_bit(tmp_path):
    settings = LLAVA_SETTINGS._replace(resize_to=24, crop_to=(24, 24))
    for mean in (settings.mean, None):
        settings = settings._replace(mean=mean)
        cache = PixelCache(settings, 24, 1 << 20)
        for number, size in enumerate([(24, 24), (50, 31), (9, 70)]):
            path = save_picture(tmp_path / f"{number}.png", *size, seed=number)
            expected = preprocess_clip(open_image(path), settings)
            np.testing.assert_array_equal(cache(path), expected)
            path.unlink()
            np.testing.assert_array_equal(cache(path), expected)  # not read again


def test_the_cache_forgets_what_was_not_used_lately(tmp_path):
    settings = LLAVA_SETTINGS._replace(resize_to=8, crop_to=(8, 8))
    paths = [save_picture(tmp_path / f"{i}.png", 8, 8, i) for i in range(3)]
    cache = PixelCache(settings, 8, 2 * 3 * 8 * 8)
    for number in (0, 1, 0, 2):
        cache(paths[number])
    for path in paths:
        path.unlink()
    cache(paths[0]), cache(paths[2])
    with pytest.raises(FileNotFoundError, match=r"1\.png"):
        cache(paths[1])


def test_pictures_of_another_size_than_the_model_takes_are_refused(tmp_path):
    path = save_picture(tmp_path / "a.png", 24, 24)
    cache = PixelCache(LLAVA_SETTINGS._replace(resize_to=16, crop_to=(16, 16)), 24, 1)
    with pytest.raises(ValueError, match=r"a\.png: the image processor makes 16 x 16 pixels"):
        cache(path)
