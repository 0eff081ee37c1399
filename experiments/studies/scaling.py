"""An ablation of the noise gate: tokens are scaled by their gate instead of mixed with noise."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, PolicyConfig, Progress
from stepprune_jax.policy.base import Params, TrainAux
from stepprune_jax.policy.noise import denoise, restore, standardise
from stepprune_jax.policy.objective import total_loss
from stepprune_jax.trained import Aux, StepPrune


class ScaledGate(StepPrune):
    """StepPrune trained without noise; what it has learned is a policy like any other."""

    name = "scale_gate"
    label = "scaling gate"

    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
        **options: Any,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the loss of `StepPrune` with other tokens; the options are those of `gate`."""
        gated = policy.gate(self.params, self.config, key, inputs, progress, **options)
        gated = gated._replace(tokens=scale_tokens(self.params, self.config, inputs, gated.alpha))
        lm_loss = lm_loss_fn(gated.tokens)
        loss = total_loss(self.config, gated, lm_loss, self.config.length_weight)
        return loss, Aux(policy.policy_metrics(TrainAux(gated, lm_loss)), gated.state)


def scale_tokens(
    params: Params, config: PolicyConfig, inputs: Inputs, alpha: Float[Array, "b n"]
) -> Float[Array, "b n d"]:
    """Scales, denoises and restores the image tokens; zero in the padding."""
    image, real = jnp.asarray(inputs.image), inputs.real[..., None]
    x = jnp.where(real, standardise(image, inputs.stats), 0)
    scaled = x * alpha[..., None].astype(x.dtype)
    clean = restore(denoise(params, config, scaled), inputs.stats)
    return jnp.where(real, clean, 0).astype(image.dtype)
