"""Training on sampled sets: the reward is that of the tokens that are kept, as at inference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_run, metrics, open_tiny

from stepprune_jax import load_policy, save_policy
from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.selectors import StepPrune, VisionSelectorConfig
from stepprune_jax.training import settings, step, train
from stepprune_jax.training.language_loss import answer_losses, lm_loss


@pytest.fixture(scope="module")
def first(world, llava_model, tmp_path_factory):
    """A policy of the run's method and shape."""
    setup = settings.make_step_config(make_run(*world), llava_model.backbone)
    policy = StepPrune.init(jax.random.key(0), setup.method.config, FeatureStats.start(32))
    return save_policy(policy, tmp_path_factory.mktemp("first") / "policy.safetensors")


SAMPLED = {"policy_gradient.samples": 3, "policy_gradient.longest": 0.5}


@pytest.mark.slow
def test_a_second_stage_begins_with_a_policy_and_improves_it(world, first, tmp_path):
    run = make_run(*world, start=str(first), **SAMPLED)
    train(run, tmp_path)
    names = {"loss", "lm_loss", "reward", "reward_std", "k_mean", "entropy", "grad_norm_stop"}
    for row in metrics(tmp_path):
        assert names <= {*row} and 0 < row["reward"] < 1 and 1 <= row["k_mean"] <= 4
    before, after = load_policy(first), load_policy(tmp_path / "policy.safetensors")
    np.testing.assert_array_equal(before.stats.mean, after.stats.mean)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), before.params, after.params)
    decay = 6 * run.optimizer.muon_lr * run.optimizer.weight_decay
    assert max(jax.tree.leaves(moved["denoiser"])) < decay  # which no set that is kept passes
    assert min(jax.tree.leaves((moved["stop"], moved["encoder"]))) > decay


def test_what_cannot_begin_or_be_sampled_is_refused(world, first, tmp_path):
    wider = make_run(*world, start=str(first), **{"policy.width": 16}, **SAMPLED)
    with pytest.raises(ValueError, match=r"config\.start .*expected a policy of the run's method"):
        train(wider, tmp_path / "wider")
    heads = make_run(*world, start=str(first), **{"policy.num_heads": 4})  # of the same shapes
    with pytest.raises(ValueError, match=r"of 4 heads \(config\.policy\.num_heads\), not 2"):
        train(heads, tmp_path / "heads")
    scorer = make_run(*world, **SAMPLED)
    scorer = dataclasses.replace(scorer, method="visionselector", policy=VisionSelectorConfig())
    with pytest.raises(ValueError, match=r"config\.policy_gradient\.samples is 3, expected 0"):
        train(scorer, tmp_path / "scorer")


def test_sets_are_answered_at_the_positions_that_are_asked_for(world, llava_model, tmp_path):
    run, model = make_run(*world, **SAMPLED), llava_model
    batch = jax.tree.map(jnp.asarray, open_tiny(run, tmp_path)[0])
    setup = settings.make_step_config(run, model.backbone)
    image = step.selector_inputs(model.params, setup, batch).image
    frozen = (model.params, model.backbone, setup.forward)

    def losses(counts, positions="original"):
        index = jnp.broadcast_to(jnp.arange(9), (8, len(counts), 9))
        valid = index < jnp.array(counts)[:, None]
        tokens = jnp.where(valid[..., None], image[:, None], 0)
        kept = Pruned(jnp.where(valid, index, -1), tokens, valid, valid.sum(-1))
        return jax.jit(answer_losses, static_argnums=(1, 2, 5))(
            *frozen, kept, batch.targets, positions
        )

    found = losses((9, 4, 9))
    supervised = batch.targets.supervised.sum(1)
    mean = (found[:, 0] * supervised).sum() / supervised.sum()
    np.testing.assert_allclose(mean, lm_loss(*frozen, image, batch.targets), rtol=1e-5)
    np.testing.assert_allclose(found[:, 0], found[:, 2], rtol=1e-5)
    compact = losses((9, 4), "compact")  # of all tokens, the ids are the same
    np.testing.assert_allclose(compact[:, 0], found[:, 0], rtol=1e-5)
    assert (jnp.abs(compact[:, 1] - found[:, 1]) > 1e-5).all()
