"""The update: its loss, its gradient, its optimizer, and what it may change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import make_run, open_tiny_batches, optimizer_settings
from visual import visual_of

from stepprune_jax import policy
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.models import vlm, weights
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.parallel.placement import place_rows, replicate_like
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.selectors import StepPrune
from stepprune_jax.training import optimizer, step
from stepprune_jax.training.language_loss import ForwardOptions, lm_loss, map_rows
from stepprune_jax.training.step_config import make_step_config


@pytest.fixture(scope="module")
def setup(world, llava_model, tmp_path_factory):
    """The frozen model, the static part of an update, and a batch."""
    run = make_run(*world)
    config = make_step_config(run, llava_model.backbone)
    batch = open_tiny_batches(run, tmp_path_factory.mktemp("run"))[0]
    return llava_model, config, jax.tree.map(jnp.asarray, batch)


def make_state(setup):
    """Returns state, statistics and key on the devices of a run, so that programs are shared."""
    model, config, _ = setup
    state = jax.jit(step.init_state, static_argnums=1)(jax.random.key(0), config)
    return replicate_like(model.params, (state, policy.FeatureStats.start(32), jax.random.key(1)))


def all_logits_loss(params, model, tokens, batch):
    """Computes the loss from logits of every place, with labels made on the host."""
    n = tokens.shape[1]
    with jax.ensure_compile_time_eval():
        targets = jax.tree.map(np.asarray, batch.targets)
    labels = np.full((8, targets.ids.shape[1] - 1 + n), -1)
    for row in range(8):
        row_ids = targets.ids[row, : int(targets.length[row])].tolist()
        answer = targets.target[row][targets.supervised[row]].tolist()
        assert row_ids[-len(answer) :] == answer  # these conversations end with their only answer
        end = len(row_ids) - 1 + n
        labels[row, end - len(answer) - 1 : end - 1] = answer
    tokens = model.backbone.project(params, tokens)
    visual = visual_of(model.config, tokens[:, None])
    ids, length = batch.targets.ids, batch.targets.length
    sequence = assemble(params, model.backbone, ids, length, *visual, capacity=labels.shape[1])
    logits = vlm.prefill(params, model.config, sequence, 0, all_logits=True).logits
    log_prob = jax.nn.log_softmax(logits)
    label_log_prob = jnp.take_along_axis(log_prob, jnp.maximum(labels, 0)[..., None], 2)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, label_log_prob, 0)) / np.sum(labels >= 0)


def test_loss_and_gradient_equal_the_loss_of_all_logits(setup):
    model, config, batch = setup
    tokens = jax.random.normal(jax.random.key(0), (8, 9, 32))
    assert config.forward.rows == 4

    def loss(tokens, params):
        return lm_loss(params, model.backbone, config.forward, tokens, batch.targets)

    def expected_loss(tokens, params):
        return all_logits_loss(params, model, tokens, batch)

    value, grad = jax.jit(jax.value_and_grad(loss))(tokens, model.params)
    expected, expected_grad = jax.jit(jax.value_and_grad(expected_loss))(tokens, model.params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert float(jnp.abs(grad).max()) > 1e-3
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-7)


def test_int8_weights_give_the_loss_of_their_float_values(setup, llava_folder):
    model, config, batch = setup
    params = load_vlm(llava_folder, dtype=jnp.float32, weights="int8", progress=False).params
    float_leaves = {
        path: leaf.value * leaf.scale[..., None, :] if isinstance(leaf, Int8Kernel) else leaf
        for path, leaf in weights.flatten(params).items()
    }
    tokens = jax.random.normal(jax.random.key(0), (8, 9, 32))

    def loss(tokens, params):
        return lm_loss(params, model.backbone, config.forward, tokens, batch.targets)

    compute = jax.jit(jax.value_and_grad(loss))
    value, grad = compute(tokens, params)
    expected, expected_grad = compute(tokens, weights.unflatten(float_leaves))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-3, atol=1e-6)
    full_value, _ = compute(tokens, model.params)
    assert full_value != value and abs(full_value - value) < 0.01 * full_value


def test_map_rows_keeps_the_order_of_the_rows():
    x = np.arange(12.0).reshape(6, 2)
    for rows in (0, 2):
        options = ForwardOptions(rows=rows)
        doubled, sums = map_rows(lambda x: (x * 2, x.sum(1)), options, jnp.asarray(x))
        np.testing.assert_array_equal(doubled, 2 * x)
        np.testing.assert_array_equal(sums, x.sum(1))


@pytest.mark.supports("llava", "train")
def test_an_update_changes_only_the_selector(setup):
    model, config, batch = setup
    state, stats, key = make_state(setup)
    structure = jax.tree.structure(state)
    model_before = jax.tree.map(np.array, model.params)
    weights_before = jax.tree.map(np.array, state.params)
    for number in range(2):  # the learning rate of the first update is 0
        state, metrics = step.update(
            model.params, state, stats, batch, key=key, step=np.int32(number), config=config
        )
    assert jax.tree.structure(state) == structure
    model_after = jax.tree.map(np.array, model.params)
    jax.tree.map(np.testing.assert_array_equal, model_before, model_after)
    is_changed = jax.tree.map(lambda a, b: bool((a != b).any()), weights_before, state.params)
    assert is_changed["stop"] and is_changed["decoder"]["pointer"]["key"]["kernel"]
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer)}
    assert shapes <= {
        (),
        (3,),  # the polynomial of Muon's iteration
        *(leaf.shape for leaf in jax.tree.leaves(state.params)),
    }
    assert float(metrics["lr"]) == pytest.approx(config.phase.optimizer.lr / 2)


@pytest.mark.slow
def test_several_devices_give_the_update_of_one_device(setup):
    model, config, batch = setup
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    sharded_params = jax.device_put(
        model.params, shardings(model.params, model.backbone.SHARDING_RULES, mesh)
    )
    results = []
    for params, params_mesh in ((model.params, None), (sharded_params, mesh)):
        state, stats, key = replicate_like(params, make_state(setup))
        rows = place_rows(params_mesh, batch)
        forward = config.forward._replace(mesh=params_mesh)
        mesh_config = dataclasses.replace(config, forward=forward)
        state, metrics = step.update(
            params, state, stats, rows, key=key, step=np.int32(0), config=mesh_config
        )
        names = ("loss", "lm_loss", "k_mean", "grad_norm")
        results.append([float(metrics[name]) for name in names])
    np.testing.assert_allclose(*results, rtol=1e-5)
    # With another layout of the state, the next update would be another program.
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state, metrics)))


def test_a_batch_that_is_not_finite_is_skipped_and_counted(setup):
    model, config, batch = setup
    state, stats, key = make_state(setup)
    state_before = jax.tree.map(np.array, state)
    nan_params = jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    counts = []
    for number, params in enumerate((nan_params, nan_params, model.params, nan_params)):
        state, metrics = step.update(
            params, state, stats, batch, key=key, step=np.int32(number), config=config
        )
        assert np.isfinite(metrics["loss"]) == (params is not nan_params)
        counts.append((int(metrics["skipped"]), int(metrics["skipped_in_row"])))
        if number == 1:
            state_after = jax.tree.map(np.array, state)
    jax.tree.map(np.testing.assert_array_equal, state_before[:3], state_after[:3])
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    settings = optimizer_settings(lr=1.0, final_lr=0.2, warmup=10)
    rates = [float(optimizer.learning_rate(settings, 110, i)) for i in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(rates, [0, 0.5, 1, 0.6, 0.2], rtol=1e-6)


def test_statistics_count_the_real_tokens_of_all_images(setup):
    model, config, batch = setup
    features = jax.jit(lambda params: step.encode_rows(params, config, batch.pixels))(model.params)
    features, (_, stats, _) = features.reshape(-1, 32), make_state(setup)
    num_tokens = np.full(8, 9, np.int32)
    for pixels, counts in ((batch.pixels, num_tokens), (255 - batch.pixels, 0 * num_tokens)):
        stats = step.gather_stats(model.params, stats, pixels, counts, config=config)
    assert float(stats.count) == 72
    np.testing.assert_allclose(stats.mean, features.mean(0), atol=1e-5)
    np.testing.assert_allclose(stats.var, features.var(0), rtol=1e-3)


def test_large_gradients_of_a_hazard_stop_do_not_shrink_other_gradients():
    hazard, aligned = (
        StepPrune(config=policy.PolicyConfig(stop=stop)) for stop in ("hazard", "aligned")
    )
    moments = {}
    for selector in (hazard, aligned):
        for size in (1.0, 1e6):
            ones = jnp.ones(3)
            grads = {"hazard": {"out": size * ones}, "stop": size * ones, "pointer": ones}
            chain = optimizer.make_optimizer(optimizer_settings(clip=0.5), 100, selector)
            _, state = chain.update(grads, chain.init(grads), grads, step=0)
            moments[selector, size] = optax.tree.get(state, "mu")["pointer"]
    np.testing.assert_array_equal(moments[hazard, 1.0], moments[hazard, 1e6])
    assert moments[aligned, 1e6].max() < 1e-4 * moments[hazard, 1e6].max()


def test_muon_orthogonalizes_matrices_and_adam_updates_other_weights():
    settings = optimizer_settings(
        lr=0.1, final_lr=0.1, warmup=0, muon_lr=0.5, weight_decay=0.0, clip=1e9
    )
    random = np.random.default_rng(0)
    grads = {
        "kernel": jnp.asarray(random.normal(size=(8, 8)), jnp.float32),
        "bias": jnp.asarray([3.0, -0.2, 0.01]),
    }
    chain = optimizer.make_optimizer(settings, 10, StepPrune())
    updates, _ = chain.update(grads, chain.init(grads), grads, step=0)
    # Adam with Nesterov momentum begins with the sign times .9 x .1 / (1 - .9^2) + 1 = 1.473684.
    np.testing.assert_allclose(updates["bias"], [-0.1473684, 0.1473684, -0.1473684], rtol=1e-4)
    # Muon's direction has singular values near one, and the singular vectors of the gradient.
    singular_values = np.linalg.svd(updates["kernel"] / 0.5, compute_uv=False)
    assert singular_values.min() > 0.6 and singular_values.max() < 1.3
    u, _, vh = np.linalg.svd(grads["kernel"])
    rotated = -10 * u.T @ np.asarray(updates["kernel"]) @ vh.T
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=0.05)
    assert (np.diag(rotated) > 0).all()
