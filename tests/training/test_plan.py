"""What an update takes: no gradient of a frozen weight, memory that the mesh divides."""

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
from stepprune_jax.training.step import StepConfig

SEVEN_B = LlavaConfig.from_hf(MODELS["llava-7b"])
ROWS, BUCKET = 4, Bucket(ids=100, text=40, targets=30)


def seven_b(weights="full", **options):
    return StepConfig(
        Llava(SEVEN_B),
        StepPrune(),
        steps=100,
        optimizer=optimizer_settings(),
        text_gate_anneal=0.1,
        forward=ForwardOptions(rows=2, **options),
        weights=weights,
    )


def policy_flops(setup):
    """Those of the policy's own loss and gradient, in front of a model that costs nothing."""
    shape, n, width = jax.ShapeDtypeStruct, SEVEN_B.max_image_tokens, SEVEN_B.vision.hidden_size
    inputs = policy.Inputs(
        shape((ROWS, n, width), jnp.bfloat16),
        shape((ROWS, BUCKET.text, 4096), jnp.bfloat16),
        text_mask=shape((ROWS, BUCKET.text), bool),
    )
    params = jax.eval_shape(lambda: setup.method.init_params(jax.random.key(0)))

    def loss(params, inputs):
        progress = policy.Progress(*(jnp.float32(0.5) for _ in range(3)))
        standardised = inputs._replace(stats=FeatureStats.start(width))
        method = setup.method.replace(params=params)
        return method.loss(jax.random.key(0), standardised, jnp.sum, progress)

    return traced_flops(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "int8"])
def test_frozen_weights_have_no_gradient_in_the_program(kind):
    setup = seven_b(kind)
    traced = dry_run.trace_update(setup, jnp.bfloat16, ROWS, BUCKET)
    found = traced_flops(traced.jaxpr) - policy_flops(setup)
    length = BUCKET.ids - 1 + SEVEN_B.max_image_tokens
    cost = llm_flops(SEVEN_B.text, length, num_logits=BUCKET.targets)
    vision = vision_flops(Llava(SEVEN_B), [SEVEN_B.grid])
    # Forward once; backward a product for each product with a weight, and two for each of
    # attention's, both sides of which come from the tokens. A weight's gradient would be another.
    weights = 2 * (cost.projections + cost.mlp + cost.head) + vision["projector"]
    row = vision["tower"] + 2 * weights + 3 * 2 * cost.attention
    assert found == pytest.approx(ROWS * row, rel=1e-3)
    again = dry_run.trace_update(
        seven_b(kind, execution=Execution(remat=True)), jnp.bfloat16, ROWS, BUCKET
    )
    more = traced_flops(again.jaxpr) - policy_flops(setup) - found
    # Blocks are computed again, but for their last product, which nothing needs.
    assert 0.7 < more / (ROWS * 2 * cost.layer_macs) <= 1


def test_hours_by_hand():
    found = dry_run.RunCost(2, 0, None, 3.6e15, {})
    device = ACCELERATORS["a100-80"]._replace(flops=1e14)
    # 100 updates of 3.6e15 at 2 devices x 1e14 x 1/2: 3,600 s.
    assert found.hours(100, device, 0.5) == pytest.approx(1)
