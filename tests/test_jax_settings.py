"""A program that composes this one may have changed what jax does; that changes nothing here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from small_world import WIDTHS, random_params
from tiny_run import make_run, metrics, write_data

from stepprune_jax import FeatureStats, update_stats
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.selectors import AutoSelect, StepPrune
from stepprune_jax.selectors.rloo import RlooSettings
from stepprune_jax.training import train

pytestmark = pytest.mark.slow

SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_prng_impl": "rbg",
}
B, N = 3, 9
SETS = RlooSettings(samples=2)
FOUR = RunOptions(max_tokens=4)


@pytest.fixture(params=SETTINGS)
def setting(request):
    """A setting of the whole process, and a function that computes without it."""
    usual = getattr(jax.config, request.param)

    def without(function, *arguments):
        jax.config.update(request.param, usual)
        try:
            return function(*arguments)
        finally:
            jax.config.update(request.param, SETTINGS[request.param])

    jax.config.update(request.param, SETTINGS[request.param])
    yield without
    jax.config.update(request.param, usual)


def made(kind, width=32):
    config = kind.config_type(**WIDTHS | {"feature_width": width})
    policy = kind.init(jax.random.key(0, impl="threefry2x32"), config, FeatureStats.start(width))
    return policy.replace(params=jax.tree.map(lambda x: x / 4, random_params(policy.specs(), 1)))


def world(dtype):
    random = np.random.default_rng(0)
    image = jnp.asarray(random.standard_normal((B, N, 32), np.float32), dtype)
    text = jnp.asarray(random.standard_normal((B, 5, 48), np.float32), dtype)
    masks = {"image_mask": np.arange(N) < np.array([[N], [4], [N]])}
    return image, text, masks | {"text_mask": np.arange(5) < np.array([[5], [1], [3]])}


def kept(policy, dtype):
    """What it keeps at its own stop, by its statistics, of every key and in a jitted function."""
    image, text, masks = world(dtype)
    stats = update_stats(FeatureStats.start(32), image)
    policy, found = policy.replace(stats=stats), []
    for key in (None, *keys()):
        found.append(policy.prune(image, text, budget=4, key=key, **masks))
        if policy.has_stop:
            found.append(policy.prune(image, text, key=key, **masks))
    select = jax.jit(functools.partial(type(policy).select, capacity=4, budget=4))
    found.append(select(policy, image, text, key=keys()[0], **masks))
    found = [np.asarray(part.index).tolist() for part in found]
    if policy.has_stop:
        found.append(policy.calibrate([(image, text)]).calibration)
    key = jax.random.key(2, impl="threefry2x32")

    def loss(pruned):
        return jnp.mean(pruned.tokens.astype(jnp.float32) ** 2, axis=(1, 2))

    (diagnosis,) = policy.diagnose(loss, image, text, [4], key=key, **masks)
    return found, {case: losses.round(3).tolist() for case, losses in diagnosis.loss.items()}


def keys():
    """The same keys, whatever is set: one for each row, and a raw one for all."""
    key = jax.random.key(5, impl="threefry2x32")
    return jax.random.split(key, B), jax.random.key_data(key)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [StepPrune, AutoSelect])
def test_a_policy_keeps_the_same_tokens(setting, kind, dtype):
    policy = made(kind)
    assert kept(policy, dtype) == setting(kept, policy, dtype)


def slopes(policy, key):
    """Gradients of both objectives."""
    image, text, masks = world(jnp.float32)

    def answer_losses(sets):
        return jnp.mean(jnp.where(sets.valid[..., None], sets.tokens, 0.0), axis=(2, 3))

    def gated(params):
        loss = policy.replace(params=params).train_loss
        return loss(key, image, text, lambda tokens: jnp.mean(tokens**2), **masks)[0]

    def sampled(params):
        loss, settings = policy.replace(params=params).rloo_loss, SETS
        return loss(key, image, text, answer_losses, settings, **masks)[0]

    return [jax.jit(jax.grad(loss))(policy.params) for loss in (gated, sampled)]


@pytest.mark.parametrize("kind", [StepPrune, AutoSelect])
def test_a_policy_learns_the_same(setting, kind):
    key = jax.random.key(3, impl="threefry2x32")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, slopes(made(kind), key), setting(slopes, made(kind), key))
    raw = slopes(made(kind), jax.random.PRNGKey(3))  # an implementation of its own where it is set
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(raw))


def answers(folder, width):
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (32, 48, 3), np.uint8)) for _ in range(3)]
    sampling = Sampling(3, 0.9, 0.9, repetition_penalty=1.2)
    asked = [images[:1], None, images[1:]]
    how = {"pruner": made(StepPrune, width), "sampling": sampling, "options": FOUR}
    found = generate(model, ["What is this?", "two", "red dog"], asked, **how)
    return [(answer.token_ids, answer.kept_indices) for answer in found]


@pytest.mark.parametrize(("folder", "width"), [("llava_folder", 32), ("qwen_folder", 48)])
def test_a_model_answers_the_same(setting, folder, width, request):
    folder = request.getfixturevalue(folder)
    assert answers(folder, width) == setting(answers, folder, width)


def test_a_run_trains_the_same(setting, llava_folder, tmp_path):
    run = make_run(llava_folder, write_data(tmp_path / "data"), steps=3)
    train(run, tmp_path / "run")
    setting(train, run, tmp_path / "usual")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "usual")
