"""Training files as rows: what is left out and said so, what is refused, what is kept for later."""

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


def sample(*said, image="a.png"):
    said = said or ("<image>\nis this a dog ?", "no")
    roles = ("human", "gpt")
    turns = [{"from": roles[n % 2], "value": value} for n, value in enumerate(said)]
    return {"id": 0, "conversations": turns} | ({"image": image} if image else {})


MULTI = sample(f"<image>\n{TURNS[0]}", *TURNS[1:])
CHAT = sample("two ?", "no", image=None)


@pytest.fixture(scope="module")
def llava(tokenizer):
    return llava_encoder(tokenizer)


@pytest.fixture
def opened(tmp_path, llava):
    """Writes samples and opens them; what is said is in `opened.lines`."""
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        (images / name).write_bytes(b"x")  # images are only looked for
    (images / "empty.png").write_bytes(b"")

    def open_samples(*samples, limits=LIMITS, encoder=llava, **choices):
        file = tmp_path / "train.json"
        file.write_text(json.dumps(samples))
        where = {"train_file": str(file), "image_folder": str(images)}
        data = DataSettings(**where | {"split_turns": False} | choices)
        source = training_source(data, tmp_path / "indices")
        open_samples.lines = []
        identity = file.read_bytes().hex()
        return open_corpus(source, encoder, limits, identity, open_samples.lines.append)

    open_samples.images = images
    return open_samples


def test_rows_are_the_conversations_cut_to_their_limits(opened, tokenizer, llava):
    short = sample("What is this?\n<image>", "red", image="b.png")
    length = len(llava.encode(TURNS, 1).ids) + 8
    # One embedding less than the longer one has, and two words of its user.
    corpus = opened(MULTI, short, limits=LengthLimits(9, length - 1, 2))
    rows = corpus.rows([1, 0])
    for row, turns in zip(rows, (("What is this?", "red"), TURNS), strict=True):
        encoded = llava.encode(turns, 1)
        assert row.ids.tolist() == encoded.ids[: length - 9]
        assert row.text.tolist() == encoded.text[:2] and len(encoded.text) > 2
    assert tokenizer.decode(rows[1].target) == "yes"  # the last answer, without its </s>
    for number, row in zip((1, 0), rows, strict=True):
        counts = [array[number] for array in corpus.lengths]
        assert counts == [len(row.ids), len(row.text), len(row.target)]
    assert corpus.image(1) == opened.images / "b.png"
    assert corpus.where(1).endswith("train.json: sample 1")
    assert opened.lines[-3].endswith(f"longest {length - 1}; 1 truncated to {length - 1}")
    assert opened.lines[-1].endswith("longest 2; 2 truncated to 2")


def test_targets_are_predicted_one_place_before_their_own(tokenizer, llava):
    encoded = llava.encode(TURNS, 1)
    row = make_row(encoded, LIMITS)
    assert [encoded.ids[place + 1] for place in row.place] == row.target.tolist()
    assert row.target.tolist() == [label for label in encoded.labels if label != IGNORE][-2:]
    # The last answer, a word with its end; the word is predicted by the colon before it.
    assert [tokenizer.decode([token]) for token in row.target] == ["yes", "</s>"]
    assert tokenizer.decode([encoded.ids[row.place[0]]]).endswith(":")


def test_questions_can_be_rows_of_their_own(opened, llava):
    corpus = opened(MULTI, sample(), split_turns=True)
    assert len(corpus) == 3
    for row, turns in zip(corpus.rows(range(3)), (TURNS[:2], TURNS[2:], TURNS[:2]), strict=True):
        assert row.ids.tolist() == llava.encode(turns, 1).ids
    assert "2 samples, 3 questions, 1 images" in opened.lines[0]


def test_a_whole_conversation_ends_with_an_answer_drawn_for_it(opened, tokenizer, llava):
    corpus = opened(*[MULTI] * 40)
    rows = corpus.rows(range(40))
    short, whole = llava.encode(TURNS[:2], 1), llava.encode(TURNS, 1)
    asked = [corpus.describe(number)["question"] for number in range(40)]
    assert 10 < sum(asked) < 30
    for row, question in zip(rows, asked, strict=True):
        wanted = whole if question else short
        # Nothing that is said later is in the row, neither for the policy nor for the model.
        assert row.ids.tolist() == wanted.ids and row.text.tolist() == wanted.text
        assert tokenizer.decode(row.target) == ("yes</s>" if question else "no</s>")


