"""GlimpsePrune: a predictor scores visual tokens by the attention of an extra token.

Zeng et al. (https://arxiv.org/abs/2508.01548); the published weights can be loaded. A *glimpse
token* is appended to the prompt, and a learned vector is added to its state before each layer of
the language model. After some layers, a predictor reads the glimpse token's attention to each
visual token. Each block of the predictor also reads the visual tokens' states in one block of the
vision tower. Tokens whose probability exceeds a threshold remain. The glimpse token and all other
visual tokens are dropped, including their keys and values in the KV caches of earlier layers.

A *tap* is an intermediate result that a model returns. A *cut* is a layer boundary at which visual
tokens are dropped.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Segment, Tap, attend
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.rotary import axial_cos_sin, geometric_frequencies, rotate
from stepprune_jax.models.sequence import Sequence
from stepprune_jax.policy.layers import dense, merge_heads, split_heads
from stepprune_jax.policy.params import Init, ParamSpec
from stepprune_jax.pruning.base import (
    Kept,
    LayerCut,
    LayerPruner,
    PrunerInputs,
    Schedule,
    Survivors,
)
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import keep_best, require_grid
from stepprune_jax.selectors.base import TrainedPruner, Weights
from stepprune_jax.settings import Settings, count, setting
from stepprune_jax.user_input import UserError, expect

# Epsilon of the predictor's norms and base of its rotary embedding, as in the authors' code.
_EPS = 1e-6
_ROPE_BASE = 10000.0


def _layers(*default: int) -> Any:
    """Defines a settings field with different indices of layers; `default` is its default."""

    def is_valid(layers: tuple[int, ...]) -> bool:
        return bool(layers) and min(layers) >= 0 and len({*layers}) == len(layers)

    return setting(default, "different numbers of layers", is_valid)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GlimpsePruneConfig(Settings, path="GlimpsePruneConfig"):
    """Shape of the glimpse token and the predictor; the defaults are those for LLaVA-1.5-7B.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the language model.
        num_attention_heads: number of attention heads of the language model.
        vision_width: width of the tower's blocks.
        le_layers: layers before which a vector is added to the glimpse token; includes 0.
        selected_layers: layers whose attention the predictor reads.
        reduce_layer: layer after which tokens are dropped.
        selected_visual_layers: states of the tower that the predictor's blocks read, as the number
            of the tower's blocks before each state.
        use_attention_logits: whether the predictor reads attention logits instead of
            log-probabilities.
        attn_fuse_size: width of the predictor.
        visual_cond_size: width of the projected states of the tower.
        attn_fuse_num_heads: number of attention heads of the predictor.
        rms_norm_eps: epsilon of the norm of the added vectors.
        reduce_threshold: probability above which tokens remain.
    """

    feature_width: int = count(1024)
    text_width: int = count(4096)
    num_attention_heads: int = count(32)
    vision_width: int = count(1024)
    le_layers: tuple[int, ...] = _layers(*range(32))
    selected_layers: tuple[int, ...] = _layers(21)
    reduce_layer: int = 21
    selected_visual_layers: tuple[int, ...] = _layers(23, 17, 11, 5)
    use_attention_logits: bool = False
    attn_fuse_size: int = count(256)
    visual_cond_size: int = count(512)
    attn_fuse_num_heads: int = count(4)
    rms_norm_eps: float | int = 1e-5
    reduce_threshold: float | int = 0.5

    def __post_init__(self):
        super().__post_init__()
        last_layer, num_heads = max(self.selected_layers), self.attn_fuse_num_heads
        self.expect("le_layers", 0 in self.le_layers, "layer 0 among them")
        has_attention = self.reduce_layer >= last_layer
        self.expect("reduce_layer", has_attention, f"at least {last_layer}, which it reads")
        # The rotary embedding rotates pairs of channels, half of them by row and half by column.
        is_divisible = self.attn_fuse_size % num_heads == 0 and self.width % (4 * num_heads) == 0
        expected = f"a divisor of {self.width} / 4 channels"
        self.expect("attn_fuse_num_heads", is_divisible, expected)

    @property
    def width(self) -> int:
        """The width of the predictor's queries and keys."""
        return self.attn_fuse_size + self.visual_cond_size


