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
    _display,
    _favour,
    language_loss,
    noised,
    run_packed,
    thinned,
)
from experiments.pretrain.packing import pack
from experiments.pretrain.small_llava import TEMPLATE
from experiments.pretrain.vocabulary import build_tokenizer
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.llava.config import ClipConfig, LlamaConfig
from stepprune_jax.testing import llava_encoder

# The models are made and kept; these run when pretraining changes.
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


def test_a_row_by_hand(encoder):
    packed = pack(encoder, SAMPLES)
    first = encoder.encode(TURNS[0][:2], 1).ids[5:]  # red ? assistant : yes </s>
    second = encoder.encode(TURNS[0][2:4], 1).ids[5:]
    assert packed.prefix.tolist() == encoder.encode(TURNS[0][:2], 1).ids[:4]
    assert packed.ids[0, :15].tolist() == first + second
    assert packed.segment[0, :16].tolist() == [1] * 6 + [2] * 9 + [3]
    assert packed.offset[0, :16].tolist() == [*range(6), *range(9), 0]
    assert packed.target[0, :4].tolist() == [3, 4, 12, 13]
    assert packed.label[0, :4].tolist() == [*first[4:], *second[7:]]
    assert packed.segment[1].tolist() == [1] * 7 + [-1] * (packed.ids.shape[1] - 7)
    assert packed.ids.shape[1] % 8 == 0 and (packed.label[1, 2:] == -1).all()


def seen_at(visual, index):
    """Visual tokens of images of 3 x 3, none of them padding or noise."""
    every = jnp.ones(index.shape, bool)
    return VisibleTokens(visual, index, every, every, jnp.full((len(index), 2), 3))


def test_the_loss_is_the_mean_over_supervised_tokens_and_a_quarter_of_naming(encoder, model):
    params, backbone = model
    packed = jax.tree.map(jnp.asarray, pack(encoder, SAMPLES))
    pixels = random_bytes(2, 3, 3, 24, 24)
    trained = {name: params[name] for name in ("projector", "language")}
    # Three classes, of which the first has no word.
    token = np.array([-1, *encoder.tokenizer.convert_tokens_to_ids(["red", "blue"])])
    shown = np.arange(27).reshape(3, 9) % 3
    words = [Words(jnp.asarray(shown), jnp.asarray(token))]
    batch = Exchanges(Images(pixels, jnp.full((3, 2), 3)), packed, None, words)
    given = (trained, {"vision": params["vision"]}, backbone, jax.random.key(0), batch, Display())
    loss, scalars = jax.jit(language_loss, static_argnums=(2, 5))(*given)
    visual = jax.jit(lambda p, x: backbone.project(p, backbone.encode_image(p, x)[0]))(
        params, pixels
    )
    index = jnp.broadcast_to(jnp.arange(9), (3, 9))
    nothing = jnp.zeros((3, 0), jnp.int32)
    logits, _ = jax.jit(run_packed, static_argnums=1)(
        params, backbone, seen_at(visual, index), packed, nothing
    )
    log, label = np.asarray(jax.jit(jax.nn.log_softmax)(logits)), np.asarray(packed.label)
    pairs = list(zip(*np.nonzero(label >= 0), strict=True))
    mean = np.mean([-log[(*pair, label[pair])] for pair in pairs])
    np.testing.assert_allclose(scalars["lm_loss"], mean, rtol=1e-5)
    right = [log[pair].argmax() == label[pair] for pair in pairs]
    np.testing.assert_allclose(scalars["told"], np.mean(right), rtol=1e-6)
    embedding = np.asarray(params["language"]["embed"]["embedding"])
    words = embedding[token[1:]]
    near = np.asarray(visual)[shown > 0] @ words.T
    named = near[np.arange(18), shown[shown > 0] - 1]
    naming = np.mean(np.log(np.exp(near).sum(1)) - named)
    np.testing.assert_allclose(loss, mean + 0.25 * naming, rtol=1e-5)


@pytest.mark.parametrize(("sharpness", "shares"), [(0, [1, 1, 1, 1]), (2, [1, 4, 9, 16])])
def test_thinning_draws_by_powers_of_the_saliency(sharpness, shares):
    count = 20000
    saliency = jnp.broadcast_to(jnp.array([0.1, 0.2, 0.3, 0.4]), (count, 4))
    given = (jnp.full(count, float(sharpness)), jnp.ones((count, 4), bool))
    index = thinned(jax.random.key(5), jnp.log(saliency), 1, *given)
    found = np.bincount(np.asarray(index)[:, 0], minlength=4) / count
    np.testing.assert_allclose(found, np.array(shares) / sum(shares), atol=0.015)


