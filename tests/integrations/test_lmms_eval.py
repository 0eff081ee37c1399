"""The model class for lmms-eval, with the recorded interface of lmms-eval in its place."""

import importlib
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from interfaces import signature_of
from lmms_eval_stub import RECORD, Instance, integration
from packaging.requirements import Requirement
from PIL import Image
from video_clips import make_clip

from stepprune_jax.data.videos import Video
from stepprune_jax.integrations.answerer import AnswererOptions, AskedQuestion

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GREEDY = {"max_new_tokens": 3, "temperature": 0.0, "num_beams": 1, "do_sample": False}
IMAGES = [Image.new("RGB", (8, 8), color) for color in ("red", "green")]
DOCUMENTS = [{"images": IMAGES[:1]}, {"images": IMAGES}, {"images": None}]


@pytest.fixture(scope="module")
def module():
    with integration() as module:
        yield module


@pytest.fixture
def model(module, monkeypatch):
    """A model without weights; it answers a question with the text of the question."""
    monkeypatch.setattr(module, "load_answerer", lambda options: options)
    model = module.StepPruneModel("shapes", batch_size="2", budget=16)
    model.task_dict["shapes"] = {"test": DOCUMENTS}
    return model


@pytest.fixture
def questions(module, monkeypatch):
    """The questions that went to the answerer."""
    recorded = []

    def answer(answerer, questions, report):
        recorded.extend(questions)
        report(len(questions))
        return [question.text for question in questions]

    monkeypatch.setattr(module, "answer_questions", answer)
    return recorded


def request(number, text="Which?", settings=GREEDY, visuals=lambda document: document["images"]):
    values = (text, dict(settings), visuals, number, "shapes", "test")
    assert len(values) == len(RECORD["request_arguments"])
    about = {"task": "shapes", "doc_id": number, "repeats": 1}
    return Instance("generate_until", values, 0, about)


def test_the_recorded_version_is_the_one_that_is_installed():
    version = RECORD["version"]
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["lmms-eval"]):
        assert requirement.name != "lmms-eval" or requirement.specifier.contains(version)
    for file in ("Makefile", "docs/evaluation.md"):
        assert re.findall(r"lmms-eval==([\w.]+)", (ROOT / file).read_text()) == [version]


def test_the_entry_point_leads_to_a_model_class(module):
    entry_points = PROJECT["entry-points"][RECORD["entry_point_group"]]
    place, _, function = entry_points["stepprune_jax"].partition(":")
    manifest = getattr(importlib.import_module(place), function)()
    place, _, name = manifest.simple_class_path.rpartition(".")
    model_class = getattr(importlib.import_module(place), name)
    assert manifest.model_id == "stepprune_jax" and manifest.chat_class_path is None
    assert issubclass(model_class, module.lmms) and model_class.is_simple


def test_methods_take_what_lmms_eval_passes(module):
    for name, signature in RECORD["abstract_methods"].items():
        assert signature_of(getattr(module.StepPruneModel, name)) == signature


def test_the_constructor_takes_what_lmms_eval_passes(module, monkeypatch):
    options = []
    monkeypatch.setattr(module, "load_answerer", options.append)
    passed = {"batch_size": "4", "max_batch_size": 8, "device": "cpu"}
    assert passed.keys() == {*RECORD["constructor_keywords"]}
    module.StepPruneModel("shapes", seed=3, **passed)
    assert options == [AnswererOptions(pretrained="shapes", seed=3, batch_size=4)]
    with pytest.raises(TypeError, match="'budgets'"):
        module.StepPruneModel("shapes", budgets=3)


