"""A question answered from all visual tokens and from those that a method keeps."""

from collections.abc import Mapping
from typing import NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import check_fits
from stepprune_jax.data.images import open_image
from stepprune_jax.inference.answer import Answer, generate
from stepprune_jax.pruning import PRUNERS, Budget, Method, Policy, make_method

# Modes of the number of tokens to keep.
EXACTLY, ON_AVERAGE, BY_ITSELF = "exactly", "on average", "where the policy stops"
MAX_TOKENS = 64


class Choice(NamedTuple):
    """A method that the page offers.

    Attributes:
        pruner: its name in `PRUNERS`.
        policy: policy of a trained pruner.
        modes: supported modes of the number of tokens.
    """

    pruner: str
    policy: Policy | None
    modes: tuple[str, ...]

    def method(self, mode: str, count: float | int) -> Method:
        """Builds the method.

        Args:
            mode: one of `modes`.
            count: tokens to keep; ignored if the policy stops by itself.

        Raises:
            ValueError: an unsupported mode or count.
        """
        if mode not in self.modes:
            raise ValueError(f"{self.pruner} cannot keep tokens {mode!r}: {', '.join(self.modes)}")
        budget = {
            EXACTLY: Budget("count", int(count)),
            ON_AVERAGE: Budget("mean", count),
            BY_ITSELF: Budget("own"),
        }[mode]
        return make_method(self.pruner, budget, policy=self.policy)


class Comparison(NamedTuple):
    """Both answers.

    Attributes:
        image: the image, RGB.
        full: the answer from all tokens.
        pruned: the answer from the kept tokens.
    """

    image: Image.Image
    full: Answer
    pruned: Answer


def list_choices(model: VLM, policies: Mapping[str, Policy]) -> dict[str, Choice]:
    """Lists the methods that can prune a model at any exact budget.

    Args:
        model: the model.
        policies: policies by displayed name; those of another model are skipped.

    Returns:
        Choices by name, policies first.
    """
    choices = {}
    for name, policy in policies.items():
        try:
            check_fits(policy, model.config)
        except ValueError:
            continue
        modes = (EXACTLY,)
        if policy.has_stop:
            modes = (BY_ITSELF, EXACTLY)
            if policy.calibration is not None:
                modes = (BY_ITSELF, ON_AVERAGE, EXACTLY)
        choices[name] = Choice(policy.method, policy, modes)
    for name, kind in PRUNERS.items():
        if kind.config_type is not None or "count" not in kind.budgets:
            continue
        choice = Choice(name, None, (EXACTLY,))
        few = max(2, model.config.max_image_tokens // 4)
        try:
            choice.method(EXACTLY, few).pruner.check(model.config, model.config.max_image_tokens)
        except ValueError:
            continue
        choices[name] = choice
    return choices


def compare(
    model: VLM,
    choice: Choice,
    image: Image.Image,
    question: str,
    mode: str,
    count: float | int,
) -> Comparison:
    """Answers from all tokens, and from the kept ones.

    A program of new shapes is compiled and run once before it is timed, so times are those of warm
    programs.

    Args:
        model: the model.
        choice: the method.
        image: the image, of any Pillow mode.
        question: the question.
        mode: one of the choice's modes.
        count: tokens to keep.

    Returns:
        Both answers.

    Raises:
        ValueError: no question, or a request that method or model does not support.
    """
    if not question.strip():
        raise ValueError("the question is empty")
    image = open_image(image)
    method = choice.method(mode, count)
    (full,) = generate(model, [question], [image], max_tokens=MAX_TOKENS)
    (pruned,) = generate(model, [question], [image], pruner=method, max_tokens=MAX_TOKENS)
    return Comparison(image, full, pruned)
