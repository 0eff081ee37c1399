"""Answers a question from all visual tokens and from the tokens that a method keeps."""

from collections.abc import Mapping
from typing import NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.images import open_image
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.generate import Answer, Generator
from stepprune_jax.inference.timing import Times, timed_answer
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError
from stepprune_jax.visualize.overlays import square_image
from stepprune_jax.visualize.patches import draw_panel

# Modes of the number of tokens to keep, as the page names them.
EXACTLY, ON_AVERAGE, BY_ITSELF = "exactly", "on average", "where the policy stops"
OPTIONS = RunOptions(max_tokens=64)
_SIDE = 480  # Side of the picture in pixels, which fits a column of the page.


class Choice(NamedTuple):
    """A method of the page.

    Attributes:
        pruner: name of the pruner.
        policy: the policy of a trained pruner, or None.
        modes: modes of the number of tokens that the method supports. The first is the default.
    """

    pruner: str
    policy: TrainedPruner | None
    modes: tuple[str, ...]

    def build(self, mode: str, count: float | int) -> Pruner:
        """Builds the pruner. The learned stop (`BY_ITSELF`) ignores `count`."""
        budget = {
            EXACTLY: Budget("count", int(count)),
            ON_AVERAGE: Budget("mean", count),
            BY_ITSELF: Budget("adaptive"),
        }[mode]
        return build_pruner(self.pruner, budget, policy=self.policy)


class Comparison(NamedTuple):
    """Two answers to a question.

    Attributes:
        full: the answer from all tokens, with its times.
        pruned: the answer from the kept tokens, with its times.
        picture: the image with its kept tokens.
    """

    full: tuple[Answer, Times]
    pruned: tuple[Answer, Times]
    picture: Image.Image


def list_choices(model: VLM, policies: Mapping[str, TrainedPruner]) -> dict[str, Choice]:
    """Returns the methods that can prune a model at any exact budget, by name, policies first.

    Args:
        model: the model.
        policies: policies by their names on the page. Policies of other models are skipped.
    """
    choices = {}
    for name, policy in policies.items():
        try:
            policy.check_fits(model.config)
        except UserError:
            continue
        modes = (EXACTLY,)
        if policy.has_stop:
            modes = (BY_ITSELF, EXACTLY)
            if policy.calibration is not None:
                modes = (BY_ITSELF, ON_AVERAGE, EXACTLY)
        choices[name] = Choice(policy.name, policy, modes)
    max_tokens = model.config.max_image_tokens
    for name, pruner_type in PRUNERS.items():
        if pruner_type.config_type is not None or "count" not in pruner_type.budgets:
            continue
        choice = Choice(name, None, (EXACTLY,))
        try:
            choice.build(EXACTLY, max(2, max_tokens // 4)).check(model.config, max_tokens)
        except UserError:
            continue
        choices[name] = choice
    return choices


def compare(model: VLM, pruner: Pruner, image: Image.Image, question: str) -> Comparison:
    """Answers a question from all tokens and from the kept tokens, and draws the kept tokens.

    Raises:
        UserError: the question is empty, or model or method do not support the input.
    """
    image = open_image(image, as_shown=True)
    if not question.strip():  # `generate` accepts an image without a question.
        raise UserError("the question is empty")
    generators = Generator(model, options=OPTIONS), Generator(model, pruner, options=OPTIONS)
    request = generators[0].read([question], [image])
    full, pruned = (timed_answer(generator, request) for generator in generators)
    answer, _ = pruned
    square = square_image(model, image, answer.grids[0], answer.kept_indices[0])
    picture = draw_panel(square.image, square.patches, square.grid, _SIDE)
    return Comparison(full, pruned, picture)
