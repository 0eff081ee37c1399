"""Trains connector and language model to answer questions: the second and the third stage.

Many updates show only some of the visual tokens, at their own positions, as a pruned prompt does
later. The third stage also replaces most tokens by noise, as the noise gate does. Large models
tolerate such prompts, and small models have to be trained on them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.pretrain.images import Images, fit_labels, token_mask
from experiments.pretrain.mentions import PlacedMentions, mention_loss
from experiments.pretrain.packing import Packed
from experiments.pretrain.small import saliency, saliency_tap
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import OutputSpec
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import Params
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.noise import noise_gate, restore, standardise, update_stats


def sample_tokens(
    key: Array,
    saliency_log: Float[Array, "i n"],
    kept: int,
    sharpness: Float[Array, "i"],
    real: Bool[Array, "i n"],
) -> Int[Array, "i k"]:
    """Samples visual tokens without replacement, by saliency ** sharpness.

    Args:
        key: random key.
        saliency_log: [i, n] logarithm of the saliency of each token.
        kept: number of tokens to sample.
        sharpness: [i] exponent; 0 samples uniformly.
        real: [i, n] mask that is false for padding.

    Returns:
        [i, kept] indices in row-major order.
    """
    score = _gumbel_scores(key, saliency_log, sharpness)
    score = jnp.where(real, score, jnp.finfo(score.dtype).min)
    return jnp.sort(jax.lax.top_k(score, kept)[1], axis=1)


def _gumbel_scores(key: Array, saliency_log: Array, sharpness: Array) -> Array:
    """Returns scores whose k largest are a sample as of `sample_tokens`, for any k."""
    return sharpness[:, None] * saliency_log + jax.random.gumbel(key, saliency_log.shape)


def mix_noise(
    key: Array,
    features: Float[Array, "i n d"],
    score: Float[Array, "i n"],
    real: Bool[Array, "i n"],
) -> tuple[Float[Array, "i n d"], Bool[Array, "i n"]]:
    """Mixes tokens with noise, Eq. (13), so that most tokens are mostly noise.

    For each image, k is log-uniform from 2 to n. The gate of the k tokens with the largest scores
    is uniform from 0.6 to 1, and the gate of all other tokens is uniform from 0 to 0.1.

    Args:
        key: random key.
        features: [i, n, d] visual tokens.
        score: [i, n] scores.
        real: [i, n] mask that is false for padding.

    Returns:
        [i, n, d] the mixed tokens. [i, n] mask of the k tokens of each image.
    """
    images, n = score.shape[0], jnp.sum(real, axis=1, keepdims=True)
    score = jnp.where(real, score, jnp.finfo(score.dtype).min)
    count_key, gate_key, noise_key = jax.random.split(key, 3)
    count = jnp.exp(jax.random.uniform(count_key, (images, 1), maxval=jnp.log(n / 2))) * 2
    rank = jnp.argsort(jnp.argsort(-score, axis=1), axis=1)
    kept_gate, dropped_gate = jax.random.uniform(gate_key, (2, images, 1))
    kept = rank < count
    alpha = jnp.where(kept, 0.6 + 0.4 * kept_gate, 0.1 * dropped_gate)
    stats = update_stats(FeatureStats.start(features.shape[-1]), features, real)
    return restore(noise_gate(noise_key, standardise(features, stats), alpha), stats), kept


class Display(NamedTuple):
    """Static settings of how an update shows images to the language model.

    Attributes:
        kept: number of visual tokens to show; None shows all tokens.
        is_noisy: whether to show all tokens, most of them as noise; see `mix_noise`.
        taste: how strongly the selection depends on the contents of patches; see `_apply_taste`.
        names_noise: whether the loss names noise by a token without meaning.
    """

    kept: int | None = None
    is_noisy: bool = False
    taste: float = 2.0
    names_noise: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the image shows everything that a question may be about."""
        return self.kept is None and not self.is_noisy


class Words(NamedTuple):
    """The words that name the contents of patches.

    Attributes:
        label: [i, n] class of each patch; or the probability of the second of two words, NaN where
            undefined.
        token: [c] token of each class; -1 for a class without a word.
    """

    label: Int[Array, "i n"] | Float[Array, "i n"]
    token: Int[Array, "c"]


def _apply_taste(key: Array, saliency: Array, words: Sequence[Words], strength: float) -> Array:
    """Returns the log saliency plus a random number for each image and class of patches.

    The random numbers have the standard deviation `strength`. They imitate a policy, which keeps
    patches of the classes that a question is about. A model that is trained only on uniformly
    thinned images takes the proportions of the kept patches as the proportions of the image, and
    miscounts.
    """
    factor = jnp.zeros(saliency.shape)
    for number, patch_words in enumerate(words):
        if jnp.issubdtype(patch_words.label.dtype, jnp.integer):
            shape = (saliency.shape[0], patch_words.token.shape[0])
            taste = jax.random.normal(jax.random.fold_in(key, number), shape)
            factor += jnp.take_along_axis(taste, patch_words.label, axis=1)
    return jnp.log(saliency + 1e-9) + strength * factor


