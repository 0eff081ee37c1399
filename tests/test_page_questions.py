"""The shipped models correctly answer all questions in the documentation."""

import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import shapes_oracle
from pages import NOTEBOOKS, PAGES, ROOT, commands, drawn_scenes, shown, text_constants
from PIL import Image

from experiments.shapes import render, scene_at
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.checkpoints.shipped import ASSETS, MODELS
from stepprune_jax.cli import generate as command
from stepprune_jax.demo.examples import shapes_examples
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.pruning import AllTokens

EXAMPLES = sorted((ASSETS / "examples").glob("*.png"))


@functools.cache
def example_scene(number):
    """Returns the scene of an example image, which was rendered from seed 2026."""
    return scene_at(2026, "test", number)[0]


def is_question(text):
    return any(re.fullmatch(rule, text) for _, rule, _ in shapes_oracle.RULES)


def page_commands():
    """Returns the commands of pages that ask a shipped model about a shipped image."""
    return [
        pytest.param(words, output, id=shown(page))
        for page in (*PAGES, *NOTEBOOKS)
        for words, output in commands(page)
        if words[0] == "stepprune-generate" and any("assets/examples" in word for word in words)
    ]


def value_of(words, flag):
    return words[words.index(flag) + 1]


def shown_example(text):
    """Returns image and scene of the example that a text names."""
    number = int(re.search(r"assets/examples/(\d+)\.png", text)[1])
    return Image.open(ASSETS / "examples" / f"{number}.png").convert("RGB"), example_scene(number)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_image_equals_its_rendered_scene(file):
    rendered = np.asarray(render(example_scene(int(file.stem))), float)
    stored = np.asarray(Image.open(file).convert("RGB"), float)
    assert np.abs(rendered - stored).mean() < 1  # rasterizers differ at edges


@pytest.mark.parametrize(("words", "output"), page_commands())
def test_a_command_prints_the_output_of_its_page(words, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command.main(words[1:])
    answer, figures = capsys.readouterr().out.splitlines()
    _, scene = shown_example(value_of(words, "--image"))
    assert answer == shapes_oracle.answer(scene, value_of(words, "--prompt"))[1]
    counts = re.compile(r"kept \d+ of \d+ visual tokens")
    assert [answer, counts.search(figures)[0]] == [output[0], counts.search(output[1])[0]]


def requests():
    """Returns page and body of each request that a page sends to a server with curl."""
    return [
        (page, json.loads(value_of(words, "-d")))
        for page in PAGES
        for words, _ in commands(page)
        if words[0] == "curl" and "-d" in words
    ]


def page_questions(model):
    """Yields page, scene, image and text of each question of a page about a rendered scene.

    The browser page shows its examples with each small model. Notebooks use the small LLaVA, and
    requests to a server name their model.
    """
    for number, (image, text) in enumerate(shapes_examples()):
        yield "stepprune-demo", example_scene(number), image, text
    for page, body in requests():
        if body["model"] == model:
            picture, text = body["messages"][0]["content"]
            image, scene = shown_example(picture["image_url"]["url"])
            yield shown(page), scene, image, text["text"]
    for notebook in NOTEBOOKS if model == "shapes" else ():
        scenes = [scene_at(*arguments)[0] for arguments in drawn_scenes(notebook)]
        for text in filter(is_question, text_constants(notebook)):
            (scene,) = scenes
            yield shown(notebook), scene, render(scene), text


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_answers_correctly_with_all_tokens_and_with_its_policy(name):
    model, policy = load_vlm(name, dtype=jnp.float32, progress=False), load_policy(name)
    pages, scenes, images, texts = zip(*page_questions(name), strict=True)
    correct_answers = [shapes_oracle.answer(*pair)[1] for pair in zip(scenes, texts, strict=True)]
    for method in (AllTokens(), policy):
        answers = generate(model, texts, images, method, options=RunOptions(max_tokens=3))
        mistakes = [
            f"{page}: {text} {answer.text}, not {correct}"
            for page, text, answer, correct in zip(
                pages, texts, answers, correct_answers, strict=True
            )
            if answer.text != correct
        ]
        assert not mistakes


def test_questions_are_collected_from_every_kind_of_page():
    assert "README.md" in {parameter.id for parameter in page_commands()}
    pages = {page for page, *_ in page_questions("shapes")}
    assert {"stepprune-demo", "docs/serving.md", "docs/tutorials/ten-minutes.ipynb"} <= pages
