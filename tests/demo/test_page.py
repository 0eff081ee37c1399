"""The page and its callbacks, with recorded signatures in place of Gradio."""

import importlib
import sys

import pytest
import stand_ins
from PIL import Image

from stepprune_jax.demo.compare import BY_ITSELF, EXACTLY, Choice, Comparison
from stepprune_jax.demo.examples import shapes_examples
from stepprune_jax.inference.generate import Answer
from stepprune_jax.inference.timing import Times
from stepprune_jax.user_input import UserError

CHOICES = {"grid": Choice("grid", None, (EXACTLY,)), "own": Choice("own", None, (BY_ITSELF,))}
PICTURE = Image.new("RGB", (8, 8))


class PageError(Exception):
    """Gradio's error."""

    def __init__(self, message, print_exception):
        super().__init__(message)


@pytest.fixture
def app(monkeypatch):
    gradio = stand_ins.install(monkeypatch, "gradio")["gradio"]
    gradio.Error = PageError
    gradio.update = lambda **fields: fields
    monkeypatch.delitem(sys.modules, "stepprune_jax.demo.app", raising=False)
    yield importlib.import_module("stepprune_jax.demo.app")
    del sys.modules["stepprune_jax.demo.app"]


@pytest.fixture
def ask(app, llava_model, monkeypatch):
    """Returns the callback of the button."""
    functions = []
    monkeypatch.setattr(app.gr, "on", lambda triggers, fn, inputs, outputs: functions.append(fn))
    app.build(llava_model, "a model", CHOICES, shapes_examples())
    (function,) = functions
    return function


def test_a_page_is_built_with_and_without_examples(app, llava_model):
    app.build(llava_model, "a model", CHOICES, shapes_examples())
    app.build(llava_model, "a model", CHOICES, [])


def test_the_button_shows_both_answers_and_the_picture(app, ask, monkeypatch):
    answer = Answer("two", (7, 2), 144, 3, ((0, 5, 9),), ((12, 12),))
    comparison = Comparison((answer, Times(0.5, 0.0, 9.0)), (answer, Times(2.0, 1.5, 9.0)), PICTURE)
    monkeypatch.setattr(app, "compare", lambda *_: comparison)
    full, pruned, picture = ask(PICTURE, "how many?", "grid", EXACTLY, 3)
    times = "first token after 500.0 ms, 9.0 tokens/s"
    assert full == {"value": "two", "label": "all tokens: 3 of 144", "info": times}
    assert pruned["label"] == "kept tokens: 3 of 144" and picture is PICTURE


def test_the_page_shows_a_user_error(app, ask, monkeypatch):
    with pytest.raises(PageError, match="no image is given"):
        ask(None, "how many?", "grid", EXACTLY, 3)

    def refuse(*_):
        raise UserError("the question is empty")

    monkeypatch.setattr(app, "compare", refuse)
    with pytest.raises(PageError, match="the question is empty"):
        ask(PICTURE, " ", "grid", EXACTLY, 3)


def test_the_controls_follow_the_method(app):
    modes, count = app._update_controls(CHOICES["own"])
    assert modes == {"choices": (BY_ITSELF,), "value": BY_ITSELF} and count == {"visible": False}


def test_the_page_is_served_at_an_address(app):
    blocks, calls = app.gr.Blocks, []
    page = blocks()
    page.queue = lambda **options: calls.append(blocks.queue(page, **options))
    page.launch = lambda **options: calls.append(blocks.launch(page, **options))
    app.serve(page, "127.0.0.1", 7860)
    assert len(calls) == 2
