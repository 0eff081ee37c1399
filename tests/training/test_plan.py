"""Operations of an update: no gradient of a frozen weight is computed."""

import jax
import jax.numpy as jnp
import pytest
from tiny_run import optimizer_settings

from stepprune_jax import policy
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.flops import llm_flops, traced_flops, vision_flops
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.accelerators import ACCELERATORS
from stepprune_jax.policy import FeatureStats
from stepprune_jax.selectors import StepPrune
from stepprune_jax.training import dry_run
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.language_loss import ForwardOptions
from stepprune_jax.training.objectives import GateObjective
from stepprune_jax.training.recipes import Phase
from stepprune_jax.training.step_config import StepConfig

LLAVA_7B = LlavaConfig.from_hf(MODELS["llava-7b"])
ROWS, BUCKET = 4, Bucket(ids=100, text=40, targets=30)


def make_config(weights="full", **options):
    """Returns the static part of an update with the 7B model."""
    return StepConfig(
        Llava(LLAVA_7B),
        StepPrune(),
        Phase(GateObjective(0.1), optimizer_settings(), 0, 100),
        forward=ForwardOptions(rows=2, **options),
        weights=weights,
    )


def selector_flops(config):
    """Counts the operations of the selector's own loss and gradient, without a model."""
    n, width = LLAVA_7B.max_image_tokens, LLAVA_7B.vision.hidden_size
    inputs = policy.Inputs(
        jax.ShapeDtypeStruct((ROWS, n, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((ROWS, BUCKET.text, 4096), jnp.bfloat16),
        text_mask=jax.ShapeDtypeStruct((ROWS, BUCKET.text), bool),
    )
    params = jax.eval_shape(lambda: config.selector.init_params(jax.random.key(0)))

    def loss(params, inputs):
        progress = policy.Progress(*(jnp.float32(0.5) for _ in range(3)))
        standardized = inputs._replace(stats=FeatureStats.start(width))
        selector = config.selector.replace(params=params)
        return selector.loss(jax.random.key(0), standardized, jnp.sum, progress)

    return traced_flops(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "int8"])
def test_the_program_computes_no_gradient_of_frozen_weights(weights):
    config = make_config(weights)
    traced = dry_run.trace_update(config, jnp.bfloat16, ROWS, BUCKET)
    model_flops = traced_flops(traced.jaxpr) - selector_flops(config)
    length = BUCKET.ids - 1 + LLAVA_7B.max_image_tokens
    cost = llm_flops(LLAVA_7B.text, length, num_logits=BUCKET.targets)
    vision = vision_flops(Llava(LLAVA_7B), [LLAVA_7B.grid])
    # One forward pass. The backward pass has one product for each product with a weight, and two
    # for each product of attention, whose factors both depend on the tokens. The gradient of a
    # weight would be one more product.
    weight_flops = 2 * (cost.projections + cost.mlp + cost.head) + vision["projector"]
    row_flops = vision["tower"] + 2 * weight_flops + 3 * 2 * cost.attention
    assert model_flops == pytest.approx(ROWS * row_flops, rel=1e-3)
    remat_config = make_config(weights, execution=Execution(remat=True))
    remat_traced = dry_run.trace_update(remat_config, jnp.bfloat16, ROWS, BUCKET)
    recomputed = traced_flops(remat_traced.jaxpr) - selector_flops(config) - model_flops
    # Blocks are computed twice, without their last product, whose result nothing needs.
    assert 0.7 < recomputed / (ROWS * 2 * cost.layer_macs) <= 1


def test_hours_follow_from_operations_and_peak():
    cost = dry_run.RunCost(2, 0, None, 3.6e15, {})
    device = ACCELERATORS["a100-80"]._replace(flops=1e14)
    # 100 updates of 3.6e15 at 2 devices x 1e14 x 1/2 take 3,600 s.
    assert cost.hours(100, device, 0.5) == pytest.approx(1)
