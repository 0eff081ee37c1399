"""Choices and answers of the demo, without its page."""

import jax
import numpy as np
import pytest
from PIL import Image
from visual import as_a_phone_stores

from stepprune_jax import FeatureStats, PolicyConfig, init_policy
from stepprune_jax.demo.compare import BY_ITSELF, EXACTLY, ON_AVERAGE, compare, list_choices
from stepprune_jax.demo.examples import shapes_examples
from stepprune_jax.selectors import StepPrune
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.visualize.overlays import square_image
from stepprune_jax.visualize.patches import read_square

CONFIG = PolicyConfig(feature_width=32, text_width=48, width=16, num_heads=2, mlp_ratio=2)
TABLE = Calibration((1.0, 4.0), (6.0, -6.0), (1.0, 0.0), (0.0, 1.0), 9.0, 5)
IMAGE = Image.fromarray(np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3))


@pytest.fixture(scope="module")
def choices(llava_model):
    params, stats = init_policy(jax.random.key(0), CONFIG), FeatureStats.start(32)
    other_config = PolicyConfig(feature_width=16, num_heads=2)
    policies = {
        "mine": StepPrune(params=params, config=CONFIG, stats=stats),
        "calibrated": StepPrune(params=params, config=CONFIG, stats=stats, calibration=TABLE),
        "of another model": StepPrune(
            params=init_policy(jax.random.key(0), other_config), config=other_config, stats=None
        ),
    }
    return list_choices(llava_model, policies)


def test_choices_are_the_methods_that_can_prune_the_model(choices):
    assert list(choices)[:2] == ["mine", "calibrated"] and "of another model" not in choices
    assert {"random", "grid", "cls", "visionzip"} < choices.keys()
    assert not {"all", "stepprune", "autoselect"} & choices.keys()
    assert choices["mine"].modes == (BY_ITSELF, EXACTLY)
    assert choices["calibrated"].modes == (BY_ITSELF, ON_AVERAGE, EXACTLY)
    assert choices["grid"].modes == (EXACTLY,)


def test_both_answers_and_the_kept_patches_are_shown(llava_model, choices):
    method = choices["mine"].build(EXACTLY, 3)
    comparison = compare(llava_model, method, as_a_phone_stores(IMAGE.convert("RGBA")), "red dog?")
    (full, _), (pruned, times) = comparison.full, comparison.pruned
    assert (full.kept, pruned.kept) == (9, 3) and times.first_token > times.compiling
    # Patches have 160 pixels. Outside of its mark, a kept patch is unchanged.
    square = square_image(llava_model, IMAGE, (3, 3), []).image
    is_unchanged = (np.asarray(comparison.picture) == read_square(square, 480)).all(-1)
    bright = np.flatnonzero(is_unchanged.reshape(3, 160, 3, 160).mean((1, 3)) > 0.5).tolist()
    assert bright == sorted(pruned.kept_indices[0])
    pruner = choices["calibrated"].build(ON_AVERAGE, 2.5)
    assert pruner.bias == pytest.approx(0.0)


def test_an_image_is_in_the_middle_of_its_square(qwen_model):
    backbone, settings = qwen_model.backbone, qwen_model.image_settings
    wide_image = IMAGE.resize((90, 20))
    pixels = backbone.preprocess(settings, [wide_image])
    rows, columns = backbone.grids(pixels)[0].tolist()
    assert rows < columns
    square = square_image(qwen_model, wide_image, (rows, columns), [0, rows * columns - 1, -1])
    assert square.grid == columns and len(square.patches) == 2
    resized = backbone.visible_image(settings, wide_image)
    side = resized.width // columns
    for patch, (left, top) in zip(square.patches, ((0, 0), (columns - 1, rows - 1)), strict=True):
        location, square_pixels = divmod(patch, columns)[::-1], square.image
        crops = [square_pixels.crop([side * (x + n) for n in (0, 1) for x in location])]
        crops.append(resized.crop([side * (x + n) for n in (0, 1) for x in (left, top)]))
        assert crops[0].tobytes() == crops[1].tobytes()


def test_an_empty_question_is_refused(llava_model, choices):
    with pytest.raises(ValueError, match="question is empty"):
        compare(llava_model, choices["mine"].build(EXACTLY, 3), IMAGE, " ")


def test_the_examples_have_different_questions():
    examples = shapes_examples()[:3]
    assert len({question for _, question in examples}) == 3
    assert examples[0][0].tobytes() == shapes_examples()[0][0].tobytes()
