"""Operations in the efficiency table equal the operations of the traced programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.efficiency import measure
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.efficiency.rows import read_rows
from stepprune_jax.flops import traced_flops
from stepprune_jax.inference import greedy, pipeline, programs
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models import vlm
from stepprune_jax.policy import FeatureStats
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import TrainedPruner

TEXT = 64
# StepPrune's loop selects blocks of 16 tokens, and the traced program counts one block.
# The program of "blind" leaves out the tower, whose tokens nothing reads.
ROWS = [
    f"{name}@{16 if name == 'stepprune' else 64}"
    for name in PRUNERS
    if name not in ("all", "blind") and not PRUNERS[name].keeps_images
]


@pytest.fixture(scope="module")
def model():
    """Returns LLaVA-7B without its weights."""
    backbone = find_backbone("llava-7b")
    return VLM(vlm.abstract_params(backbone, jnp.float32), backbone)


@pytest.fixture(scope="module")
def batch(model):
    return measure.random_batch(model.backbone, 1, TEXT)


@pytest.mark.parametrize("name", ["all", *ROWS])
def test_the_operations_of_a_row_equal_the_operations_of_its_program(model, batch, name):
    """The formula omits the selection of some methods, less than 0.4 percent."""
    (row,) = read_rows([name], model.config, decoder_layers=1, dtype="float32")
    pruner, config = row.pruner, model.config
    if isinstance(pruner, TrainedPruner):
        params = jax.eval_shape(pruner.init_params, jax.random.key(0))
        pruner = pruner.replace(params=params, stats=FeatureStats.start(config.feature_width))
    planned = plan_batch(model, pruner, batch.prompts, batch.images, RunOptions(2))
    ready = pipeline.prepare_prefill(model, planned)
    schedule = pruner.schedule(config, config.max_image_tokens)
    rows = (schedule.enter, *map(sum, schedule.after))
    # Rows without padding, which the formula does not count.
    plan = dataclasses.replace(ready.plan, slots=tuple(TEXT + tokens for tokens in rows))
    layout = ready.layout._replace(ids=ready.layout.ids[:, : TEXT + 1])

    def run(params, pruner, pairs, layout):
        inputs = pruner, pairs, layout, greedy(())
        return programs.first_tokens(params, model.backbone, *inputs, plan=plan)

    traced = jax.make_jaxpr(run)(model.params, pruner.program(), ready.tokens, layout).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    counted = sum(measure.count_tflops(model.backbone, row, batch).values())
    assert 1e-12 * traced_flops(needed) == pytest.approx(counted, rel=0.004)
    assert 1e-12 * traced_flops(needed) >= 0.9999 * counted
