"""One interface to a vision-language model: image, projector, text, prefill, decode.

Everything is a pure function of (params, config, arrays); `config` is static under `jax.jit` and
the frozen weights are an argument, never a closure. Sequences may hold any pruned visual prefix:
rows differ in length, padding stands at the right end only and never changes a result.
"""

from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.decoder import Cache, Stage
from stepprune_jax.models.layers import Tap, activate
from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.llava.config import LlavaConfig

IMAGE_TOKEN = -200
POSITIONS = ("original", "compact")


class Sequence(NamedTuple):
    """Embedded rows of text and visual tokens, ready for the language model.

    Attributes:
        embeddings: [b, s, e]; zeros in the padding.
        position: [b, s] int32 position ids; 0 in the padding.
        length: [b] int32 number of tokens, a prefix of each row.
        next_position: [b] int32 position id of the first generated token.
    """

    embeddings: Float[Array, "b s e"]
    position: Int[Array, "b s"]
    length: Int[Array, "b"]
    next_position: Int[Array, "b"]


class Prefill(NamedTuple):
    """Result of `prefill`.

    Attributes:
        logits: float32, [b, v] at each row's last token, or [b, s, v] if all were asked for.
        cache: keys and values of all layers, with room for the tokens to come.
        taps: intermediates by name.
    """

    logits: Float[Array, "b *s v"]
    cache: Cache
    taps: dict[str, Array]


class Projector(nn.Module):
    """Two projections with an activation between, from the tower's width to the model's."""

    config: LlavaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        """Projects visual features."""
        width = self.config.text.hidden_size
        x = activate(self.config.projector_activation, nn.Dense(width, name="up")(x))
        return nn.Dense(width, name="down")(x)


