"""The step: what it differentiates, what it must not see, and the loss it computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import make_run, open_tiny, optimizer_settings
from visual import visual_of

from stepprune_jax import policy
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.models import vlm, weights
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.int8 import Int8Kernel
from stepprune_jax.parallel.placement import place_rows, replicate_like
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.selectors import StepPrune
from stepprune_jax.training import optimizer, settings, step
from stepprune_jax.training.language_loss import ForwardOptions, lm_loss, map_rows


@pytest.fixture(scope="module")
def run(world, llava_model, tmp_path_factory):
    tiny = make_run(*world)
    setup = settings.make_step_config(tiny, llava_model.backbone)
    batch = open_tiny(tiny, tmp_path_factory.mktemp("run"))[0]
    return llava_model, setup, jax.tree.map(jnp.asarray, batch)


def fresh(run):
    """State, statistics and key where a run has them, so that its program is used."""
    model, setup, _ = run
    state = jax.jit(step.init_state, static_argnums=1)(jax.random.key(0), setup)
    return replicate_like(model.params, (state, policy.FeatureStats.start(32), jax.random.key(1)))


def full_logits_loss(params, model, tokens, batch):
    """The loss from logits of every place, by labels that are expanded on the host."""
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
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], 2)
    return -jnp.sum(jnp.where(labels >= 0, found[..., 0], 0)) / np.sum(labels >= 0)


def test_the_loss_and_its_slope_are_those_of_the_full_logits(run):
    model, setup, batch = run
    tokens = jax.random.normal(jax.random.key(0), (8, 9, 32))
    assert setup.forward.rows == 4

    def loss(tokens, params):
        return lm_loss(params, model.backbone, setup.forward, tokens, batch.targets)

    slope = jax.jit(jax.value_and_grad(loss))
    plain = jax.jit(jax.value_and_grad(lambda t, p: full_logits_loss(p, model, t, batch)))
    (value, grad), expected = slope(tokens, model.params), plain(tokens, model.params)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert float(jnp.abs(grad).max()) > 1e-3
    np.testing.assert_allclose(grad, expected[1], rtol=1e-4, atol=1e-7)


def test_int8_weights_train_as_the_numbers_they_stand_for(run, llava_folder):
    model, setup, batch = run
    params = load_vlm(llava_folder, dtype=jnp.float32, weights="int8", progress=False).params
    flat = weights.flatten(params)
    stands = {
        path: leaf.value * leaf.scale[..., None, :] if isinstance(leaf, Int8Kernel) else leaf
        for path, leaf in flat.items()
    }
    tokens = jax.random.normal(jax.random.key(0), (8, 9, 32))

    def loss(tokens, params):
        return lm_loss(params, model.backbone, setup.forward, tokens, batch.targets)

    slope = jax.jit(jax.value_and_grad(loss))
    (value, grad), expected = slope(tokens, params), slope(tokens, weights.unflatten(stands))
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-3, atol=1e-6)
    full, _ = slope(tokens, model.params)
    assert full != value and abs(full - value) < 0.01 * full


def test_map_rows_keeps_their_order():
    x = np.arange(12.0).reshape(6, 2)
    for rows in (0, 2):
        options = ForwardOptions(rows=rows)
        found = map_rows(lambda x: (x * 2, x.sum(1)), options, jnp.asarray(x))
        np.testing.assert_array_equal(found[0], 2 * x)
        np.testing.assert_array_equal(found[1], x.sum(1))


def test_an_update_changes_the_policy_only(run):
    model, setup, batch = run
    state, stats, key = fresh(run)
    before, names = jax.tree.map(np.array, (model.params, state.params)), jax.tree.structure(state)
    for number in range(2):  # the first learning rate is 0
        state, scalars = step.update(
            model.params, state, stats, batch, key, np.int32(number), setup=setup
        )
    assert jax.tree.structure(state) == names
    jax.tree.map(np.testing.assert_array_equal, before[0], jax.tree.map(np.array, model.params))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before[1], state.params)
    assert changed["stop"] and changed["decoder"]["pointer"]["key"]["kernel"]
    moments = jax.tree.leaves(state.optimizer)
    assert {leaf.shape for leaf in moments} <= {
        (),
        (3,),  # the polynomial of Muon's iteration
        *(x.shape for x in jax.tree.leaves(state.params)),
    }
    assert float(scalars["lr"]) == pytest.approx(setup.optimizer.lr / 2)


@pytest.mark.slow
def test_several_devices_give_the_update_of_one(run):
    model, setup, batch = run
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    spread = jax.device_put(
        model.params, shardings(model.params, model.backbone.SHARDING_RULES, mesh)
    )
    found = []
    for params, where in ((model.params, None), (spread, mesh)):
        state, stats, key = replicate_like(params, fresh(run))
        rows = place_rows(where, batch)
        on_mesh = dataclasses.replace(setup, forward=setup.forward._replace(mesh=where))
        state, scalars = step.update(params, state, stats, rows, key, np.int32(0), setup=on_mesh)
        found.append([float(scalars[name]) for name in ("loss", "lm_loss", "k_mean", "grad_norm")])
    np.testing.assert_allclose(*found, rtol=1e-5)
    # The next update takes the state as it lies: another layout would be another program.
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state, scalars)))


def test_a_bad_batch_is_skipped_and_counted(run):
    model, setup, batch = run
    state, stats, key = fresh(run)
    before = jax.tree.map(np.array, state)
    broken = jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    counts = []
    for number, given in enumerate((broken, broken, model.params, broken)):
        state, scalars = step.update(given, state, stats, batch, key, np.int32(number), setup=setup)
        assert np.isfinite(scalars["loss"]) == (given is not broken)
        counts.append((int(scalars["skipped"]), int(scalars["skipped_in_row"])))
        if number == 1:
            after = jax.tree.map(np.array, state)
    jax.tree.map(np.testing.assert_array_equal, before[:3], after[:3])
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_schedules_by_hand():
    chosen = optimizer_settings(lr=1.0, final_lr=0.2, warmup=10)
    found = [float(optimizer.learning_rate(chosen, 110, i)) for i in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(found, [0, 0.5, 1, 0.6, 0.2], rtol=1e-6)


def test_statistics_are_those_of_all_pictures(run):
    model, setup, batch = run
    features = jax.jit(lambda p: step.encode_rows(p, setup, batch.pixels))(model.params)
    features, stats = features.reshape(-1, 32), fresh(run)[1]
    every = np.full(8, 9, np.int32)
    for pixels, counted in ((batch.pixels, every), (255 - batch.pixels, 0 * every)):
        stats = step.gather_stats(model.params, stats, pixels, counted, setup=setup)
    assert float(stats.count) == 72
    np.testing.assert_allclose(stats.mean, features.mean(0), atol=1e-5)
    np.testing.assert_allclose(stats.var, features.var(0), rtol=1e-3)


def test_gradients_of_a_hazard_do_not_shrink_the_others():
    hazard, aligned = (
        StepPrune(config=policy.PolicyConfig(stop=stop)) for stop in ("hazard", "aligned")
    )
    moments = {}
    for method in (hazard, aligned):
        for size in (1.0, 1e6):
            ones = jnp.ones(3)
            grads = {"hazard": {"out": size * ones}, "stop": size * ones, "pointer": ones}
            chain = optimizer.make_optimizer(optimizer_settings(clip=0.5), 100, method)
            _, state = chain.update(grads, chain.init(grads), grads, step=0)
            moments[method, size] = optax.tree.get(state, "mu")["pointer"]
    np.testing.assert_array_equal(moments[hazard, 1.0], moments[hazard, 1e6])
    assert moments[aligned, 1e6].max() < 1e-4 * moments[hazard, 1e6].max()


def test_muon_turns_matrices_and_leaves_the_rest_to_adam():
    chosen = optimizer_settings(
        lr=0.1, final_lr=0.1, warmup=0, muon_lr=0.5, weight_decay=0.0, clip=1e9
    )
    random = np.random.default_rng(0)
    grads = {
        "kernel": jnp.asarray(random.normal(size=(8, 8)), jnp.float32),
        "bias": jnp.asarray([3.0, -0.2, 0.01]),
    }
    chain = optimizer.make_optimizer(chosen, 10, StepPrune())
    updates, _ = chain.update(grads, chain.init(grads), grads, step=0)
    # Adam with Nesterov's momentum begins with the sign times .9 x .1 / (1 - .9^2) + 1 = 1.473684.
    np.testing.assert_allclose(updates["bias"], [-0.1473684, 0.1473684, -0.1473684], rtol=1e-4)
    # Muon's direction has singular values near one, along the gradient's own singular vectors.
    values = np.linalg.svd(updates["kernel"] / 0.5, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = np.linalg.svd(grads["kernel"])
    turned = -10 * left.T @ np.asarray(updates["kernel"]) @ right.T
    np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=0.05)
    assert (np.diag(turned) > 0).all()