class VisibleTokens(NamedTuple):
    """The visual tokens that an update shows.

    Attributes:
        tokens: [i, k, d] features, before or after the projector.
        index: [i, k] indices of the tokens in the image.
        real: [i, k] mask that is false for padding.
        clear: [i, k] mask that is false for padding and noise.
        grid: [i, 2] rows and columns of each image.
    """

    tokens: Float[Array, "i k d"]
    index: Int[Array, "i k"]
    real: Bool[Array, "i k"]
    clear: Bool[Array, "i k"]
    grid: Int[Array, "i 2"]


def show_images(
    params, backbone, images: Images, key, words: Sequence[Words], display: Display
) -> VisibleTokens:
    """Returns the features of images, thinned or mixed with noise as `display` says."""
    taps = () if display.is_complete else (saliency_tap(backbone.config),)
    features, taps = backbone.encode_image(params, images.pixels, taps)
    count, n = features.shape[:2]
    index, real = jnp.broadcast_to(jnp.arange(n), (count, n)), token_mask(backbone, images, n)
    if not taps:
        return VisibleTokens(features, index, real, real, images.grid)
    attention = jax.lax.stop_gradient(saliency(next(iter(taps.values()))))
    sample_key, sharpness_key, taste_key = jax.random.split(key, 3)
    # A third of the images has sharpness 0, and the sharpness of all other images is uniform.
    sharpness = jnp.maximum(0, jax.random.uniform(sharpness_key, (count,), minval=-1, maxval=2))
    words = [name._replace(label=fit_labels(name.label, n)) for name in words]
    saliency_log = _apply_taste(taste_key, attention, words, display.taste)
    if display.is_noisy:
        score_key, noise_key = jax.random.split(sample_key)
        score = _gumbel_scores(score_key, saliency_log, sharpness)
        mixed, clear = mix_noise(noise_key, features, score, real)
        return VisibleTokens(mixed, index, real, clear, images.grid)
    index = sample_tokens(sample_key, saliency_log, display.kept, sharpness, real)
    real = jnp.take_along_axis(real, index, axis=1)
    features = jnp.take_along_axis(features, index[..., None], axis=1)
    return VisibleTokens(features, index, real, real, images.grid)


def _alignment_loss(
    embedding: Float[Array, "v e"],
    visual: Float[Array, "i k e"],
    visible: VisibleTokens,
    words: Words,
    noise_token: int | None,
) -> Float[Array, ""]:
    """Computes the cross-entropy of each patch's word, with embeddings of words as logits.

    The loss moves visual tokens towards the embeddings of the words that name them. A label between
    two words (the horizontal place between "left" and "right") is a probability of the second word.

    Args:
        embedding: [v, e] embeddings of the vocabulary.
        visual: [i, k, e] visual tokens in the space of the embeddings.
        visible: the tokens that the update shows.
        words: the labels of one kind.
        noise_token: token that names noise, whose loss l counts as log(1 + l); None excludes noise.
    """
    # A smaller image has fewer labels than tokens. Its further tokens are padding.
    label = jnp.take_along_axis(words.label, visible.index, axis=1, mode="clip")
    clear, has_word = visible.clear, words.token >= 0
    if jnp.issubdtype(label.dtype, jnp.floating):
        has_target = jnp.isfinite(label) & clear
        probability = jnp.where(jnp.isfinite(label), label, 0.5)
        target = jnp.stack([1 - probability, probability], axis=-1)
        losses = optax.softmax_cross_entropy(visual @ embedding[words.token].T, target)
    else:
        tokens = jnp.maximum(words.token, 0)
        if noise_token is not None:
            tokens, has_word = jnp.append(tokens, noise_token), jnp.append(has_word, True)
            label = jnp.where(clear, label, tokens.shape[0] - 1)
        logits = jnp.where(has_word, visual @ embedding[tokens].T, jnp.finfo(jnp.float32).min)
        has_target = has_word[label] & visible.real
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(has_target, label, jnp.argmax(has_word))
        )
        # The loss of noise is large at first. Without the logarithm, it would dominate.
        losses = jnp.where(clear, losses, jnp.log1p(losses))
    return jnp.sum(jnp.where(has_target, losses, 0)) / jnp.maximum(jnp.sum(has_target), 1)


def _normalize(hidden: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
    """Scales hidden states to a root mean square of 1."""
    return hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)


class MiddleStates(NamedTuple):
    """Hidden states after two thirds of the layers (two of four layers).

    Attributes:
        words: [i, t, e] states at the requested text tokens.
        visual: [i, k, e] states at the visual tokens.
    """

    words: Float[Array, "i t e"]
    visual: Float[Array, "i k e"]


