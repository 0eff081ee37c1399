"""Opening of training files: skipped rows and their report, refused files, cached counts."""

import dataclasses
import json
import os

import numpy as np
import pytest

from stepprune_jax import testing
from stepprune_jax.data import index
from stepprune_jax.data import open_corpus as open_corpus_module
from stepprune_jax.data.corpus import LengthLimits, make_row
from stepprune_jax.data.encoding import IGNORE
from stepprune_jax.data.open_corpus import open_corpus
from stepprune_jax.data.source import DataSettings, training_source
from stepprune_jax.models.qwen2_5_vl.backbone import Qwen2_5_VL
from stepprune_jax.testing import llava_encoder

LIMITS = LengthLimits(image_tokens=9, context=2048, policy_text=512)
TURNS = ("is this a dog ?", "no", "two ?", "yes")


def sample(*texts, image="a.png"):
    """Returns a sample of a training file, by default with one question."""
    texts = texts or ("<image>\nis this a dog ?", "no")
    roles = ("human", "gpt")
    turns = [{"from": roles[n % 2], "value": value} for n, value in enumerate(texts)]
    return {"id": 0, "conversations": turns} | ({"image": image} if image else {})


MULTI = sample(f"<image>\n{TURNS[0]}", *TURNS[1:])
CHAT = sample("two ?", "no", image=None)


@pytest.fixture(scope="module")
def llava(tokenizer):
    return llava_encoder(tokenizer)


@pytest.fixture
def opened(tmp_path, llava):
    """Returns a function that writes samples and opens them. `opened.lines` has the report."""
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        (images / name).write_bytes(b"x")  # images are not decoded
    (images / "empty.png").write_bytes(b"")

    def open_samples(*samples, limits=LIMITS, encoder=llava, **choices):
        file = tmp_path / "train.json"
        file.write_text(json.dumps(samples))
        paths = {"train_file": str(file), "image_folder": str(images)}
        data = DataSettings(**paths | {"split_turns": False} | choices)
        source = training_source(data, tmp_path / "indices")
        open_samples.lines = []
        identity = file.read_bytes().hex()
        return open_corpus(source, encoder, limits, identity, open_samples.lines.append)

    open_samples.images = images
    return open_samples


def test_rows_are_the_conversations_truncated_to_the_limits(opened, tokenizer, llava):
    short = sample("What is this?\n<image>", "red", image="b.png")
    length = len(llava.encode(TURNS, 1).ids) + 8
    # One embedding less than the longer conversation has, and two tokens of the user's text.
    corpus = opened(MULTI, short, limits=LengthLimits(9, length - 1, 2))
    rows = corpus.rows([1, 0])
    for row, turns in zip(rows, (("What is this?", "red"), TURNS), strict=True):
        encoded = llava.encode(turns, 1)
        assert row.ids.tolist() == encoded.ids[: length - 9]
        assert row.text.tolist() == encoded.text[:2] and len(encoded.text) > 2
    assert tokenizer.decode(rows[1].target) == "yes"  # the last answer, without its </s>
    for number, row in zip((1, 0), rows, strict=True):
        counts = [array[number] for array in corpus.lengths[:3]]
        assert counts == [len(row.ids), len(row.text), len(row.target)]
    assert corpus.image(1) == opened.images / "b.png"
    assert corpus.where(1).endswith("train.json: sample 1")
    assert opened.lines[-3].endswith(f"longest {length - 1}; 1 truncated to {length - 1}")
    assert opened.lines[-1].endswith("longest 2; 2 truncated to 2")


def test_each_target_is_predicted_at_the_position_before_it(tokenizer, llava):
    encoded = llava.encode(TURNS, 1)
    row = make_row(encoded, LIMITS)
    assert [encoded.ids[place + 1] for place in row.place] == row.target.tolist()
    assert row.target.tolist() == [label for label in encoded.labels if label != IGNORE][-2:]
    # The last answer is a word and an end token. The colon before the word predicts it.
    assert [tokenizer.decode([token]) for token in row.target] == ["yes", "</s>"]
    assert tokenizer.decode([encoded.ids[row.place[0]]]).endswith(":")


