"""Training by RLOO: rewards come from the kept tokens only, as at inference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_run, metrics, open_tiny_batches

from stepprune_jax import load_policy, save_policy
from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.selectors import StepPrune, VisionSelectorConfig
from stepprune_jax.training import step, train
from stepprune_jax.training.language_loss import answer_losses, lm_loss
from stepprune_jax.training.step_config import make_step_config

RLOO_CHANGES = {"recipe": "rloo", "rloo.samples": 3, "rloo.longest": 0.5, "rloo.muon_lr": 0.015}


@pytest.fixture(scope="module")
def start_file(world, llava_model, tmp_path_factory):
    """File of a policy with the method and the shape of the run."""
    config = make_step_config(make_run(*world), llava_model.backbone)
    policy = StepPrune.init(jax.random.key(0), config.selector.config, FeatureStats.start(32))
    return save_policy(policy, tmp_path_factory.mktemp("start") / "policy.safetensors")


@pytest.mark.slow
def test_rloo_improves_a_policy_that_a_run_starts_with(world, start_file, tmp_path):
    run = make_run(*world, start=str(start_file), **RLOO_CHANGES)
    train(run, tmp_path)
    names = {"loss", "lm_loss", "reward", "reward_std", "k_mean", "entropy", "grad_norm_stop"}
    for row in metrics(tmp_path):
        assert names <= {*row} and 0 < row["reward"] < 1 and 1 <= row["k_mean"] <= 4
    before, after = load_policy(start_file), load_policy(tmp_path / "policy.safetensors")
    np.testing.assert_array_equal(before.stats.mean, after.stats.mean)
    change = jax.tree.map(lambda a, b: float(abs(a - b).max()), before.params, after.params)
    max_decay = 6 * run.rloo.muon_lr * run.optimizer.weight_decay
    # Kept tokens do not pass through the denoiser, so only weight decay changes it.
    assert max(jax.tree.leaves(change["denoiser"])) < max_decay
    assert min(jax.tree.leaves((change["stop"], change["encoder"]))) > max_decay


def test_an_unfit_start_or_method_is_refused(world, start_file, tmp_path):
    wider = make_run(*world, start=str(start_file), **{"policy.width": 16}, **RLOO_CHANGES)
    with pytest.raises(ValueError, match=r"config\.start .*expected a policy of the run's method"):
        train(wider, tmp_path / "wider")
    # The shapes of the weights are the same.
    more_heads = make_run(*world, start=str(start_file), **{"policy.num_heads": 4})
    with pytest.raises(ValueError, match=r"of 4 heads \(config\.policy\.num_heads\), not 2"):
        train(more_heads, tmp_path / "heads")
    run = make_run(*world, **RLOO_CHANGES)
    with pytest.raises(ValueError, match=r"config\.recipe is 'rloo', expected gate or auto"):
        dataclasses.replace(run, method="visionselector", policy=VisionSelectorConfig())
    with pytest.raises(ValueError, match=r"rloo\.length_weight is 0\.1, expected None, as autos"):
        make_run(*world, method="autoselect", **RLOO_CHANGES | {"rloo.length_weight": 0.1})


def test_subsets_are_answered_at_the_chosen_positions(world, llava_model, tmp_path):
    run, model = make_run(*world, **RLOO_CHANGES), llava_model
    batch = jax.tree.map(jnp.asarray, open_tiny_batches(run, tmp_path)[0])
    config = make_step_config(run, model.backbone)
    image = step.selector_inputs(model.params, config, batch).image
    frozen = (model.params, model.backbone, config.forward)

    def compute_losses(counts, positions="original"):
        index = jnp.broadcast_to(jnp.arange(9), (8, len(counts), 9))
        valid = index < jnp.array(counts)[:, None]
        tokens = jnp.where(valid[..., None], image[:, None], 0)
        kept = Pruned(jnp.where(valid, index, -1), tokens, valid, valid.sum(-1))

        def compute(params, kept):
            return answer_losses(
                params, *frozen[1:], kept=kept, targets=batch.targets, positions=positions
            )

        return jax.jit(compute)(model.params, kept)

    losses = compute_losses((9, 4, 9))
    num_supervised = batch.targets.supervised.sum(1)
    mean = (losses[:, 0] * num_supervised).sum() / num_supervised.sum()
    np.testing.assert_allclose(mean, lm_loss(*frozen, image, batch.targets), rtol=1e-5)
    np.testing.assert_allclose(losses[:, 0], losses[:, 2], rtol=1e-5)
    # All tokens have the same position ids in both modes.
    compact = compute_losses((9, 4), "compact")
    np.testing.assert_allclose(compact[:, 0], losses[:, 0], rtol=1e-5)
    assert (jnp.abs(compact[:, 1] - losses[:, 1]) > 1e-5).all()
