"""What is drawn for a question: the same wherever it is asked, and other tokens for other rows."""

import io

import jax
import numpy as np
import pytest
from generation_reference import pruner_inputs
from PIL import Image
from small_world import WIDTHS, random_params

from stepprune_jax import PolicyConfig
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.inference import RunOptions, encode_questions, generate, pipeline, read_request
from stepprune_jax.registry import build_pruner, selector_of
from stepprune_jax.selectors import AutoSelectConfig

TWO = RunOptions(max_tokens=2)
PROMPTS = ("What is this?", "red", "two yes no dog", "is the picture red or no")
FAMILIES = ("llava_model", "qwen_model")
METHODS = {
    "own": lambda model, seed: build_pruner("stepprune", "own", **of(model, seed)),
    "exact": lambda model, seed: build_pruner("stepprune", 3, **of(model, seed)),
    "scorer": lambda model, seed: build_pruner(
        "autoselect", 3, **of(model, seed, AutoSelectConfig)
    ),
    "random": lambda model, seed: build_pruner("random", 3, options={"seed": seed}),
}


def of(model, seed, kind=PolicyConfig):
    config = kind(**WIDTHS | {"feature_width": model.config.feature_width})
    method = selector_of(config)
    # So that draws differ.
    params = jax.tree.map(lambda x: x / 4, random_params(method.specs(), 1))
    return {"policy": method.replace(params=params), "options": {"seed": seed}}


@pytest.fixture(params=FAMILIES)
def model(request):
    return request.getfixturevalue(request.param)


def picture(number, side=48):
    random = np.random.default_rng(number)
    return Image.fromarray(random.integers(0, 256, (32, side, 3), np.uint8))


PICTURES = [picture(0), picture(1, 32), picture(2)]
ASKED = [(prompt, image) for prompt in PROMPTS for image in PICTURES]


def kept(model, questions, method):
    prompts, images = zip(*questions, strict=True)
    answers = generate(model, prompts, images, method, options=TWO)
    return [answer.kept_indices[0] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_neither_place_nor_batch_changes_what_is_drawn(model, name):
    method = METHODS[name](model, 0)
    together = kept(model, ASKED, method)
    assert [kept(model, [row], method)[0] for row in ASKED] == together
    twice = [ASKED[5], ASKED[2], ASKED[5], ASKED[5]]
    assert kept(model, twice, method) == [together[i] for i in (5, 2, 5, 5)]
    assert kept(model, ASKED, METHODS[name](model, 1)) != together


@pytest.mark.parametrize("name", FAMILIES)
def test_the_seed_of_a_row_is_that_of_its_image_and_question(name, request):
    model = request.getfixturevalue(name)
    out = io.BytesIO()
    PICTURES[0].save(out, "PNG")
    pruner = METHODS["random"](model, 0)

    def seeds(prompts, images):
        return np.asarray(pruner_inputs(model, pruner, prompts, images).seed).tolist()

    def of_request(*questions):
        questions = read_request(model, *questions)
        return seeds(questions.prompts(), pipeline.encode(model, questions.images))

    seed, seed_of_other_question, seed_of_same_bytes, *_ = of_request(
        ["red", "dog", "red"], [*PICTURES[:1] * 2, out.getvalue()]
    )
    assert seed == seed_of_same_bytes != seed_of_other_question
    # Beside a larger image and a longer question, and in an evaluation.
    images = [picture(5, 96), None, PICTURES[:2]]
    large_image_seed, first, second, *_ = of_request([PROMPTS[3], "a", "red"], images)
    assert first == seed and len({large_image_seed, first, second}) == 3
    questions = [BenchmarkQuestion(n, text, text, out.getvalue()) for n, text in enumerate(PROMPTS)]
    encoded = encode_questions(model, questions, batch_size=4, numbers=[7, 5, 6, 9])
    assert seeds(encoded.prompts, encoded.images)[1] == seed
