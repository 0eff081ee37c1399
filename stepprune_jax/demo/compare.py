"""A question answered from all visual tokens and from those that a method keeps."""

from collections.abc import Mapping
from typing import NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import check_fits
from stepprune_jax.data.images import open_image
from stepprune_jax.inference.answer import Answer, generate
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.pruning import PRUNERS, Budget, Method, Policy, make_method
from stepprune_jax.visualize.overlays import seen_patches
from stepprune_jax.visualize.patches import draw_panel

# Modes of the number of tokens to keep.
EXACTLY, ON_AVERAGE, BY_ITSELF = "exactly", "on average", "where the policy stops"
OPTIONS = RunOptions(max_tokens=64)
_SIDE = 480  # pixels of the picture


class Choice(NamedTuple):
    """A method that the page offers, and the modes of the number of tokens that it supports."""

    pruner: str
    policy: Policy | None
    modes: tuple[str, ...]

    def method(self, mode: str, count: float | int) -> Method:
        """Builds the method; a policy that stops by itself ignores the count."""
        budget = {
            EXACTLY: Budget("count", int(count)),
            ON_AVERAGE: Budget("mean", count),
            BY_ITSELF: Budget("own"),
        }[mode]
        return make_method(self.pruner, budget, policy=self.policy)


class Comparison(NamedTuple):
    """Answers from all tokens of an image and from the kept ones, and the image with the latter."""

    full: Answer
    pruned: Answer
    picture: Image.Image


def list_choices(model: VLM, policies: Mapping[str, Policy]) -> dict[str, Choice]:
    """Lists the methods that can prune a model at any exact budget by name, policies first.

    Policies of other models, by their displayed names, are skipped.
    """
    choices = {}
    for name, policy in policies.items():
        try:
            check_fits(policy.config, model.config)
        except ValueError:
            continue
        modes = (EXACTLY,)
        if policy.has_stop:
            modes = (BY_ITSELF, EXACTLY)
            if policy.calibration is not None:
                modes = (BY_ITSELF, ON_AVERAGE, EXACTLY)
        choices[name] = Choice(policy.method, policy, modes)
    most = model.config.max_image_tokens
    for name, kind in PRUNERS.items():
        if kind.config_type is not None or "count" not in kind.budgets:
            continue
        choice = Choice(name, None, (EXACTLY,))
        try:
            choice.method(EXACTLY, max(2, most // 4)).pruner.check(model.config, most)
        except ValueError:
            continue
        choices[name] = choice
    return choices


def compare(model: VLM, method: Method, image: Image.Image, question: str) -> Comparison:
    """Answers from all tokens and from those that a method keeps, and draws the latter.

    A program of new shapes is compiled and run once before it is timed, so times are those of warm
    programs. A question or a request that method or model do not support is a ValueError.
    """
    image = open_image(image, as_shown=True)
    if not question.strip():  # which `generate` accepts beside an image
        raise ValueError("the question is empty")
    (full,) = generate(model, [question], [image], options=OPTIONS)
    (pruned,) = generate(model, [question], [image], method, options=OPTIONS)
    seen = seen_patches(model, image, pruned.grids[0], pruned.kept_indices[0])
    picture = draw_panel(seen.image, seen.patches, seen.grid, _SIDE)
    return Comparison(full, pruned, picture)
