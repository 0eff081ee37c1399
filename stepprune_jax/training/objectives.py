"""Training objectives: the noise gate, and RLOO on sampled subsets.

`training.step` calls `Objective.loss` in each update. `training.recipes` decides which objective
trains which updates of a run.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from stepprune_jax.policy import Inputs, Progress, Pruned
from stepprune_jax.selectors import Aux, Policy, RlooSettings, rloo_loss

# Names of the objectives, and of the recipes that use only one of them.
GATE, RLOO, WARM_START = "gate", "rloo", "warm_start"


class ModelLoss(NamedTuple):
    """Functions that compute losses of the frozen language model on one batch.

    Axes: b images with their questions, n tokens per image, w channels, g subsets of tokens.

    Attributes:
        of_gated_tokens: maps the gated tokens of each image, [b, n, w], to the mean loss of all
            answer tokens of the batch, []. Differentiable with respect to the tokens.
        of_subsets: maps kept tokens, whose leaves are [b, g, ...], and the name of their position
            ids ("original" or "compact") to the mean loss of each answer, [b, g].
        importance: maps the inputs of a selector to the importance of each token for the model's
            own answer, [b, n].
    """

    of_gated_tokens: Callable[[Float[Array, "b n w"]], Float[Array, ""]]
    of_subsets: Callable[[Pruned, str], Float[Array, "b g"]]
    importance: Callable[[Inputs], Float[Array, "b n"]]


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A loss that trains a selector; hashable, because it is a static argument of compiled updates.

    Attributes:
        name: name in configurations and metrics.
        title: name in lines of the log.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def configure(self, selector: Policy) -> Policy:
        """Returns the selector with the configuration that the objective trains."""
        return selector

    def text_gate(self, share: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the opening of the text gate, from 0 (closed) to 1 (open).

        Args:
            share: fraction of the phase's updates that are done.
        """
        return jnp.ones(())

    @abc.abstractmethod
    def loss(
        self,
        selector: Policy,
        key: Array,
        inputs: Inputs,
        model_loss: ModelLoss,
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the loss of a batch.

        Args:
            selector: the selector with its weights. The caller differentiates with respect to the
                weights.
            key: PRNG key; consumed.
            inputs: images and questions, without the answers.
            model_loss: losses of the frozen model on the batch.
            progress: fraction of the phase that is done, opening of the text gate, and state of the
                objective.

        Returns:
            The loss, and the metrics and the state of the objective.
        """


@dataclasses.dataclass(frozen=True)
class GateObjective(Objective):
    """Language-modeling loss of all tokens, each scaled by a noise gate.

    Attributes:
        text_gate_anneal: fraction of the updates over which the text gate opens; 0 keeps it open.
    """

    name: ClassVar[str] = GATE
    title: ClassVar[str] = "the gate"

    text_gate_anneal: float = 0.0

    def text_gate(self, share: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the opening of the text gate, which rises linearly from 0 to 1."""
        if not self.text_gate_anneal:
            return jnp.ones(())
        return jnp.minimum(1.0, share / self.text_gate_anneal)

    def loss(
        self,
        selector: Policy,
        key: Array,
        inputs: Inputs,
        model_loss: ModelLoss,
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes `Selector.loss` with the loss of the frozen model on gated tokens."""
        return selector.loss(key, inputs, model_loss.of_gated_tokens, progress)


@dataclasses.dataclass(frozen=True)
class RlooObjective(Objective):
    """REINFORCE with a leave-one-out baseline, on sampled subsets of the tokens.

    Attributes:
        settings: number and sizes of the subsets.
        temperature: sampling temperature of the trained selector; None keeps the temperature of the
            selector's configuration.
        length_weight: price of a kept token in the reward; None keeps the price of the selector's
            configuration.
    """

    name: ClassVar[str] = RLOO
    title: ClassVar[str] = "RLOO on sampled subsets"

    settings: RlooSettings
    temperature: float | None = None
    length_weight: float | None = None

    def configure(self, selector: Policy) -> Policy:
        """Returns the selector with the temperature and the price that the objective trains."""
        fields = {"draw": self.temperature, "length_weight": self.length_weight}
        changes = {name: value for name, value in fields.items() if value is not None}
        return selector.replace(config=dataclasses.replace(selector.config, **changes))

    def loss(
        self,
        selector: Policy,
        key: Array,
        inputs: Inputs,
        model_loss: ModelLoss,
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes `rloo_loss`; rewards follow from the frozen model's losses on the answers."""

        def answer_losses(kept: Pruned) -> Float[Array, "b g"]:
            return model_loss.of_subsets(kept, self.settings.positions)

        return rloo_loss(selector, self.settings, key, inputs, answer_losses, progress=progress)


@dataclasses.dataclass(frozen=True)
class WarmStartObjective(Objective):
    """Cross-entropy to the importance of tokens for the frozen model's own answers."""

    name: ClassVar[str] = WARM_START
    title: ClassVar[str] = "the warm start"

    def loss(
        self,
        selector: Policy,
        key: Array,
        inputs: Inputs,
        model_loss: ModelLoss,
        progress: Progress,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes `Selector.warm_start` with the importance from one backward pass."""
        warm = selector.warm_start(key, inputs, model_loss.importance(inputs))
        return warm.loss, Aux({"covered": warm.covered, "entropy": warm.entropy}, progress.state)
