"""Settings of jax that a host program changed do not change the results of this package."""

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
RLOO = RlooSettings(samples=2)
FOUR_TOKENS = RunOptions(max_tokens=4)


@pytest.fixture(params=SETTINGS)
def setting(request):
    """Changes a setting of jax, and returns a function that computes with its default."""
    default = getattr(jax.config, request.param)

    def with_default(function, *arguments):
        jax.config.update(request.param, default)
        try:
            return function(*arguments)
        finally:
            jax.config.update(request.param, SETTINGS[request.param])

    jax.config.update(request.param, SETTINGS[request.param])
    yield with_default
    jax.config.update(request.param, default)


def make_policy(kind, width=32):
    config = kind.config_type(**WIDTHS | {"feature_width": width})
    policy = kind.init(jax.random.key(0, impl="threefry2x32"), config, FeatureStats.start(width))
    return policy.replace(params=jax.tree.map(lambda x: x / 4, random_params(policy.specs(), 1)))


def make_inputs(dtype):
    """Returns image tokens, text tokens and masks."""
    random = np.random.default_rng(0)
    image = jnp.asarray(random.standard_normal((B, N, 32), np.float32), dtype)
    text = jnp.asarray(random.standard_normal((B, 5, 48), np.float32), dtype)
    masks = {"image_mask": np.arange(N) < np.array([[N], [4], [N]])}
    return image, text, masks | {"text_mask": np.arange(5) < np.array([[5], [1], [3]])}


def kept(policy, dtype):
    """Returns kept tokens with several keys and budgets, a calibration, and a diagnosis."""
    image, text, masks = make_inputs(dtype)
    stats = update_stats(FeatureStats.start(32), image)
    policy, selections = policy.replace(stats=stats), []
    for key in (None, *keys()):
        selections.append(policy.prune(image, text, budget=4, key=key, **masks))
        if policy.has_stop:
            selections.append(policy.prune(image, text, key=key, **masks))
    select = jax.jit(functools.partial(type(policy).select, capacity=4, budget=4))
    selections.append(select(policy, image, text, key=keys()[0], **masks))
    results = [np.asarray(selection.index).tolist() for selection in selections]
    if policy.has_stop:
        results.append(policy.calibrate([(image, text)]).calibration)
    key = jax.random.key(2, impl="threefry2x32")

    def loss(pruned):
        return jnp.mean(pruned.tokens.astype(jnp.float32) ** 2, axis=(1, 2))

    (diagnosis,) = policy.diagnose(loss, image, text, [4], key=key, **masks)
    return results, {case: losses.round(3).tolist() for case, losses in diagnosis.loss.items()}


def keys():
    """Returns one key per row, and one raw key for all rows, with a fixed implementation."""
    key = jax.random.key(5, impl="threefry2x32")
    return jax.random.split(key, B), jax.random.key_data(key)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [StepPrune, AutoSelect])
def test_a_policy_keeps_equal_tokens(setting, kind, dtype):
    policy = make_policy(kind)
    assert kept(policy, dtype) == setting(kept, policy, dtype)


def gradients(policy, key):
    """Returns the gradients of both objectives."""
    image, text, masks = make_inputs(jnp.float32)

    def answer_losses(sets):
        return jnp.mean(jnp.where(sets.valid[..., None], sets.tokens, 0.0), axis=(2, 3))

    def gated(params):
        loss = policy.replace(params=params).train_loss
        return loss(key, image, text, lambda tokens: jnp.mean(tokens**2), **masks)[0]

    def sampled(params):
        loss, settings = policy.replace(params=params).rloo_loss, RLOO
        return loss(key, image, text, answer_losses, settings, **masks)[0]

    return [jax.jit(jax.grad(loss))(policy.params) for loss in (gated, sampled)]


@pytest.mark.parametrize("kind", [StepPrune, AutoSelect])
def test_a_policy_has_equal_gradients(setting, kind):
    policy, key = make_policy(kind), jax.random.key(3, impl="threefry2x32")
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(assert_close, gradients(policy, key), setting(gradients, policy, key))
    # A raw key has the implementation of the setting, so its random numbers may differ.
    raw_key_gradients = gradients(policy, jax.random.PRNGKey(3))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(raw_key_gradients))


def answers(folder, width):
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (32, 48, 3), np.uint8)) for _ in range(3)]
    sampling = Sampling(3, 0.9, 0.9, repetition_penalty=1.2)
    prompts, prompt_images = ["What is this?", "two", "red dog"], [images[:1], None, images[1:]]
    pruner = make_policy(StepPrune, width)
    results = generate(
        model, prompts, prompt_images, pruner, sampling=sampling, options=FOUR_TOKENS
    )
    return [(answer.token_ids, answer.kept_indices) for answer in results]


@pytest.mark.parametrize(("folder", "width"), [("llava_folder", 32), ("qwen_folder", 48)])
def test_a_model_gives_equal_answers(setting, folder, width, request):
    folder = request.getfixturevalue(folder)
    assert answers(folder, width) == setting(answers, folder, width)


def test_a_training_run_has_equal_metrics(setting, llava_folder, tmp_path):
    run = make_run(llava_folder, write_data(tmp_path / "data"), steps=3)
    train(run, tmp_path / "run")
    setting(train, run, tmp_path / "default")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "default")