def test_with_split_turns_each_question_is_a_row(opened, llava):
    corpus = opened(MULTI, sample(), split_turns=True)
    assert len(corpus) == 3
    for row, turns in zip(corpus.rows(range(3)), (TURNS[:2], TURNS[2:], TURNS[:2]), strict=True):
        assert row.ids.tolist() == llava.encode(turns, 1).ids
    assert "2 samples, 3 questions, 1 images" in opened.lines[0]


def test_without_split_turns_a_row_ends_with_a_random_answer(opened, tokenizer, llava):
    corpus = opened(*[MULTI] * 40)
    rows = corpus.rows(range(40))
    one_pair, two_pairs = llava.encode(TURNS[:2], 1), llava.encode(TURNS, 1)
    last_pairs = [corpus.describe(number)["question"] for number in range(40)]
    assert 10 < sum(last_pairs) < 30
    for row, last_pair in zip(rows, last_pairs, strict=True):
        expected = two_pairs if last_pair else one_pair
        # Later turns are neither in the ids of the model nor in the text of the policy.
        assert row.ids.tolist() == expected.ids and row.text.tolist() == expected.text
        assert tokenizer.decode(row.target) == ("yes</s>" if last_pair else "no</s>")


def test_the_report_counts_skipped_rows(opened, llava):
    no_file, empty_file = sample(image="gone.png"), sample(image="empty.png")
    malformed = sample("<image>\na", "b", "<image>\nc", "d")
    long = sample("<image>\n" + "two " * 60, "no", image="b.png")
    samples = (CHAT, no_file, sample(), malformed, empty_file, CHAT, long, no_file)
    corpus = opened(*samples, missing="skip", unusable="skip", limits=LengthLimits(9, 60, 512))
    assert len(corpus) == 1 and corpus.where(0).endswith("sample 2")
    text = "\n".join(opened.lines)
    for line in (
        "train.json: 8 samples, 4 images",
        "2 skipped: text only",
        "3 skipped: the image is missing; the first: ",
        "sample 1, gone.png",
        "1 skipped: malformed; the first: ",
        "1 skipped: no answer within the context; the first: ",
        "sample 6: no answer within the first 60 embeddings",
    ):
        assert line in text
    row = llava.encode(TURNS[:2], 1)
    assert f"1 rows to train on, {sum(x != IGNORE for x in row.labels)} supervised" in text
    assert f"embeddings, 9 of them visual: median {len(row.ids) + 8}" in text
    with pytest.raises(ValueError, match=r"train\.json: expected a sample with an image"):
        opened(CHAT, no_file, missing="skip")


@pytest.mark.parametrize(
    ("bad", "limits", "message"),
    [
        (sample("<image>\na"), LIMITS, 'sample 1: "conversations" ends with a question'),
        (
            sample("<image>\n" + "two " * 60, "no"),
            LengthLimits(9, 60, 9),
            "sample 1: no answer within",
        ),
    ],
)
def test_unusable_samples_stop_a_run_unless_they_are_skipped(opened, bad, limits, message):
    with pytest.raises(ValueError, match=message):
        opened(sample(), bad, limits=limits)
    assert len(opened(sample(), bad, limits=limits, unusable="skip")) == 1
    # The counts are now cached, and the error must still be raised.
    with pytest.raises(ValueError, match=message):
        opened(sample(), bad, limits=limits)


def test_a_sample_that_the_template_refuses_is_reported_and_can_be_skipped(opened, llava):
    """Files for Qwen's training programs have its placeholders instead of the image mark."""
    encoder = dataclasses.replace(llava, conversation=Qwen2_5_VL.conversation)
    bad = sample("<|vision_start|><|image_pad|><|vision_end|>is this a dog ?", "no")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample 1: the prompt has <\|image_pad\|>, which"):
            opened(sample(), bad, encoder=encoder)
        assert len(opened(sample(), bad, encoder=encoder, unusable="skip")) == 1
        assert "malformed; the first: " in opened.lines[1] and "image_pad" in opened.lines[1]