def init_params(key: Array, config: LlavaConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random weights of the whole model.

    Args:
        key: PRNG key; consumed.
        config: the model's shape.
        dtype: of every leaf.

    Returns:
        A plain nested dict {"vision", "projector", "language"}; kernels are [in, out], weights of
        layers are stacked along a leading axis.
    """
    vision, projector, language = jax.random.split(key, 3)
    sample = jnp.zeros((1, config.vision.hidden_size))
    params = {
        "vision": clip.init_vision(vision, config.vision),
        "projector": Projector(config).init(projector, sample)["params"],
        "language": llama.init_language(language, config.text),
    }
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def abstract_params(config: LlavaConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """The tree of `init_params` as `jax.ShapeDtypeStruct`s, without allocating anything."""
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))


def encode_image(
    params: dict[str, Any],
    config: LlavaConfig,
    pixels: Float[Array, "i 3 H W"],
    taps: Ordered[Tap] = (),
    attention: str = "matmul",
) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
    """Visual features before the projector.

    Args:
        params: the model's weights.
        config: the model's shape.
        pixels: [i, 3, H, W] normalised images.
        taps: intermediates of the tower, see `clip.encode`.
        attention: "matmul", "xla" or "cudnn".

    Returns:
        [i, n, d] hidden state `feature_layer` (for "default" without the class token), patches
        row by row; and the taps by name.

    Raises:
        ValueError: images of another size, unknown tap or attention.
    """
    features, found = clip.encode(
        params["vision"], config.vision, pixels, config.feature_layer, taps, attention
    )
    return features[:, int(config.feature_select == "default") :], found


def project(
    params: dict[str, Any], config: LlavaConfig, features: Float[Array, "*b d"]
) -> Float[Array, "*b e"]:
    """Maps visual features [..., d] to the language model's width [..., e]."""
    return Projector(config).apply({"params": params["projector"]}, features)


def embed_text(
    params: dict[str, Any], config: LlavaConfig, ids: Int[Array, "b l"]
) -> Float[Array, "b l e"]:
    """Token embeddings [b, l, e] of ids [b, l]; image places get those of id 0."""
    del config  # Part of the interface: other backbones scale their embeddings by it.
    return llama.embed(params["language"], ids)


class _Places(NamedTuple):
    """What stands at each id: a text token, an image that was given, or nothing."""

    text: Bool[Array, "b l"]
    shown: Bool[Array, "b l"]
    image: Int[Array, "b l"]


def _places(ids: Array, text_length: Array, num_images: int) -> _Places:
    """Reads text, images and padding off the ids; `image` is 0 where there is none."""
    present = jnp.arange(ids.shape[1]) < text_length[:, None]
    sentinel = (ids == IMAGE_TOKEN) & present
    image = jnp.cumsum(sentinel, axis=1) - 1
    shown = sentinel & (image < num_images)
    return _Places(present & ~sentinel, shown, jnp.where(shown, image, 0))


def _starts(places: _Places, span: Int[Array, "b j"]) -> tuple[Array, Array, Array]:
    """Where each id [b, l] and each image [b, j] begins, and the end [b], if images span `span`."""
    (b, j), (text, shown, image) = span.shape, places
    width = text.astype(jnp.int32)
    if j:
        width = jnp.where(shown, jnp.take_along_axis(span, image, axis=1), width)
    start = jnp.cumsum(width, axis=1) - width
    # Ids without an image write to slot j, which is cut off.
    of_image = jnp.zeros((b, j + 1), jnp.int32)
    of_image = of_image.at[jnp.arange(b)[:, None], jnp.where(shown, image, j)].set(start)[:, :j]
    return start, of_image, width.sum(1)


def assemble(
    params: dict[str, Any],
    config: LlavaConfig,
    ids: Int[Array, "b l"],
    text_length: Int[Array, "b"],
    visual: Float[Array, "b j k e"],
    visual_valid: Bool[Array, "b j k"],
    visual_index: Int[Array, "b j k"],
    positions: str = "original",
    capacity: int | None = None,
) -> Sequence:
    """Puts each image's kept tokens in the place of its sentinel, and pads at the right end.

    Args:
        params: the model's weights.
        config: the model's shape.
        ids: [b, l] token ids with -200 where an image stands, right-padded with anything.
        text_length: [b] ids of each row, sentinels counted as one.
        visual: [b, j, k, e] projected tokens of each row's images in order of their sentinels.
        visual_valid: [b, j, k] True = kept token; a prefix of each image.
        visual_index: [b, j, k] index of each kept token among its image's n.
        positions: "original": position ids of the sequence with all n tokens of every image, so
            kept token i of an image that begins at p has p + i and what follows it goes on from
            p + n; "compact": 0, 1, 2, ... over what is there.
        capacity: static length s of the result; by default l + j * k, which always suffices. Rows
            that are longer are cut at the right end.

    Returns:
        A `Sequence`. Images without a sentinel are ignored, a sentinel without an image vanishes.

    Raises:
        ValueError: `positions` is not one of the two.
    """
    if positions not in POSITIONS:
        raise ValueError(f"positions is {positions!r}; supported: {', '.join(POSITIONS)}")
    (b, l), (j, k) = ids.shape, visual.shape[1:3]
    s = l + j * k if capacity is None else capacity
    places = _places(ids, text_length, j)
    text_slot, image_slot, total = _starts(places, visual_valid.sum(-1, dtype=jnp.int32))
    visual_slot = image_slot[..., None] + jnp.arange(k)
    if positions == "compact":
        text_position, visual_position, following = text_slot, visual_slot, total
    else:
        full = jnp.full((b, j), config.num_image_tokens, jnp.int32)
        text_position, image_start, following = _starts(places, full)
        visual_position = image_start[..., None] + visual_index
    used = jnp.arange(j) < places.shown.sum(1)[:, None]
    # Every source gets the slot it goes to; what is absent goes to slot s, which is dropped.
    slot = jnp.concatenate(
        [
            jnp.where(places.text, text_slot, s),
            jnp.where(visual_valid & used[..., None], visual_slot, s).reshape(b, j * k),
        ],
        axis=1,
    )
    position = jnp.concatenate([text_position, visual_position.reshape(b, j * k)], axis=1)
    rows = jnp.arange(b)[:, None]
    sources = jnp.arange(l + j * k)
    source = jnp.zeros((b, s), jnp.int32).at[rows, slot].set(sources, mode="drop")
    length = jnp.minimum(total, s).astype(jnp.int32)
    filled = jnp.arange(s) < length[:, None]
    text = embed_text(params, config, ids)
    visual = visual.reshape(b, j * k, visual.shape[3]).astype(text.dtype)
    tokens = jnp.concatenate([text, visual], axis=1)
    embeddings = jnp.take_along_axis(tokens, source[..., None], axis=1)
    position = jnp.where(filled, jnp.take_along_axis(position, source, axis=1), 0)
    position = position.astype(jnp.int32)
    # A row that was cut goes on after what is left of it.
    following = jnp.where(total > s, position.max(1) + 1, following)
    return Sequence(
        jnp.where(filled[..., None], embeddings, 0), position, length, following.astype(jnp.int32)
    )


def run_layers(
    params: dict[str, Any],
    config: LlavaConfig,
    hidden: Float[Array, "b s e"],
    position: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    first: int,
    last: int,
    cache: Cache | None = None,
    **options: Any,
) -> Stage:
    """Runs the language model's layers [first:last] as one stage; see `llama.run_layers`.

    Args:
        params: the model's weights.
        config: the model's shape.
        hidden: [b, s, e] residual stream; embeddings for the first stage.
        position: [b, s] int32 position ids.
        valid: [b, s] True = token, a prefix of each row.
        first: first layer.
        last: layer to stop before.
        cache: the stage's cache to read and extend, or None.
        **options: `capacity`, `taps`, `query_index`, `remat`, `attention`, `segment` of
            `llama.run_layers`.

    Returns:
        A `Stage`: hidden states, the stage's cache, taps.
    """
    language = params["language"]
    return llama.run_layers(
        language, config.text, hidden, position, valid, first, last, cache, **options
    )


def logits(
    params: dict[str, Any], config: LlavaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b v"]:
    """Float32 logits [..., v] of last-layer hidden states [..., e]: final norm and head."""
    return llama.logits(params["language"], config.text, hidden)


def prefill(
    params: dict[str, Any],
    config: LlavaConfig,
    sequence: Sequence,
    max_new_tokens: int,
    taps: Ordered[Tap] = (),
    query_index: Int[Array, "b q"] | None = None,
    all_logits: bool = False,
    remat: bool = False,
    attention: str = "matmul",
) -> Prefill:
    """Runs the language model over a sequence and fills a cache.

    Args:
        params: the model's weights.
        config: the model's shape.
        sequence: from `assemble`.
        max_new_tokens: slots to leave free in the cache; a token generated beyond them would not
            be seen by later ones.
        taps: intermediates, see `llama.run_layers`.
        query_index: [b, q] slots of the queries of "attention" taps.
        all_logits: logits of all slots, for losses and tests, instead of each row's last.
        remat: recompute blocks in the backward pass.
        attention: "matmul", "xla" or "cudnn".

    Returns:
        A `Prefill`.

    Raises:
        ValueError: unknown tap or attention.
    """
    embeddings, position, length, following = sequence
    s = embeddings.shape[1]
    valid = jnp.arange(s) < length[:, None]
    stage = run_layers(
        params,
        config,
        embeddings,
        position,
        valid,
        0,
        config.text.num_layers,
        capacity=s + max_new_tokens,
        taps=taps,
        query_index=query_index,
        remat=remat,
        attention=attention,
    )
    hidden = stage.hidden
    if not all_logits:
        last = jnp.maximum(length - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    cache = stage.cache._replace(next_position=following)
    return Prefill(logits(params, config, hidden), cache, stage.taps)


def decode_step(
    params: dict[str, Any],
    config: LlavaConfig,
    token: Int[Array, "b"],
    cache: Cache | tuple[Cache, ...],
) -> tuple[Float[Array, "b v"], Cache | tuple[Cache, ...]]:
    """Reads one token per row and returns the logits of the next.

    Args:
        params: the model's weights.
        config: the model's shape.
        token: [b] ids.
        cache: the cache of all layers, or a tuple of caches of consecutive stages, whose rows may
            have kept different numbers of tokens. Donate it under jit: it is extended in place.

    Returns:
        [b, v] float32 logits and the extended cache, of the same kind.

    Raises:
        ValueError: the caches together do not have the model's layers.
    """
    stages = (cache,) if isinstance(cache, Cache) else tuple(cache)
    depth = sum(stage.key.shape[0] for stage in stages)
    if depth != config.text.num_layers:
        raise ValueError(f"the caches hold {depth} layers, the model has {config.text.num_layers}")
    hidden = embed_text(params, config, token[:, None])
    valid = jnp.ones(hidden.shape[:2], bool)
    extended, first = [], 0
    for stage in stages:
        last = first + stage.key.shape[0]
        position = stage.next_position[:, None]
        hidden, stage, _ = run_layers(params, config, hidden, position, valid, first, last, stage)
        extended.append(stage)
        first = last
    result = extended[0] if isinstance(cache, Cache) else tuple(extended)
    return logits(params, config, hidden[:, 0]), result