def rms_norm(
    scale: Float[Array, "d"], x: Float[Array, "*b d"], eps: float | int
) -> Float[Array, "*b d"]:
    """Applies RMS normalization over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def glimpse_vectors(weights: Weights, config: GlimpsePruneConfig) -> Float[Array, "layers e"]:
    """Computes the vector that is added to the glimpse token's state before each layer.

    Args:
        weights: weights of the vectors: embeddings, a linear layer, and the scale of a norm.
        config: configuration of the method.

    Returns:
        [layers, e] one vector for each of the `reduce_layer + 1` layers that the glimpse token
        passes; zero for layers without a vector.
    """
    embeddings = dense(weights, weights["embeddings"][:, 0])
    vectors = rms_norm(weights["scale"], embeddings, config.rms_norm_eps)
    layers = jnp.array(config.le_layers)
    # `mode="drop"` ignores the vectors of later layers, which only training needs.
    zeros = jnp.zeros((config.reduce_layer + 1, config.text_width), vectors.dtype)
    return zeros.at[layers].set(vectors, mode="drop")


def attention_map(
    config: GlimpsePruneConfig, taps: dict[str, Float[Array, "b h 1 t"]], slots: int
) -> Float[Array, "b s a"]:
    """Returns the glimpse token's attention to the visual tokens, the input of the predictor.

    Args:
        config: configuration of the method.
        taps: [b, h, 1, t] attention logits of the glimpse token to t positions of the sequence, by
            the name "scores.LAYER".
        slots: s, the number of leading positions of the sequence that hold visual tokens.

    Returns:
        [b, s, a] log-probabilities, or logits, of all heads of all selected layers; a is the number
        of heads times the number of layers.
    """
    scores = [taps[f"scores.{layer}"][:, :, 0] for layer in config.selected_layers]
    if not config.use_attention_logits:
        scores = [jax.nn.log_softmax(score, axis=-1) for score in scores]
    return jnp.concatenate(scores, axis=1)[..., :slots].swapaxes(1, 2)


def predict(
    weights: Weights,
    config: GlimpsePruneConfig,
    sequence: Sequence,
    attention: Float[Array, "b s a"],
) -> Float[Array, "b s"]:
    """Computes the logit with which the predictor keeps each visual token.

    The predictor is a transformer over the visual tokens of one image. Its input is the glimpse
    token's attention. Queries and keys also read the states of the vision tower.

    Args:
        weights: weights of the predictor.
        config: configuration of the method.
        sequence: rows of s positions. `note` holds the projected states of the tower, [b, s, blocks
            * c], and `image` the index of each position's image, negative in the padding.
        attention: [b, s, a] result of `attention_map`.

    Returns:
        [b, s] float32 logits; without meaning in the padding.
    """
    assert sequence.note is not None and sequence.grid is not None
    is_visual, num_heads = sequence.image >= 0, config.attn_fuse_num_heads
    # [b, s, s]: tokens attend to tokens of their image.
    is_same_image = (sequence.image[:, :, None] == sequence.image[:, None]) & is_visual[:, None]
    image_index = jnp.maximum(sequence.image, 0)
    num_columns = jnp.take_along_axis(sequence.grid[..., 1], image_index, axis=1)
    row_and_column = jnp.stack(jnp.divmod(sequence.index, jnp.maximum(num_columns, 1)), axis=1)
    frequencies = geometric_frequencies(_ROPE_BASE, config.width // num_heads // 2)
    cos_and_sin = axial_cos_sin((frequencies, frequencies), row_and_column)
    # The attention of padding is the lowest number; zeros keep products finite.
    x = dense(weights["attention_in"], jnp.where(is_visual[..., None], attention, 0))
    states = jnp.split(sequence.note, len(config.selected_visual_layers), axis=2)
    for i, state in enumerate(states):
        block = weights[f"block_{i}"]
        normed = rms_norm(block["norm1"], x, _EPS)
        conditioned = jnp.concatenate([normed, state], axis=2)
        query, key = (
            rotate(split_heads(dense(block[name], conditioned), num_heads), *cos_and_sin)
            for name in ("query", "key")
        )
        value = split_heads(dense(block["value"], normed), num_heads)
        mixed = attend(query, [Segment(key, value, is_same_image)])
        x += dense(block["out"], merge_heads(mixed))
        normed = rms_norm(block["norm2"], x, _EPS)
        hidden = jax.nn.silu(dense(block["gate"], normed)) * dense(block["up"], normed)
        x += dense(block["down"], hidden)
    return dense(weights["out"], x)[..., 0]


@dataclasses.dataclass(frozen=True)
class GlimpsePrune(TrainedPruner, LayerPruner):
    """Keeps the visual tokens with the best logits of a trained predictor.

    With an exact budget, that number of tokens remains of each image. With the budget "adaptive",
    the three options below determine the number.

    Attributes:
        config: configuration of the method.
        reduce_threshold: probability above which tokens remain; None for the configuration's
            threshold.
        min_remain_num: smallest number of remaining tokens per image.
        max_remain_ratio: largest fraction of an image's tokens that remains, rounded down; None for
            no limit.
    """

    config: GlimpsePruneConfig = dataclasses.field(default_factory=GlimpsePruneConfig, kw_only=True)
    reduce_threshold: float | None = None
    min_remain_num: int = 1
    max_remain_ratio: float | None = None

    name = "glimpseprune"
    label = "GlimpsePrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "adaptive")
    config_type: ClassVar[type | None] = GlimpsePruneConfig

    def specs(self) -> Weights:
        """Returns the specifications of the glimpse token's vectors and of the predictor."""
        config, e, d = self.config, self.config.text_width, self.config.attn_fuse_size
        width, block_indices = config.width, range(len(config.selected_visual_layers))

        def vector(width: int, init: Init = "ones"):
            return ParamSpec((width,), (None,), init)

        def layer(input_width: int, output_width: int, *, has_bias: bool = True):
            shape = (input_width, output_width)
            kernel = {"kernel": ParamSpec(shape, (None, None), "fan_in")}
            return kernel | ({"bias": vector(output_width, "zeros")} if has_bias else {})

        block = {name: vector(d) for name in ("norm1", "norm2")}
        block |= {name: layer(width, width, has_bias=False) for name in ("query", "key")}
        block |= {name: layer(d, d, has_bias=False) for name in ("value", "out")}
        block |= {"gate": layer(d, 2 * d), "up": layer(d, 2 * d), "down": layer(2 * d, d)}
        embeddings = ParamSpec((len(config.le_layers), 1, e), (None,) * 3, "token")
        return {
            "glimpse": layer(e, e) | {"embeddings": embeddings, "scale": vector(e)},
            "attention_in": layer(len(config.selected_layers) * config.num_attention_heads, d),
            **{
                f"state_{i}": layer(config.vision_width, config.visual_cond_size)
                for i in block_indices
            },
            **{f"block_{i}": block for i in block_indices},
            "out": layer(d, 1),
        }

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Raises a UserError for invalid options, or weights of another model.

        Args:
            config: configuration of the model.
            num_tokens: number of visual tokens per image.
        """
        super().check(config, num_tokens)
        require_grid(config, self.name)
        ratio, threshold = self.max_remain_ratio, self.reduce_threshold
        is_probability = threshold is None or 0 <= threshold <= 1
        self.expect("reduce_threshold", is_probability, "a probability from 0 to 1")
        is_count = 0 <= self.min_remain_num <= num_tokens
        self.expect("min_remain_num", is_count, f"0 to {num_tokens}")
        self.expect("max_remain_ratio", ratio is None or 0 < ratio <= 1, "a share in (0, 1]")
        weights_config, text, vision = self.config, config.text, config.vision
        last_visual_layer = max(weights_config.selected_visual_layers)
        for name, is_compatible in (
            ("num_attention_heads", weights_config.num_attention_heads == text.num_heads),
            ("vision_width", weights_config.vision_width == vision.hidden_size),
            ("reduce_layer", weights_config.reduce_layer < text.num_layers - 1),
            ("selected_visual_layers", last_visual_layer <= vision.num_layers),
        ):
            field = f"{self.name}: {name} of its weights"
            expect(field, getattr(weights_config, name), is_compatible, "one of this model's")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the states of the vision tower that the predictor reads, as taps."""
        return tuple(Tap("hidden", layer) for layer in self.config.selected_visual_layers)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the layer after `reduce_layer`, at which visual tokens are dropped."""
        taps = tuple(Tap("scores", layer) for layer in self.config.selected_layers)
        return (LayerCut(self.config.reduce_layer + 1, taps, prunes_cache=True),)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the numbers of visual tokens before and after the cut, for planning shapes.

        All tokens enter the language model. After the cut, the budget remains, or with the budget
        "adaptive" at most the number that `max_remain_ratio` allows.
        """
        if self.budget.is_exact:
            return LayerPruner.schedule(self, config, num_tokens)
        survivors = Survivors(int(self._max_remaining(num_tokens)[num_tokens]))
        return Schedule(num_tokens, num_tokens, (survivors,))

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps all tokens until the cut, and stores the projected states of the tower.

        `drop` receives the states, [b, n, blocks * c], as `Sequence.note`.
        """
        n, weights = view.tokens.shape[1], self.params
        with jax.default_matmul_precision("highest"):
            notes = [
                # Skips the tower's class token, which comes first if there is one.
                dense(weights[f"state_{i}"], tap[:, -n:].astype(jnp.float32))
                for i, tap in enumerate(view.taps)
            ]
        return super().keep(view, capacity)._replace(note=jnp.concatenate(notes, axis=2))

    def prune(self, *_: Any, **__: Any) -> None:
        """Raises a UserError: the method needs the attention of a language model."""
        raise UserError(f"{self.name} prunes inside a language model: give it to `generate`")

    def probe(self) -> Float[Array, "layers e"]:
        """Returns the vectors that are added to the glimpse token."""
        with jax.default_matmul_precision("highest"):
            return glimpse_vectors(self.params["glimpse"], self.config)

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Decides which visual tokens remain after the cut.

        Args:
            cut: the cut, which is the only one of the method.
            sequence: rows of s positions, with the states of the tower as `note`.
            taps: attention logits of the glimpse token, by "scores.LAYER".
            count: [b, j] number of tokens to keep of each image, for an exact budget.

        Returns:
            A tuple (sequence, is_kept). sequence: the rows without `note`. is_kept: [b, s] True at
            tokens that remain.
        """
        attention = attention_map(self.config, taps, sequence.image.shape[1])
        with jax.default_matmul_precision("highest"):
            logits = predict(self.params, self.config, sequence, attention)
        if not self.budget.is_exact:
            count = self._count_above_threshold(logits, sequence.image, count.shape[1])
        return sequence._replace(note=None), keep_best(logits, sequence.image, count)

    def _count_above_threshold(
        self, logits: Float[Array, "b s"], image: Int[Array, "b s"], num_images: int
    ) -> Int[Array, "b j"]:
        """Counts the tokens of each image whose probability exceeds the threshold.

        Args:
            logits: [b, s] logit of each position.
            image: [b, s] index of each position's image, negative in the padding.
            num_images: j, the number of images per row.

        Returns:
            [b, j] counts, within the limits `min_remain_num` and `max_remain_ratio`.
        """
        threshold = self.reduce_threshold
        threshold = self.config.reduce_threshold if threshold is None else threshold
        is_in_image = image[..., None] == jnp.arange(num_images)  # [b, s, j]
        is_above = jax.nn.sigmoid(logits) > threshold
        count = (is_above[..., None] & is_in_image).sum(1)
        num_tokens = is_in_image.sum(1)
        max_count = jnp.asarray(self._max_remaining(image.shape[1]))[num_tokens]
        return jnp.clip(count, self.min_remain_num, max_count)

    def _max_remaining(self, num_tokens: int) -> Int[np.ndarray, "n"]:
        """Returns the largest number of remaining tokens for images of 0, 1, ..., n tokens.

        The table is computed in float64. In float32, the product could round differently.
        """
        image_sizes = np.arange(num_tokens + 1)
        if self.max_remain_ratio is None:
            return image_sizes.astype(np.int32)
        max_count = (self.max_remain_ratio * image_sizes).astype(np.int32)
        return np.minimum(np.maximum(max_count, self.min_remain_num), image_sizes)