def test_what_is_left_out_is_counted(opened, llava):
    gone, empty = sample(image="gone.png"), sample(image="empty.png")
    bad = sample("<image>\na", "b", "<image>\nc", "d")
    late = sample("<image>\n" + "two " * 60, "no", image="b.png")
    samples = (CHAT, gone, sample(), bad, empty, CHAT, late, gone)
    corpus = opened(*samples, missing="skip", unusable="skip", limits=LengthLimits(9, 60, 512))
    assert len(corpus) == 1 and corpus.where(0).endswith("sample 2")
    text = "\n".join(opened.lines)
    for said in (
        "train.json: 8 samples, 4 images",
        "2 skipped: text only",
        "3 skipped: the image is missing; the first: ",
        "sample 1, gone.png",
        "1 skipped: malformed; the first: ",
        "1 skipped: no answer within the context; the first: ",
        "sample 6: no answer within the first 60 embeddings",
    ):
        assert said in text
    row = llava.encode(TURNS[:2], 1)
    assert f"1 rows to train on, {sum(x != IGNORE for x in row.labels)} supervised" in text
    assert f"embeddings, 9 of them visual: median {len(row.ids) + 8}" in text
    with pytest.raises(ValueError, match=r"train\.json: expected a sample with an image"):
        opened(CHAT, gone, missing="skip")


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
def test_samples_that_cannot_be_trained_on_stop_a_run(opened, bad, limits, message):
    with pytest.raises(ValueError, match=message):
        opened(sample(), bad, limits=limits)
    assert len(opened(sample(), bad, limits=limits, unusable="skip")) == 1
    # The counts are known by now, and it stops all the same.
    with pytest.raises(ValueError, match=message):
        opened(sample(), bad, limits=limits)


def test_a_sample_that_the_template_refuses_is_named_and_can_be_skipped(opened, llava):
    """Files for Qwen's own programs have its placeholders in place of the mark."""
    encoder = dataclasses.replace(llava, conversation=Qwen2_5_VL.conversation)
    bad = sample("<|vision_start|><|image_pad|><|vision_end|>is this a dog ?", "no")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample 1: the prompt has <\|image_pad\|>, which"):
            opened(sample(), bad, encoder=encoder)
        assert len(opened(sample(), bad, encoder=encoder, unusable="skip")) == 1
        assert "malformed; the first: " in opened.lines[1] and "image_pad" in opened.lines[1]


def test_missing_images_stop_a_run_before_anything_is_tokenised(opened, monkeypatch):
    monkeypatch.setattr(open_corpus_module, "measure", None)
    wrong = [sample(image=name) for name in ("gone.png", "x\0y", "n" * 5000, "empty.png")]
    message = r"sample 1: \"image\": no file, or an empty one, at .*gone\.png, and 3 more images"
    with pytest.raises(FileNotFoundError, match=message):
        opened(sample(), *wrong)
    opened.images.rename(opened.images.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"config.data.image_folder: no folder .*images"):
        opened(sample(), missing="skip")


def test_images_outside_of_the_folder_are_refused(opened, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "c.png").write_bytes(b"x")
    for name, target in (("in.png", "b.png"), ("out.png", other / "c.png"), ("far", other)):
        (opened.images / name).symlink_to(target)
    skip = {"missing": "skip", "unusable": "skip"}
    for name in ("../other/c.png", str(other / "c.png")):
        with pytest.raises(ValueError, match='sample 1: "image" must be a path inside the image'):
            opened(sample(), sample(image=name), **skip)
    for name in ("out.png", "far/c.png"):
        with pytest.raises(ValueError, match=f'sample 1: "image": {name} is a link that leads out'):
            opened(sample(), sample(image=name), **skip)
    found = opened(sample(image="in.png"), sample(image="far/c.png"), linked_folders=(str(other),))
    assert len(found) == 2
    os.remove(other / "c.png")
    assert (
        len(opened(sample(), sample(image="far/c.png"), linked_folders=(str(other),), **skip)) == 1
    )


def test_counts_are_kept_for_the_next_run(opened, monkeypatch):
    first = opened(MULTI, sample(image="b.png"), split_turns=True)
    lines = opened.lines
    with monkeypatch.context() as patch:
        for name in ("scan", "measure"):
            patch.setattr(open_corpus_module, name, None)
        again = opened(MULTI, sample(image="b.png"), split_turns=True)
    assert opened.lines == lines and again.identity == first.identity
    np.testing.assert_array_equal(again.lengths, first.lengths)
    assert [row.ids.tolist() for row in again.rows([0, 2])] == [
        row.ids.tolist() for row in first.rows([0, 2])
    ]


def test_counts_of_something_else_are_not_taken(opened, llava):
    folder = opened.images.parent / "indices"
    opened(MULTI)
    other = llava_encoder(testing.tiny_tokenizer(image_token=False))
    shouting = dataclasses.replace(
        llava, conversation=lambda turns: llava.conversation(turns) + "!"
    )
    choices = (
        {"split_turns": True},
        {"encoder": other},
        {"encoder": shouting},
        {"limits": LengthLimits(9, 100, 512)},
    )
    for number, choice in enumerate(choices, start=2):
        opened(MULTI, **choice)
        assert len(list(folder.glob("*.npz"))) == number
    opened(MULTI, sample())
    assert len(list(folder.iterdir())) == 6  # and nothing half written
    # A pictured sample that went away makes other rows, though the file is the same.
    whole = opened(MULTI, sample(image="b.png"), missing="skip").identity
    (opened.images / "b.png").unlink()
    assert opened(MULTI, sample(image="b.png"), missing="skip").identity != whole


def test_damaged_counts_are_made_again(opened):
    first = opened(MULTI)
    (path,) = (opened.images.parent / "indices").iterdir()
    data = path.read_bytes()
    for damaged in (b"no archive", data[:-40]):
        path.write_bytes(damaged)
        assert index.load_index(path) is None
        np.testing.assert_array_equal(opened(MULTI).lengths, first.lengths)
    assert path.read_bytes() == data
