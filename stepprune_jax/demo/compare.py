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

# Modes: how the number of tokens to keep is decided, as the page names them. In the mode
# `BY_ITSELF`, the policy decides the number of tokens for each image.
EXACTLY, ON_AVERAGE, BY_ITSELF = "exactly", "on average", "where the policy stops"
OPTIONS = RunOptions(max_tokens=64)  # Short answers fit the page.
_SIDE = 480  # Side of the picture in pixels, which fits a column of the page.


class Choice(NamedTuple):
    """A pruning method on the page. Made by `list_choices`.

    Attributes:
        pruner: name of the pruner.
        policy: the policy of a trained pruner; None for other pruners.
        modes: modes that the method supports. The first mode is the default.
    """

    pruner: str
    policy: TrainedPruner | None
    modes: tuple[str, ...]

    def build(self, mode: str, count: float | int) -> Pruner:
        """Builds the pruner.

        Args:
            mode: one of `modes`.
            count: number of tokens to keep of each image. `BY_ITSELF` ignores it.
        """
        budget = {
            EXACTLY: Budget("count", int(count)),
            ON_AVERAGE: Budget("mean", count),
            BY_ITSELF: Budget("adaptive"),
        }[mode]
        return build_pruner(self.pruner, budget, policy=self.policy)


class Comparison(NamedTuple):
    """Two answers to one question. Made by `compare`.

    Attributes:
        full: the answer from all tokens, and its times.
        pruned: the answer from the kept tokens, and its times.
        picture: the image with its kept tokens highlighted.
    """

    full: tuple[Answer, Times]
    pruned: tuple[Answer, Times]
    picture: Image.Image


def list_choices(model: VLM, policies: Mapping[str, TrainedPruner]) -> dict[str, Choice]:
    """Returns the pruning methods that the page offers for a model.

    Args:
        model: the model that answers.
        policies: policies by their names on the page. Policies of other models are skipped.

    Returns:
        The methods by their names on the page: first the policies, then all pruners without
        training that can keep any given number of the model's tokens.
    """
    choices = {}
    for name, policy in policies.items():
        try:
            policy.check_fits(model.config)
        except UserError:
            continue
        modes = [EXACTLY]
        if policy.has_stop:
            modes = [BY_ITSELF, *([ON_AVERAGE] if policy.calibration else []), EXACTLY]
        choices[name] = Choice(policy.name, policy, tuple(modes))
    max_tokens = model.config.max_image_tokens
    for name, pruner_type in PRUNERS.items():
        if pruner_type.config_type is not None or "count" not in pruner_type.budgets:
            continue
        choice = Choice(name, None, (EXACTLY,))
        try:
            # Checked with a typical count only for the exception of a method that does not suit the
            # model.
            choice.build(EXACTLY, max(2, max_tokens // 4)).check(model.config, max_tokens)
        except UserError:
            continue
        choices[name] = choice
    return choices


def compare(model: VLM, pruner: Pruner, image: Image.Image, question: str) -> Comparison:
    """Answers a question from all tokens and from the kept tokens, and draws the kept tokens.

    Args:
        model: the model that answers.
        pruner: selects the tokens to keep.
        image: the image.
        question: the question about the image.

    Raises:
        UserError: the question is empty, or model or method do not support the input.
    """
    image = open_image(image, as_shown=True)
    if not question.strip():  # `generate` accepts an image without a question.
        raise UserError("the question is empty")
    generators = Generator(model, options=OPTIONS), Generator(model, pruner, options=OPTIONS)
    request = generators[0].read([question], [image])
    full, pruned = (timed_answer(generator, request) for generator in generators)
    pruned_answer, _ = pruned
    rows, columns = pruned_answer.grids[0]
    square = square_image(model, image, (rows, columns), pruned_answer.kept_indices[0])
    picture = draw_panel(square.image, square.patches, square.grid, _SIDE)
    return Comparison(full, pruned, picture)
