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
from stepprune_jax.models import vlm
from stepprune_jax.policy import FeatureStats
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import TrainedPruner

TEXT = 64
# StepPrune's loop selects blocks of 16 tokens, and the traced program counts one block.
ROWS = [f"{name}@{16 if name == 'stepprune' else 64}" for name in PRUNERS if name != "all"]


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
    prepared = pipeline.prepare(model, pruner, batch.prompts, batch.images, RunOptions(2))
    schedule = pruner.schedule(config, config.max_image_tokens)
    row_tokens = (schedule.enter, *map(sum, schedule.after))
    # The rows have no padding, because the formula does not count padding.
    plan = dataclasses.replace(prepared.plan, slots=tuple(TEXT + tokens for tokens in row_tokens))
    texts = prepared.texts._replace(ids=prepared.texts.ids[:, : TEXT + 1])

    def begin(params, pruner, tokens, texts):
        return programs.begin(params, model.backbone, pruner, tokens, texts, greedy(()), plan=plan)

    traced = jax.make_jaxpr(begin)(model.params, prepared.pruner, prepared.tokens, texts).jaxpr
    live_jaxpr, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    expected = sum(measure.count_tflops(model.backbone, row, batch).values())
    assert 1e-12 * traced_flops(live_jaxpr) == pytest.approx(expected, rel=0.004)
    assert 1e-12 * traced_flops(live_jaxpr) >= 0.9999 * expected
