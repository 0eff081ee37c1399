"""The model class for lmms-eval, driven as lmms-eval drives it; only where that is installed."""

import importlib
import pathlib
import tomllib
import warnings

import pytest

from experiments.shapes import write_world
from stepprune_jax.checkpoints.shipped import ASSETS, SHAPES_MODEL
from stepprune_jax.data.images import open_image
from stepprune_jax.data.llava import read_questions
from stepprune_jax.inference import RunOptions, generate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lmms_eval")
    from lmms_eval.api.instance import Instance
    from lmms_eval.models.registry_v2 import ModelRegistryV2

    from stepprune_jax.integrations import lmms_eval as module

POLICY = ASSETS / "policies" / "literal.safetensors"
GREEDY = {"max_new_tokens": 3, "temperature": 0.0, "num_beams": 1, "do_sample": False}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Six questions about two scenes of the shapes world, the last without its image."""
    folder = write_world(tmp_path_factory.mktemp("w") / "w", seed=8, train=0, validation=0, test=2)
    asked = read_questions(folder / "test.jsonl", folder / "images")[:6]
    found = [{"text": q.text, "image": open_image(q.image)} for q in asked]
    return [*found[:-1], found[-1] | {"image": None}]


@pytest.fixture(scope="module")
def model(documents):
    found = module.StepPruneModel(
        str(SHAPES_MODEL),
        batch_size="2",
        device="cpu",
        policy=str(POLICY),
        budget=16,
        dtype="float32",
    )
    found.task_dict["shapes"] = {"test": documents}
    return found


def pictures_of(document):
    return [] if document["image"] is None else [document["image"]]


def request(number, text, settings, visuals=pictures_of):
    about = {"task": "shapes", "doc_id": number, "repeats": 1}
    arguments = (text, settings, visuals, number, "shapes", "test")
    return Instance(request_type="generate_until", arguments=arguments, idx=0, metadata=about)


def test_lmms_eval_finds_the_class():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    place = project["project"]["entry-points"]["lmms_eval.models"][module.NAME]
    name, _, function = place.partition(":")
    registry = ModelRegistryV2()
    registry.register_manifest(getattr(importlib.import_module(name), function)())
    assert registry.get_model_class("stepprune_jax") is module.StepPruneModel


def test_requests_are_answered_as_generate_answers(model, documents):
    kept = []
    model.cache_hook.add_partial = lambda *about: kept.append(about)
    requests = [request(n, d["text"], dict(GREEDY)) for n, d in enumerate(documents)]
    found = model.generate_until(requests)
    said = generate(
        model._answerer.generator.model,
        [d["text"] for d in documents],
        [d["image"] for d in documents],
        model._answerer.generator.pruner,
        options=RunOptions(3),
    )
    assert found == [answer.text for answer in said] and len(set(found)) > 1
    expected = zip(requests, found, strict=True)
    assert kept == [("generate_until", r.args[:2], text) for r, text in expected]


def test_answers_end_at_until(model, documents):
    (whole,) = model.generate_until([request(0, documents[0]["text"], dict(GREEDY))])
    assert len(whole) > 1
    settings = GREEDY | {"until": whole[1:]}
    assert model.generate_until([request(0, documents[0]["text"], settings)]) == [whole[:1]]


@pytest.mark.parametrize("settings", [{"temperature": 0.2}, {"do_sample": True}, {"num_beams": 4}])
def test_what_is_not_greedy_is_refused(model, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"shapes, test, document 1: answers are greedy .*{name}"):
        model.generate_until([request(1, "?", settings)])


def test_settings_without_effect_are_told(model):
    with pytest.warns(UserWarning, match="without effect: image_aspect_ratio"):
        model.generate_until([request(1, "?", GREEDY | {"image_aspect_ratio": "original"})])


def test_several_pictures_are_answered_and_videos_refused(model):
    twice = [request(0, "?", dict(GREEDY), visuals=lambda document: pictures_of(document) * 2)]
    assert len(model.generate_until(twice)) == 1
    film = [request(0, "?", dict(GREEDY), visuals=lambda document: ["film.mp4"])]
    with pytest.raises(ValueError, match=r"document 0: expected images, got 1 visual.*: str"):
        model.generate_until(film)
