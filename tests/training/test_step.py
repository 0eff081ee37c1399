"""The step: what it differentiates, what it must not see, and the loss it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_config, write_data

from stepprune_jax import load_vlm, policy, testing
from stepprune_jax.config import LlavaConfig
from stepprune_jax.data.llava import read_conversations
from stepprune_jax.generate.placement import beside, place_rows
from stepprune_jax.models import vlm
from stepprune_jax.sharding import VLM_RULES, build_mesh, shardings
from stepprune_jax.training import settings, step
from stepprune_jax.training.batches import Batches, encode_rows
from stepprune_jax.training.language_loss import Reading, lm_loss, map_rows
from stepprune_jax.training.pixels import PixelCache


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    testing.tiny_llava(folder / "model")
    write_data(folder / "data")
    model = load_vlm(folder / "model", None, jnp.float32, progress=False)
    setup = settings.make_setup(make_config(folder / "model", folder / "data"), model.config)
    samples = read_conversations(
        folder / "data" / "train.json", folder / "data" / "images", split_turns=True
    )
    rows = encode_rows(samples, model.tokenizer, 9, 2048)
    batches = Batches(rows, 8, 0, 64, PixelCache(model.image_settings, 24, 1 << 20))
    return model, setup, jax.tree.map(jnp.asarray, next(batches.stream(0, 1)))


def fresh(run):
    """State, statistics and key where a run has them, so that its program is used."""
    model, setup, _ = run
    state = jax.jit(step.init_state, static_argnums=1)(jax.random.key(0), setup)
    return beside(model.params, (state, policy.FeatureStats.start(32), jax.random.key(1)))


def full_logits_loss(model, tokens, batch):
    """The loss from logits of every place, by the expanded labels."""
    targets, n = batch.targets, tokens.shape[1]
    every = jnp.ones((8, 1, n), bool)

    index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (8, 1, n))

    @jax.jit
    def log_probs(params):
        visual = vlm.project(params, model.config, tokens)[:, None]
        sequence = vlm.assemble(
            params, model.config, targets.ids, targets.length, visual, every, index
        )
        logits = vlm.prefill(params, model.config, sequence, 0, all_logits=True).logits
        return jax.nn.log_softmax(logits)

    log_prob = np.asarray(log_probs(model.params))
    found = []
    for row in range(8):
        ids = targets.ids[row, : int(targets.length[row])].tolist()
        at = ids.index(-200)
        expanded = [*ids[:at], *[-1] * n, *ids[at + 1 :]]
        answer = targets.target[row][targets.supervised[row]].tolist()
        start = len(expanded) - len(answer)
        assert expanded[start:] == answer  # these conversations end with their only answer
        found += [-log_prob[row, start + i - 1, token] for i, token in enumerate(answer)]
    return np.mean(found)


def test_the_loss_is_that_of_the_full_logits_and_so_is_its_slope(run):
    model, setup, batch = run
    tokens = jax.random.normal(jax.random.key(0), (8, 9, 32))

    def slope(reading):
        loss = lambda params, t: lm_loss(params, reading, t, batch.targets)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=1))(model.params, tokens)

    value, grad = slope(setup.reading(None))  # a few rows at a time
    np.testing.assert_allclose(value, full_logits_loss(model, tokens, batch), rtol=1e-5)
    assert float(jnp.abs(grad).max()) > 0
    whole = slope(Reading(setup.model, remat=True))
    np.testing.assert_allclose(whole[0], value, rtol=1e-6)
    np.testing.assert_allclose(whole[1], grad, rtol=1e-4, atol=1e-8)
    # Along itself, by a finite difference.
    along = 0.05 * grad / jnp.linalg.norm(grad)
    ahead, behind = (full_logits_loss(model, tokens + x, batch) for x in (along, -along))
    np.testing.assert_allclose((ahead - behind) / 0.1, jnp.linalg.norm(grad), rtol=0.02)


def test_map_rows_keeps_their_order():
    x = np.arange(12.0).reshape(6, 2)
    model = LlavaConfig.from_hf(testing.tiny_hf_config())
    for rows in (0, 1, 2, 3, 6):
        found = map_rows(lambda x: (x * 2, x.sum(1)), Reading(model, rows=rows), jnp.asarray(x))
        np.testing.assert_array_equal(found[0], 2 * x)
        np.testing.assert_array_equal(found[1], x.sum(1))


def test_an_update_changes_the_policy_only(run):
    model, setup, batch = run
    state, stats, key = fresh(run)
    before, names = jax.tree.map(np.array, (model.params, state.params)), jax.tree.structure(state)
    for number in range(2):  # the first learning rate is 0
        state, scalars = step.update(
            model.params, state, stats, batch, key, np.int32(number), setup=setup, mesh=None
        )
    assert jax.tree.structure(state) == names
    jax.tree.map(np.testing.assert_array_equal, before[0], jax.tree.map(np.array, model.params))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before[1], state.params)
    assert changed["stop"] and changed["decoder"]["pointer"]["key"]["kernel"]
    moments = jax.tree.leaves(state.optimizer)
    assert {leaf.shape for leaf in moments} <= {
        (),
        *(x.shape for x in jax.tree.leaves(state.params)),
    }
    assert float(scalars["lr"]) == pytest.approx(setup.lr / 2)


def test_four_devices_give_the_loss_of_one(run):
    model, setup, batch = run
    mesh = build_mesh({"data": 4}, jax.devices()[:4])
    spread = jax.device_put(model.params, shardings(model.params, VLM_RULES, mesh))
    found = []
    for params, where in ((model.params, None), (spread, mesh)):
        state, stats, key = beside(params, fresh(run))
        rows = place_rows(where, batch)
        _, scalars = step.update(
            params, state, stats, rows, key, np.int32(0), setup=setup, mesh=where
        )
        found.append([float(scalars[name]) for name in ("loss", "lm_loss", "k_mean", "grad_norm")])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_a_bad_batch_is_skipped_and_counted(run):
    model, setup, batch = run
    state, stats, key = fresh(run)
    before = jax.tree.map(np.array, state)
    broken = batch._replace(pixels=jnp.full_like(batch.pixels, np.nan))
    state, scalars = step.update(
        model.params, state, stats, broken, key, np.int32(3), setup=setup, mesh=None
    )
    assert not np.isfinite(scalars["loss"]) and int(scalars["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before[:3], jax.tree.map(np.array, state[:3]))


def test_what_the_policy_sees_does_not_depend_on_the_answer(run):
    model, setup, batch = run
    params = fresh(run)[0].params

    def encoded(embedding):
        language = model.params["language"] | {"embed": {"embedding": embedding}}
        seen = step.selector_inputs(model.params | {"language": language}, setup, batch)
        found = policy.encode(
            params, setup.selector, seen.image, seen.text, text_mask=seen.text_mask
        )
        return jnp.sum(found**2)

    table = model.params["language"]["embed"]["embedding"]
    slope = np.abs(np.asarray(jax.jit(jax.grad(encoded))(table))).sum(1)
    asked = {int(i) for row, n in zip(batch.text, batch.text_length, strict=True) for i in row[:n]}
    answers = {int(i) for i in batch.targets.target[batch.targets.supervised]} - asked
    assert answers and all(slope[i] == 0 for i in answers)
    assert all(slope[i] > 0 for i in asked)
    assert set(np.flatnonzero(slope).tolist()) == asked  # nor the template, nor the padding


def test_schedules_by_hand():
    model = LlavaConfig.from_hf(testing.tiny_hf_config())
    setup = step.Setup(model, policy.PolicyConfig(), steps=110, lr=1.0, final_lr=0.2, warmup=10)
    found = [float(step.learning_rate(setup, i)) for i in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(found, [0, 0.5, 1, 0.6, 0.2], rtol=1e-6)


def test_statistics_are_those_of_all_pictures(run):
    model, setup, batch = run
    features = jax.jit(lambda p: step.encode_rows(p, setup, batch.pixels, None))(model.params)
    features, stats = features.reshape(-1, 32), fresh(run)[1]
    every = np.ones(8, bool)
    for pixels, counted in ((batch.pixels, every), (batch.pixels + 100, ~every)):
        stats = step.gather_stats(model.params, stats, pixels, counted, setup=setup, mesh=None)
    assert float(stats.count) == 72
    np.testing.assert_allclose(stats.mean, features.mean(0), atol=1e-5)
    np.testing.assert_allclose(stats.var, features.var(0), rtol=1e-3)