def test_noise_leaves_the_largest_scores_and_each_channels_moments():
    images, n = 1600, 64
    scale = np.array([0.1, 1.0, 30.0])
    rng = np.random.default_rng(0)
    features = np.float32(5 + scale * rng.normal(size=(images, n, 3)))
    score = np.float32(rng.normal(size=(images, n)))
    seen, kept = map(np.asarray, jax.jit(noised)(jax.random.key(2), features, score, score < 9))
    assert all(score[row][kept[row]].min() > score[row][~kept[row]].max() for row in range(9))
    np.testing.assert_allclose(seen.mean((0, 1)), features.mean((0, 1)), atol=0.01 * 30)
    np.testing.assert_allclose(seen.std((0, 1)), features.std((0, 1)), rtol=0.02)
    products = (features - 5) * (seen - 5) / scale**2
    by_rank = np.argsort(-score, axis=1)[..., None]
    ranked = np.take_along_axis(products, by_rank, axis=1).mean((0, 2))
    # sqrt of gates: .6 to 1 has mean .89, 0 to .1 has mean .21; 2 to 64 kept, log-uniformly.
    np.testing.assert_allclose(ranked[:2], 0.89, atol=0.06)
    np.testing.assert_allclose(ranked[8], 0.21 + 0.68 * np.log(64 / 8) / np.log(32), atol=0.1)
    np.testing.assert_allclose(ranked[-8:].mean(), 0.21 + 0.68 * 0.02, atol=0.05)


def test_a_taste_is_one_factor_for_each_class_of_an_image():
    label = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 20)))
    words = [Words(label, jnp.array([-1, 5, 6])), Words(jnp.full((4, 20), 0.5), jnp.array([7, 8]))]
    found = np.asarray(_favour(jax.random.key(0), jnp.ones((4, 20)), words, 3.0))
    for row, classes in zip(found, np.asarray(label), strict=True):
        assert all(np.ptp(row[classes == k]) < 1e-6 for k in range(3))
    assert np.unique(found.round(5)).size == 12  # three classes in four images, all different


def test_an_image_of_mostly_empty_patches_is_shown_by_those_that_show_something(model):
    params, config = model
    n, side = config.max_image_tokens, config.vision.image_size
    pixels = random_bytes(0, 3, 3, side, side)
    share = np.full((3, n), np.nan, np.float32)
    share[0, [1, 5]], share[2, [0, 3, 8]] = 0.2, 0.9
    words = [
        Words(jnp.asarray(share), jnp.array([0, 1])),
        Words(jnp.ones((3, n), int), jnp.ones(2)),
    ]
    images = Images(pixels, jnp.full((3, 2), 3))
    seen = _display(params, config, images, jax.random.key(2), words, Display(3, filled=True))
    assert {1, 5} < {*seen.index[0].tolist()} and seen.index[2].tolist() == [0, 3, 8]
    assert Display(3, filled=True).all_contents and not Display(3).all_contents


def test_a_share_between_two_words_is_learned_as_their_log_odds():
    # Embeddings (1, 0) and (0, 1); a visual token (a, b) says the second with odds e^(b - a).
    embedding = jnp.eye(2)
    share = 1 / (1 + np.exp(-0.7))
    words = Words(jnp.array([[share, jnp.nan]]), jnp.array([0, 1]))
    index = jnp.array([[0, 1]])

    def at(b):
        visual = jnp.array([[[0.0, b], [9.0, 9.0]]])
        return _alignment_loss(embedding, visual, seen_at(visual, index), words, None)

    np.testing.assert_allclose(jax.grad(at)(0.7), 0, atol=1e-6)
    # H(share) = -.668 ln .668 - .332 ln .332 = .6356
    np.testing.assert_allclose(at(0.7), 0.6356, atol=1e-3)


def test_noise_is_named_by_the_token_that_says_nothing():
    """Words are tokens 1 and 2; the picture shows the second, no word, and two tokens of noise."""
    embedding = jnp.eye(3)
    words = Words(jnp.array([[2, 0, 1, 0]]), jnp.array([-1, 1, 2]))
    visual = jnp.array([[[1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    clear = jnp.array([[True, True, False, False]])
    seen = seen_at(visual, jnp.arange(4)[None])._replace(clear=clear)
    found = _alignment_loss(embedding, visual, seen, words, 0)

    def loss(logits, label):
        return np.log(np.exp(logits).sum()) - logits[label]

    noise = [loss([3.0, 0.0, 0.0], 0), loss([0.0, 2.0, 0.0], 0)]
    expected = [loss([1.0, 2.0, 4.0], 2), *np.log1p(noise)]
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-6)