def test_a_launch_of_several_processes_is_refused(module, monkeypatch):
    """Each process would load the model on all devices, and lmms-eval would ask for torch's."""
    monkeypatch.setattr(module, "load_answerer", lambda options: pytest.fail("loads the model"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, expected 1.*without accelerate launch"):
        module.StepPruneModel("shapes")


def test_the_page_lists_every_argument_of_a_model():
    text = (ROOT / "docs" / "evaluation.md").read_text().partition("## lmms-eval")[2]
    example, more_names = re.search(
        r"--model_args (\S+)[^O]*Other arguments: (.*?)\. ", text
    ).groups()
    listed = [pair.partition("=")[0] for pair in example.split(",")]
    listed += re.findall(r"`(\w+)`", more_names)
    own_names = {"max_num_frames", "fps", "frames_as_video"}
    assert {*listed, "batch_size"} == own_names | {field.name for field in fields(AnswererOptions)}


def test_requests_are_questions_in_their_order(model, questions):
    reported = []
    model.cache_hook.add_partial = lambda *values: reported.append(values)
    settings = GREEDY | {"max_new_tokens": None, "until": "x"}
    requests = [request(0, "a"), request(1, "b", settings), request(2, "c")]
    assert model.generate_until(requests) == ["a", "b", "c"]
    assert questions == [
        AskedQuestion("a", (IMAGES[0],), 3),
        AskedQuestion("b", tuple(IMAGES), 1024, ("x",)),
        AskedQuestion("c", (), 3),
    ]
    answers = zip(requests, "abc", strict=True)
    assert reported == [("generate_until", one.args[:2], text) for one, text in answers]


@pytest.mark.parametrize("settings", [{"temperature": 0.2}, {"do_sample": True}, {"num_beams": 4}])
def test_settings_that_are_not_greedy_are_refused(model, questions, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"shapes, test, document 1: answers are greedy .*{name}"):
        model.generate_until([request(1, settings=settings)])
    assert not questions


def test_settings_without_effect_are_named(model, questions):
    with pytest.warns(UserWarning, match="without effect: image_aspect_ratio"):
        model.generate_until([request(1, settings=GREEDY | {"image_aspect_ratio": "original"})])


def read_visuals(module, monkeypatch, *visuals, **arguments):
    """Returns the images and videos that a model reads of the visuals of a document."""
    recorded = []
    monkeypatch.setattr(module, "load_answerer", lambda options: options)
    monkeypatch.setattr(
        module, "answer_questions", lambda _, asked, report: recorded.extend(asked) or [""]
    )
    model = module.StepPruneModel("shapes", **arguments)
    model.task_dict["shapes"] = {"test": DOCUMENTS}
    model.generate_until([request(0, visuals=lambda document: list(visuals))])
    return recorded[0].images


ARRAY = np.zeros((5, 8, 6, 3), np.uint8)


@pytest.mark.parametrize(
    ("visuals", "arguments", "sampling"),
    [
        (["/v/film.mp4"], {}, [("/v/film.mp4", None, 32)]),
        (["film.MKV", IMAGES[0]], {"max_num_frames": 8}, [("film.MKV", None, 8), None]),
        ([ARRAY], {}, [(ARRAY, 2.0, None)]),
        ([ARRAY, IMAGES], {"fps": 3, "max_num_frames": 2}, [(ARRAY, 3, 2), (IMAGES, 3, None)]),
        (IMAGES, {}, [None, None]),
        (IMAGES, {"frames_as_video": True, "fps": 0.5}, [(IMAGES, 0.5, None)]),
        (IMAGES[:1], {"frames_as_video": True}, [None]),
        (["missing.mp4"], {"fps": 1}, [("missing.mp4", None, 32)]),
    ],
    ids=[
        "file",
        "file and image",
        "array",
        "array and frames",
        "images",
        "frames",
        "frame",
        "no file",
    ],
)
def test_visuals_are_images_or_videos(module, monkeypatch, visuals, arguments, sampling):
    images = read_visuals(module, monkeypatch, *visuals, **arguments)
    expected = [None if x is None else (*map(type, x[:1]), *x[1:]) for x in sampling]
    read = [
        (type(image.source), image.fps, image.num_frames) if isinstance(image, Video) else None
        for image in images
    ]
    assert read == expected
    for image, values in zip(images, sampling, strict=True):
        assert values is None or np.array_equal(image.source, values[0])


def test_a_rate_samples_at_most_the_largest_number_of_frames(module, monkeypatch, tmp_path):
    pytest.importorskip("av")
    path = tmp_path / "film.mp4"
    path.write_bytes(make_clip(20, 10))  # two seconds
    for fps, sampling in ((1.5, (1.5, None)), (9, (None, 4))):
        arguments = {"fps": fps, "max_num_frames": 4}
        (video,) = read_visuals(module, monkeypatch, str(path), **arguments)
        assert (video.fps, video.num_frames) == sampling


def test_image_files_are_images_and_other_visuals_are_refused(module, monkeypatch, tmp_path):
    IMAGES[0].save(tmp_path / "a.png")
    (image,) = read_visuals(module, monkeypatch, str(tmp_path / "a.png"))
    assert image.size == (8, 8)
    with pytest.raises(ValueError, match=r"document 0: expected images, and videos .*: dict"):
        read_visuals(module, monkeypatch, {"array": [0.5], "sampling_rate": 16000})
    with pytest.raises(ValueError, match="fps is 0, expected a rate above 0"):
        read_visuals(module, monkeypatch, fps=0)
    with pytest.raises(ValueError, match="num_frames is 1000, expected 1 to 768"):
        read_visuals(module, monkeypatch, max_num_frames=1000)


def test_other_kinds_of_tasks_are_refused(model):
    for method in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="output_type generate_until"):
            method([])
