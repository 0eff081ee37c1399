"""Counts of operations in the efficiency table, against counts of the traced programs."""

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
from stepprune_jax.models import vlm
from stepprune_jax.policy import FeatureStats
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import TrainedPruner

TEXT = 64
# A budget of StepPrune is a block of its loop, which is counted once.
ROWS = [f"{name}@{16 if name == 'stepprune' else 64}" for name in PRUNERS if name != "all"]


@pytest.fixture(scope="module")
def model():
    """LLaVA-7B without its weights."""
    backbone = find_backbone("llava-7b")
    return VLM(vlm.abstract_params(backbone, jnp.float32), backbone)


@pytest.fixture(scope="module")
def batch(model):
    return measure.random_batch(model.backbone, 1, TEXT)


@pytest.mark.parametrize("name", ["all", *ROWS])
def test_a_rows_operations_are_those_of_its_program(model, batch, name):
    """The formula leaves out some methods' choice: less than half a percent."""
    (row,) = read_rows([name], model.config, decoder_layers=1, dtype="float32")
    pruner, config = row.pruner, model.config
    if isinstance(pruner, TrainedPruner):
        params = jax.eval_shape(pruner.init_params, jax.random.key(0))
        pruner = pruner.replace(params=params, stats=FeatureStats.start(config.feature_width))
    ready = pipeline.prepare(model, pruner, batch.prompts, batch.images, RunOptions(2))
    schedule = pruner.schedule(config, config.max_image_tokens)
    rows = (schedule.enter, *map(sum, schedule.after))
    # Rows without padding, which the formula does not count.
    plan = dataclasses.replace(ready.plan, slots=tuple(TEXT + tokens for tokens in rows))
    texts = ready.texts._replace(ids=ready.texts.ids[:, : TEXT + 1])

    def begin(params, pruner, tokens, texts):
        return programs.begin(params, model.backbone, pruner, tokens, texts, greedy(()), plan=plan)

    traced = jax.make_jaxpr(begin)(model.params, ready.pruner, ready.tokens, texts).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    counted = sum(measure.count_tflops(model.backbone, row, batch).values())
    assert 1e-12 * traced_flops(needed) == pytest.approx(counted, rel=0.004)
    assert 1e-12 * traced_flops(needed) >= 0.9999 * counted
