"""A question answered from all visual tokens and from those that a method keeps."""

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
from stepprune_jax.visualize.overlays import seen_patches
from stepprune_jax.visualize.patches import draw_panel

# Modes of the number of tokens to keep.
EXACTLY, ON_AVERAGE, BY_ITSELF = "exactly", "on average", "where the policy stops"
OPTIONS = RunOptions(max_tokens=64)
_SIDE = 480  # pixels of the picture


class Choice(NamedTuple):
    """A method that the page offers, and the modes of the number of tokens that it supports."""

    pruner: str
    policy: TrainedPruner | None
    modes: tuple[str, ...]

    def build(self, mode: str, count: float | int) -> Pruner:
        """Builds the pruner; a policy that stops by itself ignores the count."""
        budget = {
            EXACTLY: Budget("count", int(count)),
            ON_AVERAGE: Budget("mean", count),
            BY_ITSELF: Budget("own"),
        }[mode]
        return build_pruner(self.pruner, budget, policy=self.policy)


class Comparison(NamedTuple):
    """Answers from all tokens and from the kept ones, their times, the image with the latter."""

    full: tuple[Answer, Times]
    pruned: tuple[Answer, Times]
    picture: Image.Image


def list_choices(model: VLM, policies: Mapping[str, TrainedPruner]) -> dict[str, Choice]:
    """Lists the methods that can prune a model at any exact budget by name, policies first.

    Policies of other models, by their displayed names, are skipped.
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
    most = model.config.max_image_tokens
    for name, kind in PRUNERS.items():
        if kind.config_type is not None or "count" not in kind.budgets:
            continue
        choice = Choice(name, None, (EXACTLY,))
        try:
            choice.build(EXACTLY, max(2, most // 4)).check(model.config, most)
        except UserError:
            continue
        choices[name] = choice
    return choices


def compare(model: VLM, pruner: Pruner, image: Image.Image, question: str) -> Comparison:
    """Answers from all tokens and from those that a method keeps, and draws the latter.

    A question or a request that method or model do not support is a ValueError.
    """
    image = open_image(image, as_shown=True)
    if not question.strip():  # which `generate` accepts beside an image
        raise UserError("the question is empty")
    generators = Generator(model, options=OPTIONS), Generator(model, pruner, options=OPTIONS)
    request = generators[0].read([question], [image])
    full, pruned = (timed_answer(generator, request) for generator in generators)
    answer, _ = pruned
    seen = seen_patches(model, image, answer.grids[0], answer.kept_indices[0])
    picture = draw_panel(seen.image, seen.patches, seen.grid, _SIDE)
    return Comparison(full, pruned, picture)
