"""Packing of conversations, and the loss of the language model in pretraining."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from visual import random_bytes

from experiments.pretrain.conversations import Sample
from experiments.pretrain.images import Images
from experiments.pretrain.language import (
    Display,
    Exchanges,
    VisibleTokens,
    Words,
    _alignment_loss,
    _apply_taste,
    language_loss,
    mix_noise,
    run_packed,
    sample_tokens,
)
from experiments.pretrain.packing import pack
from experiments.pretrain.small_llava import TEMPLATE
from experiments.pretrain.vocabulary import build_tokenizer
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.llava.config import ClipConfig, LlamaConfig
from stepprune_jax.testing import llava_encoder

# Slow: shipped models are already trained, so these tests run only when pretraining changes.
pytestmark = pytest.mark.slow

TURNS = (
    ("Red?", "yes", "What color is it?", "blue", "Which?", "the red one"),
    ("How many?", "two"),
    ("What color is it?", "blue", "Red?", "yes"),
)
SAMPLES = [Sample(None, turns, number) for number, turns in enumerate(TURNS)]


@pytest.fixture(scope="module")
def encoder():
    return llava_encoder(build_tokenizer((text for turns in TURNS for text in turns), TEMPLATE))


@pytest.fixture(scope="module")
def model(encoder):
    tokenizer = encoder.tokenizer
    config = LlavaConfig(
        vision=ClipConfig(16, 16, 1, 2, 24, 8),
        text=LlamaConfig(len(tokenizer), 16, 24, 2, 2, 2, 8, max_positions=64),
        feature_layer=-1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    backbone = Llava(config)
    return jax.jit(vlm.init_params, static_argnums=1)(jax.random.key(0), backbone), backbone


def test_a_packed_row_matches_a_worked_example(encoder):
    packed = pack(encoder, SAMPLES)
    first_ids = encoder.encode(TURNS[0][:2], 1).ids[5:]  # red ? assistant : yes </s>
    second_ids = encoder.encode(TURNS[0][2:4], 1).ids[5:]
    assert packed.prefix.tolist() == encoder.encode(TURNS[0][:2], 1).ids[:4]
    assert packed.ids[0, :15].tolist() == first_ids + second_ids
    assert packed.segment[0, :16].tolist() == [1] * 6 + [2] * 9 + [3]
    assert packed.offset[0, :16].tolist() == [*range(6), *range(9), 0]
    assert packed.target[0, :4].tolist() == [3, 4, 12, 13]
    assert packed.label[0, :4].tolist() == [*first_ids[4:], *second_ids[7:]]
    assert packed.segment[1].tolist() == [1] * 7 + [-1] * (packed.ids.shape[1] - 7)
    assert packed.ids.shape[1] % 8 == 0 and (packed.label[1, 2:] == -1).all()


def visible_tokens(visual, index):
    """Returns visual tokens of images of 3 x 3 patches, without padding or noise."""
    mask = jnp.ones(index.shape, bool)
    return VisibleTokens(visual, index, mask, mask, jnp.full((len(index), 2), 3))


def test_the_loss_is_the_mean_of_supervised_tokens_plus_a_quarter_of_naming(encoder, model):
    params, backbone = model
    packed = jax.tree.map(jnp.asarray, pack(encoder, SAMPLES))
    pixels = random_bytes(2, 3, 3, 24, 24)
    trained = {name: params[name] for name in ("projector", "language")}
    # Three classes. The first class has no word.
    token = np.array([-1, *encoder.tokenizer.convert_tokens_to_ids(["red", "blue"])])
    classes = np.arange(27).reshape(3, 9) % 3
    words = [Words(jnp.asarray(classes), jnp.asarray(token))]
    batch = Exchanges(Images(pixels, jnp.full((3, 2), 3)), packed, None, words)
    arguments = (
        trained,
        {"vision": params["vision"]},
        backbone,
        jax.random.key(0),
        batch,
        Display(),
    )
    loss, scalars = jax.jit(language_loss, static_argnums=(2, 5))(*arguments)
    visual = jax.jit(lambda p, x: backbone.project(p, backbone.encode_image(p, x)[0]))(
        params, pixels
    )
    index = jnp.broadcast_to(jnp.arange(9), (3, 9))
    no_slots = jnp.zeros((3, 0), jnp.int32)
    logits, _ = jax.jit(run_packed, static_argnums=1)(
        params, backbone, visible_tokens(visual, index), packed, no_slots
    )
    log_probs, label = np.asarray(jax.jit(jax.nn.log_softmax)(logits)), np.asarray(packed.label)
    pairs = list(zip(*np.nonzero(label >= 0), strict=True))
    mean = np.mean([-log_probs[(*pair, label[pair])] for pair in pairs])
    np.testing.assert_allclose(scalars["lm_loss"], mean, rtol=1e-5)
    is_correct = [log_probs[pair].argmax() == label[pair] for pair in pairs]
    np.testing.assert_allclose(scalars["told"], np.mean(is_correct), rtol=1e-6)
    embedding = np.asarray(params["language"]["embed"]["embedding"])
    words = embedding[token[1:]]
    similarities = np.asarray(visual)[classes > 0] @ words.T
    class_logits = similarities[np.arange(18), classes[classes > 0] - 1]
    naming_loss = np.mean(np.log(np.exp(similarities).sum(1)) - class_logits)
    np.testing.assert_allclose(loss, mean + 0.25 * naming_loss, rtol=1e-5)


@pytest.mark.parametrize(("sharpness", "weights"), [(0, [1, 1, 1, 1]), (2, [1, 4, 9, 16])])
def test_thinning_samples_by_powers_of_the_saliency(sharpness, weights):
    count = 20000
    saliency = jnp.broadcast_to(jnp.array([0.1, 0.2, 0.3, 0.4]), (count, 4))
    arguments = (jnp.full(count, float(sharpness)), jnp.ones((count, 4), bool))
    index = sample_tokens(jax.random.key(5), jnp.log(saliency), 1, *arguments)
    frequencies = np.bincount(np.asarray(index)[:, 0], minlength=4) / count
    np.testing.assert_allclose(frequencies, np.array(weights) / sum(weights), atol=0.015)


def test_noise_spares_the_largest_scores_and_keeps_the_moments_of_channels():
    images, n = 1600, 64
    scale = np.array([0.1, 1.0, 30.0])
    rng = np.random.default_rng(0)
    features = np.float32(5 + scale * rng.normal(size=(images, n, 3)))
    score = np.float32(rng.normal(size=(images, n)))
    mixed, is_kept = map(
        np.asarray, jax.jit(mix_noise)(jax.random.key(2), features, score, score < 9)
    )
    assert all(score[row][is_kept[row]].min() > score[row][~is_kept[row]].max() for row in range(9))
    np.testing.assert_allclose(mixed.mean((0, 1)), features.mean((0, 1)), atol=0.01 * 30)
    np.testing.assert_allclose(mixed.std((0, 1)), features.std((0, 1)), rtol=0.02)
    products = (features - 5) * (mixed - 5) / scale**2
    by_rank = np.argsort(-score, axis=1)[..., None]
    ranked = np.take_along_axis(products, by_rank, axis=1).mean((0, 2))
    # sqrt of gates: .6 to 1 has mean .89, 0 to .1 has mean .21; 2 to 64 kept, log-uniformly.
    np.testing.assert_allclose(ranked[:2], 0.89, atol=0.06)
    np.testing.assert_allclose(ranked[8], 0.21 + 0.68 * np.log(64 / 8) / np.log(32), atol=0.1)
    np.testing.assert_allclose(ranked[-8:].mean(), 0.21 + 0.68 * 0.02, atol=0.05)


def test_a_taste_is_one_number_per_image_and_class():
    label = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 20)))
    words = [Words(label, jnp.array([-1, 5, 6])), Words(jnp.full((4, 20), 0.5), jnp.array([7, 8]))]
    saliency_log = np.asarray(_apply_taste(jax.random.key(0), jnp.ones((4, 20)), words, 3.0))
    for row, classes in zip(saliency_log, np.asarray(label), strict=True):
        assert all(np.ptp(row[classes == k]) < 1e-6 for k in range(3))
    assert np.unique(saliency_log.round(5)).size == 12  # Three classes in four images.


def test_a_probability_between_two_words_is_learned_as_log_odds():
    # Embeddings (1, 0) and (0, 1); a visual token (a, b) says the second with odds e^(b - a).
    embedding = jnp.eye(2)
    probability = 1 / (1 + np.exp(-0.7))
    words = Words(jnp.array([[probability, jnp.nan]]), jnp.array([0, 1]))
    index = jnp.array([[0, 1]])

    def loss_at(b):
        visual = jnp.array([[[0.0, b], [9.0, 9.0]]])
        return _alignment_loss(embedding, visual, visible_tokens(visual, index), words, None)

    np.testing.assert_allclose(jax.grad(loss_at)(0.7), 0, atol=1e-6)
    # H(share) = -.668 ln .668 - .332 ln .332 = .6356
    np.testing.assert_allclose(loss_at(0.7), 0.6356, atol=1e-3)


def test_noise_is_named_by_the_noise_token():
    """Words are tokens 1 and 2. The image has the second word, no word, and two tokens of noise."""
    embedding = jnp.eye(3)
    words = Words(jnp.array([[2, 0, 1, 0]]), jnp.array([-1, 1, 2]))
    visual = jnp.array([[[1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    clear = jnp.array([[True, True, False, False]])
    visible = visible_tokens(visual, jnp.arange(4)[None])._replace(clear=clear)
    naming_loss = _alignment_loss(embedding, visual, visible, words, 0)

    def loss(logits, label):
        return np.log(np.exp(logits).sum()) - logits[label]

    noise = [loss([3.0, 0.0, 0.0], 0), loss([0.0, 2.0, 0.0], 0)]
    expected = [loss([1.0, 2.0, 4.0], 2), *np.log1p(noise)]
    np.testing.assert_allclose(naming_loss, np.mean(expected), rtol=1e-6)