def run_packed(
    params: Params,
    backbone: Backbone,
    visible: VisibleTokens,
    packed: Packed,
    slot: Int[Array, "i t"],
) -> tuple[Float[Array, "i a v"], MiddleStates]:
    """Runs the language model on all exchanges of each image.

    Args:
        params: weights of the model.
        backbone: the model.
        visible: the projected visual tokens.
        packed: the exchanges.
        slot: [i, t] text tokens whose middle states are returned.

    Returns:
        Logits of the supervised tokens, and middle states.
    """
    config = backbone.config
    (images, num_visual), before = visible.index.shape, packed.prefix.shape[0]
    prefix = jnp.broadcast_to(packed.prefix, (images, before))
    prefix_embedding = decoder.embed(params["language"], prefix)
    text_embedding = decoder.embed(params["language"], packed.ids)
    hidden = jnp.concatenate([prefix_embedding, visible.tokens, text_embedding], axis=1)
    offset, extent = backbone.image_positions(visible.grid, visible.index)
    axes = offset.shape[1]
    text_position = before + extent[:, None] + packed.offset
    text_positions = (jnp.broadcast_to(jnp.arange(before), prefix.shape), text_position)
    # Text tokens have the same id on all axes.
    first, last = (jnp.repeat(part[:, None], axes, axis=1) for part in text_positions)
    position = jnp.concatenate([first, before + offset, last], axis=2)
    shared = jnp.zeros((images, before), jnp.int32)
    visual = jnp.where(visible.real, 0, -1)
    segment = jnp.concatenate([shared, visual, packed.segment], axis=1)
    tap = Tap("hidden", 2 * config.text.num_layers // 3)
    rows = Rows(hidden, position, segment >= 0, segment)
    span, outputs = (0, config.text.num_layers), OutputSpec(taps=(tap,))
    stage = decoder.run_layers(params["language"], config.text, rows, span, outputs=outputs)

    def take(states: Array, slot: Array) -> Array:
        return jnp.take_along_axis(states, (before + num_visual + slot)[..., None], axis=1)

    middle = next(iter(stage.taps.values()))
    logits = decoder.logits(params["language"], config.text, take(stage.hidden, packed.target))
    return logits, MiddleStates(take(middle, slot), middle[:, before : before + num_visual])


class Exchanges(NamedTuple):
    """Images with their exchanges and labels.

    Attributes:
        images: the images.
        packed: the exchanges about the images.
        mentions: mentions of the questions; None without labels.
        words: words that name the patches; empty without labels.
    """

    images: Images
    packed: Packed
    mentions: PlacedMentions | None
    words: Sequence[Words]


def language_loss(
    trained: Params,
    frozen: Params,
    backbone: Backbone,
    key: Array,
    batch: Exchanges,
    display: Display,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Computes the mean cross-entropy of the supervised tokens.

    Labels of patches add a quarter of the loss of naming each patch. Labels of mentions add
    `mention_loss` if the image is complete. A model with several position ids per token knows
    places only from these ids, and has no projector after the noise. There, middle states instead
    of visual tokens predict words of places, and name noise.

    Args:
        trained: weights that the stage trains.
        frozen: all other weights.
        backbone: the model.
        key: random key.
        batch: images with exchanges and labels.
        display: how images are shown.

    Returns:
        The loss, and scalars for the log.
    """
    params, (images, packed, mentions, words) = frozen | trained, batch
    visible = show_images(params, backbone, images, key, words, display)
    visible = visible._replace(tokens=backbone.project(params, visible.tokens))
    # A thinned image may not show what a question mentions.
    mentions = mentions if display.is_complete else None
    slot = jnp.zeros((len(visible.index), 0), jnp.int32) if mentions is None else mentions.slot
    logits, middle = run_packed(params, backbone, visible, packed, slot)
    is_supervised = packed.label >= 0
    label = jnp.where(is_supervised, packed.label, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    count = jnp.maximum(jnp.sum(is_supervised), 1)
    accuracy = jnp.sum((jnp.argmax(logits, -1) == label) & is_supervised) / count
    total = jnp.sum(jnp.where(is_supervised, losses, 0)) / count
    embedding = params["language"]["embed"]["embedding"]
    noise_token = (backbone.config.pad_token_id or 0) if display.names_noise else None
    aligned = 0.0
    for name in words:
        is_place = jnp.issubdtype(name.label.dtype, jnp.floating)
        uses_middle = backbone.config.position_axes > 1 and (is_place or display.is_noisy)
        visual = _normalize(middle.visual) if uses_middle else visible.tokens
        aligned += _alignment_loss(embedding, visual, visible, name, noise_token)
    scalars = {"lm_loss": total, "told": accuracy}
    if mentions is None:
        return total + 0.25 * aligned, scalars
    mention_total, mention_scalars = mention_loss(trained["mention_heads"], middle.words, mentions)
    return total + 0.25 * aligned + mention_total, scalars | mention_scalars
