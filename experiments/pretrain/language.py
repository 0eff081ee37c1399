"""Second and third stage: projector, or merger, and language model learn to answer.

On a share of the steps only some of the visual tokens are shown, at their own positions, like a
pruned prefix later; in the third stage also all of them, most replaced by noise, as by a noise
gate. A large model tolerates such prefixes by its scale; a small one has to be trained on them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.pretrain.images import Images, of_tokens, real_tokens
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
from stepprune_jax.policy.noise import (
    noise_gate,
    restore,
    standardise,
    update_stats,
)


def thinned(
    key: Array,
    saliency_log: Float[Array, "i n"],
    kept: int,
    sharpness: Float[Array, "i"],
    real: Bool[Array, "i n"],
) -> Int[Array, "i k"]:
    """Draws visual tokens to keep, in raster order.

    They are drawn without repetition with probabilities proportional to saliency ** sharpness:
    uniformly for sharpness 0; above, the more likely the more the class token attends to them.
    """
    score = _scores(key, saliency_log, sharpness)
    score = jnp.where(real, score, jnp.finfo(score.dtype).min)
    return jnp.sort(jax.lax.top_k(score, kept)[1], axis=1)


def _scores(key: Array, saliency_log: Array, sharpness: Array) -> Array:
    """Returns scores whose k largest are such a draw, for any k."""
    return sharpness[:, None] * saliency_log + jax.random.gumbel(key, saliency_log.shape)


def noised(
    key: Array,
    features: Float[Array, "i n d"],
    score: Float[Array, "i n"],
    real: Bool[Array, "i n"],
) -> tuple[Float[Array, "i n d"], Bool[Array, "i n"]]:
    """Mixes tokens with noise, Eq. (13), so that little of most tokens remains.

    Each image keeps the tokens with its k largest scores, k being drawn log-uniformly from 2 to n,
    with a gate from .6 to 1 per image; the gates of the others are from 0 to .1.
    """
    images, n = score.shape[0], jnp.sum(real, axis=1, keepdims=True)
    score = jnp.where(real, score, jnp.finfo(score.dtype).min)
    count_key, gate_key, noise_key = jax.random.split(key, 3)
    count = jnp.exp(jax.random.uniform(count_key, (images, 1), maxval=jnp.log(n / 2))) * 2
    rank = jnp.argsort(jnp.argsort(-score, axis=1), axis=1)
    inside, outside = jax.random.uniform(gate_key, (2, images, 1))
    kept = rank < count
    alpha = jnp.where(kept, 0.6 + 0.4 * inside, 0.1 * outside)
    stats = update_stats(FeatureStats.start(features.shape[-1]), features, real)
    return restore(noise_gate(noise_key, standardise(features, stats), alpha), stats), kept


class Display(NamedTuple):
    """How a step shows an image.

    Attributes:
        kept: number of visual tokens shown; None shows all.
        filled: whether those are first of all the patches that show something, so that nothing is
            lost.
        noisy: whether to show all, most of them as noise; see `noised`.
        taste: how strongly the choice depends on the contents of patches; see `_favour`.
        silence: whether patches may be named by a meaningless token, as noise is.
    """

    kept: int | None = None
    filled: bool = False
    noisy: bool = False
    taste: float = 2.0
    silence: bool = False

    @property
    def all_contents(self) -> bool:
        """Whether everything that a question may be about is visible."""
        return not self.noisy and (self.kept is None or self.filled)


class Words(NamedTuple):
    """Contents of patches, as tokens of the vocabulary.

    Attributes:
        label: class of each patch; or, between two words, the share of the second, NaN where it is
            undefined.
        token: token of each class; -1 if it has no word.
    """

    label: Int[Array, "i n"] | Float[Array, "i n"]
    token: Int[Array, "c"]


def _favour(key: Array, saliency: Array, words: Sequence[Words], strength: float) -> Array:
    """Multiplies saliency by a random factor for each class of patches, drawn for each image.

    The logarithm of a factor has the standard deviation `strength`. A policy keeps the patches that
    a question is about and drops the rest. A model trained only on randomly thinned images mistakes
    the proportions of the kept patches for those of the image, and miscounts.
    """
    factor = jnp.zeros(saliency.shape)
    for number, patch_words in enumerate(words):
        if jnp.issubdtype(patch_words.label.dtype, jnp.integer):
            shape = (saliency.shape[0], patch_words.token.shape[0])
            taste = jax.random.normal(jax.random.fold_in(key, number), shape)
            factor += jnp.take_along_axis(taste, patch_words.label, axis=1)
    return jnp.log(saliency + 1e-9) + strength * factor


def _has_place(real: Bool[Array, "i n"], words: Sequence[Words]) -> Bool[Array, "i n"]:
    """Returns which patches show something that has a place: the share of a word is defined."""
    has_share = jnp.zeros_like(real)
    for patch_words in words:
        if jnp.issubdtype(patch_words.label.dtype, jnp.floating):
            has_share |= jnp.isfinite(patch_words.label)
    return has_share & real


class VisibleTokens(NamedTuple):
    """Visual tokens that are shown.

    Attributes:
        tokens: features, or what they are projected to.
        index: their places among the image's n.
        real: which are not padding.
        clear: which are neither padding nor noise.
        grid: rows and columns of each image.
    """

    tokens: Float[Array, "i k d"]
    index: Int[Array, "i k"]
    real: Bool[Array, "i k"]
    clear: Bool[Array, "i k"]
    grid: Int[Array, "i 2"]


def _display(
    params, backbone, images: Images, key, words: Sequence[Words], display: Display
) -> VisibleTokens:
    """Returns visual features of images, thinned or mixed with noise."""
    taps = () if display.kept is None and not display.noisy else (saliency_tap(backbone.config),)
    features, taps = backbone.encode_image(params, images.pixels, taps)
    count, n = features.shape[:2]
    index, real = jnp.broadcast_to(jnp.arange(n), (count, n)), real_tokens(backbone, images, n)
    if not taps:
        return VisibleTokens(features, index, real, real, images.grid)
    attention = jax.lax.stop_gradient(saliency(next(iter(taps.values()))))
    draw_key, sharp_key, taste_key = jax.random.split(key, 3)
    # A third of the images uniformly, the others with increasing weight on salient patches.
    sharpness = jnp.maximum(0, jax.random.uniform(sharp_key, (count,), minval=-1, maxval=2))
    words = [named._replace(label=of_tokens(named.label, n)) for named in words]
    favour = _favour(taste_key, attention, words, display.taste)
    if display.noisy:
        score_key, noise_key = jax.random.split(draw_key)
        score = _scores(score_key, favour, sharpness)
        mixed, clear = noised(noise_key, features, score, real)
        return VisibleTokens(mixed, index, real, clear, images.grid)
    if display.filled:
        # Far beyond the noise of the draw.
        favour, sharpness = 1e3 * _has_place(real, words), jnp.ones_like(sharpness)
    index = thinned(draw_key, favour, display.kept, sharpness, real)
    real = jnp.take_along_axis(real, index, axis=1)
    features = jnp.take_along_axis(features, index[..., None], axis=1)
    return VisibleTokens(features, index, real, real, images.grid)


def _alignment_loss(
    embedding: Float[Array, "v e"],
    visual: Float[Array, "i k e"],
    visible: VisibleTokens,
    words: Words,
    silent: int | None,
) -> Float[Array, ""]:
    """Computes the cross-entropy of each patch's word among its kind, by the nearest embedding.

    It moves visual tokens into the space of the words that name them, so that matching words works
    for both. A share between two words (how far to the right between "left" and "right") is
    predicted in the same way. Noise is named by the meaningless token `silent`, and its loss l
    counts as log(1 + l).
    """
    # Behind the labels there is only padding.
    label = jnp.take_along_axis(words.label, visible.index, axis=1, mode="clip")
    clear, has_word = visible.clear, words.token >= 0
    if jnp.issubdtype(label.dtype, jnp.floating):
        has_target = jnp.isfinite(label) & clear
        share = jnp.where(jnp.isfinite(label), label, 0.5)
        target = jnp.stack([1 - share, share], axis=-1)
        losses = optax.softmax_cross_entropy(visual @ embedding[words.token].T, target)
    else:
        tokens = jnp.maximum(words.token, 0)
        if silent is not None:
            tokens, has_word = jnp.append(tokens, silent), jnp.append(has_word, True)
            label = jnp.where(clear, label, tokens.shape[0] - 1)
        logits = jnp.where(has_word, visual @ embedding[tokens].T, jnp.finfo(jnp.float32).min)
        has_target = has_word[label] & visible.real
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(has_target, label, jnp.argmax(has_word))
        )
        # Noise is far from its name at first; the rest must not be forgotten over it.
        losses = jnp.where(clear, losses, jnp.log1p(losses))
    return jnp.sum(jnp.where(has_target, losses, 0)) / jnp.maximum(jnp.sum(has_target), 1)


def _normalised(hidden: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
    """Hidden states at a root mean square of one."""
    return hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)


class Inside(NamedTuple):
    """Hidden states after two thirds of the layers, of four layers two.

    Attributes:
        words: at the places that were asked for.
        visual: at the visual tokens.
    """

    words: Float[Array, "i t e"]
    visual: Float[Array, "i k e"]


def run_packed(
    params: Params,
    backbone: Backbone,
    visible: VisibleTokens,
    packed: Packed,
    slot: Int[Array, "i t"],
) -> tuple[Float[Array, "i a v"], Inside]:
    """Runs the language model on all exchanges of an image at once."""
    config = backbone.config
    (images, num_visual), before = visible.index.shape, packed.prefix.shape[0]
    prefix = jnp.broadcast_to(packed.prefix, (images, before))
    prefix_embedding = decoder.embed(params["language"], prefix)
    text_embedding = decoder.embed(params["language"], packed.ids)
    hidden = jnp.concatenate([prefix_embedding, visible.tokens, text_embedding], axis=1)
    offset, extent = backbone.image_positions(visible.grid, visible.index)
    axes = offset.shape[1]
    text_position = before + extent[:, None] + packed.offset
    of_text = (jnp.broadcast_to(jnp.arange(before), prefix.shape), text_position)
    first, last = (jnp.repeat(part[:, None], axes, axis=1) for part in of_text)
    position = jnp.concatenate([first, before + offset, last], axis=2)
    shared = jnp.zeros((images, before), jnp.int32)
    visual = jnp.where(visible.real, 0, -1)
    segment = jnp.concatenate([shared, visual, packed.segment], axis=1)
    middle = Tap("hidden", 2 * config.text.num_layers // 3)
    rows = Rows(hidden, position, segment >= 0, segment)
    span, outputs = (0, config.text.num_layers), OutputSpec(taps=(middle,))
    stage = decoder.run_layers(params["language"], config.text, rows, span, outputs=outputs)

    def at(states: Array, slot: Array) -> Array:
        return jnp.take_along_axis(states, (before + num_visual + slot)[..., None], axis=1)

    inside = next(iter(stage.taps.values()))
    logits = decoder.logits(params["language"], config.text, at(stage.hidden, packed.target))
    return logits, Inside(at(inside, slot), inside[:, before : before + num_visual])


class Exchanges(NamedTuple):
    """Images with their exchanges and labels.

    Attributes:
        images: the images.
        packed: their exchanges.
        mentions: what their questions mention; None without labels.
        words: contents of their patches; empty without labels.
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
    """Computes the mean cross-entropy of the supervised tokens, all exchanges of an image at once.

    With `words`, a quarter of the loss of naming each patch by its nearest word is added; with
    `mentions` and the whole image, that of `mention_loss`. Where a token has several position ids
    they alone say where it is, and no projector stands behind the noise: there shares between two
    words, and noise, are named after two thirds of the layers.
    """
    params, (images, packed, mentions, words) = frozen | trained, batch
    visible = _display(params, backbone, images, key, words, display)
    visible = visible._replace(tokens=backbone.project(params, visible.tokens))
    # A thinned image may not show what a question mentions.
    mentions = mentions if display.all_contents else None
    slot = jnp.zeros((len(visible.index), 0), jnp.int32) if mentions is None else mentions.slot
    logits, inside = run_packed(params, backbone, visible, packed, slot)
    is_supervised = packed.label >= 0
    label = jnp.where(is_supervised, packed.label, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    count = jnp.maximum(jnp.sum(is_supervised), 1)
    accuracy = jnp.sum((jnp.argmax(logits, -1) == label) & is_supervised) / count
    total = jnp.sum(jnp.where(is_supervised, losses, 0)) / count
    embedding = params["language"]["embed"]["embedding"]
    silent = (backbone.config.pad_token_id or 0) if display.silence else None
    aligned = 0.0
    for named in words:
        share = jnp.issubdtype(named.label.dtype, jnp.floating)
        late = backbone.config.position_axes > 1 and (share or display.noisy)
        visual = _normalised(inside.visual) if late else visible.tokens
        aligned += _alignment_loss(embedding, visual, visible, named, silent)
    scalars = {"lm_loss": total, "told": accuracy}
    if mentions is None:
        return total + 0.25 * aligned, scalars
    mentioned, more = mention_loss(trained["mention_heads"], inside.words, mentions)
    return total + 0.25 * aligned + mentioned, scalars | more
