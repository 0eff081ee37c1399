"""Answers to another program's questions, without that program."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image
from small_world import stepprune
from tiny_qwen import tiny_qwen3
from video_clips import make_clip

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.data.videos import Video
from stepprune_jax.inference import Generator, RunOptions, Sampling, encode, generate
from stepprune_jax.inference.dataset import Answers
from stepprune_jax.integrations import answerer as module
from stepprune_jax.integrations.answerer import (
    AnswererOptions,
    AskedQuestion,
    answer_questions,
    cut_at,
    load_answerer,
)
from stepprune_jax.registry import build_pruner

QUESTIONS = ("What is this?", "two dog", "is the picture red", "yes or no")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WIDTHS", (192,))
        patch.setattr(encode, "WIDTHS", (192,))
        patch.setattr(encode, "CHUNK", 2)
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(stepprune(), tmp_path_factory.mktemp("policy") / "policy.bin")


def images():
    random = np.random.default_rng(4)
    drawn = [Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(2)]
    return [(drawn[0],), (), (drawn[1],), (drawn[0],)]


def test_answers_are_those_of_generate(llava_folder, policy):
    settings = AnswererOptions(
        pretrained=llava_folder, dtype="float32", batch_size=2, policy=policy, budget=2
    )
    answerer, token_limits, done = load_answerer(settings), [3, 2, 2, 2], []
    question_fields = zip(QUESTIONS, images(), token_limits, strict=True)
    texts = answer_questions(
        answerer, [AskedQuestion(*fields) for fields in question_fields], done.append
    )
    # Chunks of two; those with another longest answer are apart.
    assert done == [2, 3, 4]
    options, generator = RunOptions(max(token_limits)), answerer.generator
    expected_answers = generate(
        generator.model, QUESTIONS, images(), generator.pruner, options=options
    )
    decode = generator.model.tokenizer.decode
    for text, answer, count in zip(texts, expected_answers, token_limits, strict=True):
        ids = [token for token in answer.token_ids[:count] if token != 2]
        assert text == decode(ids).strip()
    until = texts[0][1:]
    (ended,) = answer_questions(answerer, [AskedQuestion(QUESTIONS[0], images()[0], 3, (until,))])
    assert ended == cut_at(texts[0], (until,)) != texts[0]


@pytest.mark.slow
def test_the_draw_of_a_question_depends_on_nothing_else(llava_folder, monkeypatch):
    questions = [AskedQuestion("?", image, 1) for image in images() if image]
    answers, answer_set = [], Generator.answer_set

    def watch(*arguments):
        answers.extend(answer_set(*arguments))
        return answers[-1:]

    monkeypatch.setattr(Generator, "answer_set", watch)
    settings = AnswererOptions(
        pretrained=llava_folder, method="random", budget="1/3", dtype="float32", seed=5
    )
    answerer = load_answerer(settings)
    answer_questions(answerer, questions)
    assert len(answers) == 2  # chunks of two
    answer_questions(answerer, questions[::-1])
    orders, reversed_orders = (
        [order.tolist() for part in parts for order in part.order]
        for parts in (answers[:2], answers[2:])
    )
    # One image is shown twice.
    assert orders == reversed_orders[::-1] and len({*map(tuple, orders)}) == 2
    answer_questions(load_answerer(dataclasses.replace(settings, seed=6)), questions)
    assert answers[4].order[0].tolist() != orders[0]


def test_an_image_that_two_ask_about_goes_through_the_tower_once(llava_folder, monkeypatch):
    answerer = load_answerer(AnswererOptions(pretrained=llava_folder, dtype="float32"))
    encoded_images = []

    def note(generator, encoded, batching):
        encoded_images.append(encoded.images)
        count = len(encoded.prompts.length)
        kept, seconds = np.zeros(count, np.int32), np.zeros(count)
        return [Answers([""] * count, kept, [], seconds, np.ones(count, bool))]

    monkeypatch.setattr(Generator, "answer_set", note)
    first, _, second, _ = images()
    stored = first[0].copy()  # the evaluator's own programs ignore its orientation
    stored.getexif()[ExifTags.Base.Orientation] = 6
    image_sets = (first, (stored,), first, second)
    answer_questions(answerer, [AskedQuestion("?", image, 1) for image in image_sets])
    shared, apart = encoded_images
    assert shared.pixels is None and len(shared.sizes) == 1
    assert apart.features is None and len(apart.sizes) == 2


@pytest.fixture(scope="module")
def answerer(llava_folder):
    return load_answerer(AnswererOptions(pretrained=llava_folder, dtype="float32"))


@pytest.fixture
def ids_read(monkeypatch):
    """The ids of the prompts that are answered; each answer is empty, so no program compiles."""
    ids = []

    def answer(generator, request):
        ids.extend(request.ids)
        return [SimpleNamespace(text="")] * len(request.ids)

    def answer_set(generator, encoded, batching):
        rows = zip(encoded.prompts.ids, encoded.prompts.length, strict=True)
        ids.extend(tuple(row[:length].tolist()) for row, length in rows)
        count = len(encoded.prompts.ids)
        return [Answers([""] * count, np.zeros(0), [], np.zeros(0), np.ones(count, bool))]

    monkeypatch.setattr(Generator, "answer", answer)
    monkeypatch.setattr(Generator, "answer_set", answer_set)
    return ids


@pytest.mark.parametrize(
    ("text", "places", "read_as"),
    [
        ("red <image> or <image> two", (0, 2), "red <image> or <image> two"),
        ("red or two", (0, 2), "<image>\n<image>\nred or two"),
        ("red <image> two", (0,), "<image>\nred  two"),
        ("red or two", (), "red or two"),
    ],
)
def test_marks_of_images_are_where_generate_has_them(
    answerer, ids_read, caplog, text, places, read_as
):
    question_images = tuple(images()[place][0] for place in places)
    answer_questions(answerer, [AskedQuestion(text, question_images, 1)])
    prompt = answerer.generator.model.backbone.conversation([read_as])
    assert ids_read == [tuple(tokenize_with_images(answerer.generator.model.tokenizer, prompt))]
    assert "mark" not in caplog.text


@pytest.mark.parametrize(("text", "places"), [("<image> a <image> b", (0,)), ("<image> a b", ())])
def test_marks_that_do_not_match_the_images_are_dropped_with_a_warning(
    answerer, ids_read, caplog, text, places
):
    question_images = tuple(images()[place][0] for place in places)
    answer_questions(
        answerer, [AskedQuestion("dog", (), 1), AskedQuestion(text, question_images, 1)]
    )
    (line,) = [record.getMessage() for record in caplog.records if "mark" in record.getMessage()]
    marks = text.count("<image>")
    assert f"1 of 2 questions: {marks} <image> mark(s) for {len(question_images)} image(s)" in line
    assert repr(text) in line and "\n" not in line
    assert all(ids.count(IMAGE_TOKEN) <= len(question_images) for ids in ids_read)


@pytest.mark.slow
def test_several_images_are_answered_as_by_generate(llava_folder, tmp_path):
    policy = save_policy(stepprune(draw=0.0), tmp_path / "policy.bin")
    settings = AnswererOptions(pretrained=llava_folder, dtype="float32", policy=policy, budget=2)
    answerer, (first, _, second, _), done = load_answerer(settings), images(), []
    model = answerer.generator.model._replace(repetition_penalty=9.0)
    generator = dataclasses.replace(answerer.generator, model=model)
    answerer = answerer._replace(generator=generator)
    both = first + second
    questions = [
        AskedQuestion("<image> red", first, 12),
        AskedQuestion("dog", (), 12),
        AskedQuestion("two <image> dog <image> red", both, 12),
        AskedQuestion(" ?", both[::-1], 12),
    ]
    texts = answer_questions(answerer, questions, done.append)
    assert done == [1, 2, 4]
    sampling = Sampling(repetition_penalty=1.0)
    options = {"options": RunOptions(12), "sampling": sampling}
    for text, (prompt, question_images, *_) in zip(texts, questions, strict=True):
        (expected,) = generate(model, [prompt], [question_images], generator.pruner, **options)
        assert text == expected.text.strip() and expected.kept == 2 * len(question_images)


def test_the_images_of_a_question_have_draws_of_their_own(llava_folder, monkeypatch):
    settings = AnswererOptions(pretrained=llava_folder, dtype="float32", method="random", budget=4)
    (first, _, second, _), kept, pixels, answer = images(), [], [], Generator.answer
    stored = first[0].copy()
    stored.getexif()[ExifTags.Base.Orientation] = 6

    def watch(generator, request):
        pixels.append(request.images.pixels)
        kept.append(answer(generator, request)[0].kept_indices)
        return answer(generator, request)

    monkeypatch.setattr(Generator, "answer", watch)
    questions = [AskedQuestion("?", x + second, 1) for x in (first, (stored,))]
    answer_questions(load_answerer(settings), questions)
    assert kept[0] == kept[1] and kept[0][0] != kept[0][1] and np.array_equal(*pixels)


def test_answers_end_where_they_are_told_to():
    assert cut_at("yes\n\nno", ("\n\n",)) == "yes"
    assert cut_at("a stop b, c", (",", "stop")) == "a "
    assert cut_at("whole", ("", "x")) == "whole" and cut_at("whole", ()) == "whole"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "policy"}, "method 'policy' needs a policy"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"method": "grid", "budget": 10}, "budget is 10"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(
    llava_folder, options, message, monkeypatch
):
    monkeypatch.setattr(module, "load_vlm", None)
    with pytest.raises(ValueError, match=message):
        load_answerer(AnswererOptions(pretrained=llava_folder, **options))


def test_an_empty_answer_is_refused(llava_folder):
    answerer = module.Answerer(Generator(load_vlm(llava_folder, progress=False)), 1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        answer_questions(answerer, [AskedQuestion("?", None, 0)])


CLIP = make_clip(6, 2, 40, 32)


@pytest.fixture(scope="module")
def qwen_answerer(tmp_path_factory):
    folder = tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
    settings = {"size": {"shortest_edge": 512, "longest_edge": 8192}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    options = {"method": "vidcom2", "budget": "1/2", "dtype": "float32", "batch_size": 2}
    return load_answerer(AnswererOptions(pretrained=folder, **options))


def test_questions_about_videos_are_answered_as_by_generate(qwen_answerer, tmp_path, caplog):
    """Two questions share a video. A truncated video has no answer, and no other question fails."""
    path, truncated = tmp_path / "film.mp4", tmp_path / "cut.mp4"
    path.write_bytes(CLIP)
    truncated.write_bytes(CLIP[:-400])
    film = Video(str(path), num_frames=4)
    image, frames = images()[0][0], Video(np.zeros((2, 32, 40, 3), np.uint8), 2)
    media = [(film,), (image,), (film,), (Video(truncated),), (frames, image)]
    texts = ["<image> What?", "two", "And now?", "What?", "a <image> b <image>"]
    questions = [AskedQuestion(text, items, 3) for text, items in zip(texts, media, strict=True)]
    done = []
    answers = answer_questions(qwen_answerer, questions, done.append)
    assert done[-1] == 5 and answers[3] == ""
    assert "1 of 4 questions about videos have an empty answer" in caplog.text
    assert "cut.mp4 is damaged" in caplog.text
    generator = qwen_answerer.generator
    for index in (0, 1, 2, 4):
        (expected,) = generate(
            generator.model,
            [texts[index].removeprefix("<image> ")],
            [media[index]],
            generator.pruner,
            options=RunOptions(3),
        )
        assert answers[index] == expected.text.strip()
    with pytest.raises(ValueError, match=r"cut\.mp4 is damaged"):
        answer_questions(qwen_answerer, [questions[3]])


def test_what_no_video_can_pass_is_refused_before_any_answer(
    qwen_answerer, answerer, ids_read, monkeypatch
):
    questions = [AskedQuestion("?", (), 1), AskedQuestion("?", (Video(b"film"),), 1)]
    refusal = r"llava reads images only, and no videos; Qwen2\.5-VL and Qwen3-VL read"
    with pytest.raises(ValueError, match=refusal):
        answer_questions(answerer, questions)
    holov = dataclasses.replace(qwen_answerer.generator, pruner=build_pruner("holov", 4))
    with pytest.raises(ValueError, match="holov prunes images only, and no videos"):
        answer_questions(module.Answerer(holov, 1), questions)
    missing = [*questions, AskedQuestion("?", (Video("nowhere.mp4"),), 1)]
    with pytest.raises(FileNotFoundError, match=r"no video file at nowhere\.mp4"):
        answer_questions(qwen_answerer, missing)
    monkeypatch.setattr("stepprune_jax.extras.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install .*\[video\]"):
        answer_questions(qwen_answerer, questions)
    assert not ids_read