def test_missing_images_stop_a_run_before_text_is_tokenised(opened, monkeypatch):
    monkeypatch.setattr(open_corpus_module, "measure", None)
    names = ("gone.png", "x\0y", "n" * 5000, "empty.png")
    message = r"sample 1: \"image\": no file, or an empty one, at .*gone\.png, and 3 more images"
    with pytest.raises(FileNotFoundError, match=message):
        opened(sample(), *(sample(image=name) for name in names))
    opened.images.rename(opened.images.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"config.data.image_folder: no folder .*images"):
        opened(sample(), missing="skip")


def test_links_out_of_the_folder_are_refused_unless_allowed(opened, tmp_path):
    linked_folder = tmp_path / "other"
    linked_folder.mkdir()
    (linked_folder / "c.png").write_bytes(b"x")
    for name, target in (
        ("in.png", "b.png"),
        ("out.png", linked_folder / "c.png"),
        ("far", linked_folder),
    ):
        (opened.images / name).symlink_to(target)
    skip = {"missing": "skip", "unusable": "skip"}
    for name in ("../other/c.png", str(linked_folder / "c.png")):
        with pytest.raises(ValueError, match='sample 1: "image" must be a path inside the image'):
            opened(sample(), sample(image=name), **skip)
    for name in ("out.png", "far/c.png"):
        with pytest.raises(ValueError, match=f'sample 1: "image": {name} is a link that leads out'):
            opened(sample(), sample(image=name), **skip)
    links = sample(image="in.png"), sample(image="far/c.png")
    assert len(opened(*links, linked_folders=(str(linked_folder),))) == 2
    os.remove(linked_folder / "c.png")
    corpus = opened(
        sample(), sample(image="far/c.png"), linked_folders=(str(linked_folder),), **skip
    )
    assert len(corpus) == 1


def test_token_counts_are_cached_for_the_next_run(opened, monkeypatch):
    first = opened(MULTI, sample(image="b.png"), split_turns=True)
    lines = opened.lines
    with monkeypatch.context() as patch:
        for name in ("scan", "measure"):
            patch.setattr(open_corpus_module, name, None)
        second = opened(MULTI, sample(image="b.png"), split_turns=True)
    assert opened.lines == lines and second.identity == first.identity
    np.testing.assert_array_equal(second.lengths[:3], first.lengths[:3])
    for second_row, first_row in zip(second.rows([0, 2]), first.rows([0, 2]), strict=True):
        assert second_row.ids.tolist() == first_row.ids.tolist()


def test_cached_counts_are_not_used_under_other_conditions(opened, llava):
    folder = opened.images.parent / "indices"
    opened(MULTI)
    other_tokenizer = llava_encoder(testing.tiny_tokenizer(image_token=False))
    other_template = dataclasses.replace(
        llava, conversation=lambda turns: llava.conversation(turns) + "!"
    )
    choices = (
        {"split_turns": True},
        {"encoder": other_tokenizer},
        {"encoder": other_template},
        {"limits": LengthLimits(9, 100, 512)},
    )
    for number, choice in enumerate(choices, start=2):
        opened(MULTI, **choice)
        assert len(list(folder.glob("*.npz"))) == number
    opened(MULTI, sample())
    assert len(list(folder.iterdir())) == 6  # no incomplete file remains
    # A deleted image removes a row, although the training file is unchanged.
    identity = opened(MULTI, sample(image="b.png"), missing="skip").identity
    (opened.images / "b.png").unlink()
    assert opened(MULTI, sample(image="b.png"), missing="skip").identity != identity


def test_a_damaged_cache_is_rebuilt(opened):
    first = opened(MULTI)
    (path,) = (opened.images.parent / "indices").iterdir()
    data = path.read_bytes()
    for damaged in (b"no archive", data[:-40]):
        path.write_bytes(damaged)
        assert index.load_index(path) is None
        np.testing.assert_array_equal(opened(MULTI).lengths[:3], first.lengths[:3])
    assert path.read_bytes() == data
