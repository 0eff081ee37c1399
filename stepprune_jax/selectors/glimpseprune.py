"""GlimpsePrune: a token behind the prompt glimpses at the image, a small network judges its tokens.

Zeng et al. (https://arxiv.org/abs/2508.01548). A learned vector is added to the *glimpse token*
before each layer. After some layers, a predictor reads its attention to each visual token, and the
states of these tokens in some blocks of the tower, one in each of its own blocks. Tokens whose
probability exceeds a threshold remain. The glimpse token and the keys and values of all others are
then forgotten, those of earlier layers, too. Its authors publish the weights.
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

_EPS = 1e-6  # the epsilon of the predictor's norms
_ROPE_BASE = 10000.0


def _layers(*default: int) -> Any:
    """Defines a field for different numbers of layers."""

    def holds(layers: tuple[int, ...]) -> bool:
        return bool(layers) and min(layers) >= 0 and len({*layers}) == len(layers)

    return setting(default, "different numbers of layers", holds)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GlimpsePruneConfig(Settings, path="GlimpsePruneConfig"):
    """Shape of the glimpse token and the predictor, by default those for LLaVA-1.5-7B.

    Attributes:
        feature_width: width of the image tokens.
        text_width: width of the language model.
        num_attention_heads: heads of the language model.
        vision_width: width of the tower's blocks.
        le_layers: layers before which a vector is added; the first is 0.
        selected_layers: layers whose attention the predictor reads.
        reduce_layer: layer after which tokens are dropped.
        selected_visual_layers: states of the tower that the predictor's blocks read: numbers of
            blocks before them.
        use_attention_logits: whether it reads logits instead of logarithms of attention weights.
        attn_fuse_size: width of the predictor.
        visual_cond_size: width of what its blocks see of the tower.
        attn_fuse_num_heads: its attention heads.
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
        last, heads = max(self.selected_layers), self.attn_fuse_num_heads
        self.expect("le_layers", 0 in self.le_layers, "layer 0 among them")
        self.expect("reduce_layer", self.reduce_layer >= last, f"at least {last}, which it reads")
        # Halves of channels turn by row and by column, pairs of them together.
        even = self.attn_fuse_size % heads == 0 and self.width % (4 * heads) == 0
        self.expect("attn_fuse_num_heads", even, f"a divisor of {self.width} / 4 channels")

    @property
    def width(self) -> int:
        """Width of the predictor's queries and keys."""
        return self.attn_fuse_size + self.visual_cond_size


def rms_norm(
    scale: Float[Array, "d"], x: Float[Array, "*b d"], eps: float | int
) -> Float[Array, "*b d"]:
    """Scales vectors to a mean square of 1, then by `scale`."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def glimpse_vectors(weights: Weights, config: GlimpsePruneConfig) -> Float[Array, "layers e"]:
    """Returns the vectors added to the glimpse token before each layer up to the cut."""
    learned = dense(weights, weights["embeddings"][:, 0])
    vectors = rms_norm(weights["scale"], learned, config.rms_norm_eps)
    layers = jnp.array(config.le_layers)
    # Vectors of later layers, which only training needs, are dropped.
    empty = jnp.zeros((config.reduce_layer + 1, config.text_width), vectors.dtype)
    return empty.at[layers].set(vectors, mode="drop")


def attention_map(
    config: GlimpsePruneConfig, taps: dict[str, Float[Array, "b h 1 t"]], slots: int
) -> Float[Array, "b s a"]:
    """Returns what the glimpse token's heads pay to each of the first s slots, layer by layer."""
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
    """Computes the logit of each visual token, in float32; tokens attend to those of their image.

    Args:
        weights: the predictor's.
        config: its shape.
        sequence: rows whose note is the projected states of the tower [b, s, blocks * c].
        attention: result of `attention_map`.
    """
    assert sequence.note is not None and sequence.grid is not None
    visual, heads = sequence.image >= 0, config.attn_fuse_num_heads
    same = (sequence.image[:, :, None] == sequence.image[:, None]) & visual[:, None]
    columns = jnp.take_along_axis(sequence.grid[..., 1], jnp.maximum(sequence.image, 0), axis=1)
    place = jnp.stack(jnp.divmod(sequence.index, jnp.maximum(columns, 1)), axis=1)
    turns = geometric_frequencies(_ROPE_BASE, config.width // heads // 2)
    angles = axial_cos_sin((turns, turns), place)
    # Padding has the lowest number as its scores; zeros keep products finite.
    x = dense(weights["attention_in"], jnp.where(visual[..., None], attention, 0))
    states = jnp.split(sequence.note, len(config.selected_visual_layers), axis=2)
    for number, state in enumerate(states):
        block = weights[f"block_{number}"]
        normed = rms_norm(block["norm1"], x, _EPS)
        seen = jnp.concatenate([normed, state], axis=2)
        query, key = (split_heads(dense(block[name], seen), heads) for name in ("query", "key"))
        query, key = (rotate(part, *angles) for part in (query, key))
        value = split_heads(dense(block["value"], normed), heads)
        mixed = attend(query, [Segment(key, value, same)])
        x += dense(block["out"], merge_heads(mixed))
        normed = rms_norm(block["norm2"], x, _EPS)
        wide = jax.nn.silu(dense(block["gate"], normed)) * dense(block["up"], normed)
        x += dense(block["down"], wide)
    return dense(weights["out"], x)[..., 0]


@dataclasses.dataclass(frozen=True)
class GlimpsePrune(TrainedPruner, LayerPruner):
    """Keeps the visual tokens that a trained predictor finds in a glimpse token's attention.

    Attributes:
        config: shape of the predictor.
        reduce_threshold: probability above which tokens remain; None for that of the weights.
        min_remain_num: tokens of an image that remain at least.
        max_remain_ratio: share of an image's tokens, rounded down, of which no more remain. These
            three apply without a budget; with one, as many tokens remain as it says.
    """

    config: GlimpsePruneConfig = dataclasses.field(default_factory=GlimpsePruneConfig, kw_only=True)
    reduce_threshold: float | None = None
    min_remain_num: int = 1
    max_remain_ratio: float | None = None

    name = "glimpseprune"
    label = "GlimpsePrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "own")
    config_type: ClassVar[type | None] = GlimpsePruneConfig

    def specs(self) -> Weights:
        """Returns the glimpse token's vectors and the layer that maps them, and the predictor."""
        config, e, d = self.config, self.config.text_width, self.config.attn_fuse_size
        wide, states = config.width, range(len(config.selected_visual_layers))

        def vector(width: int, init: Init = "ones"):
            return ParamSpec((width,), (None,), init)

        def layer(rows, columns, bias=True):
            kernel = {"kernel": ParamSpec((rows, columns), (None, None), "fan_in")}
            return kernel | ({"bias": vector(columns, "zeros")} if bias else {})

        block = {name: vector(d) for name in ("norm1", "norm2")}
        block |= {name: layer(wide, wide, bias=False) for name in ("query", "key")}
        block |= {name: layer(d, d, bias=False) for name in ("value", "out")}
        block |= {"gate": layer(d, 2 * d), "up": layer(d, 2 * d), "down": layer(2 * d, d)}
        embeddings = ParamSpec((len(config.le_layers), 1, e), (None,) * 3, "token")
        return {
            "glimpse": layer(e, e) | {"embeddings": embeddings, "scale": vector(e)},
            "attention_in": layer(len(config.selected_layers) * config.num_attention_heads, d),
            **{f"state_{i}": layer(config.vision_width, config.visual_cond_size) for i in states},
            **{f"block_{i}": block for i in states},
            "out": layer(d, 1),
        }

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects bad options, and weights that belong to another model."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        least, ratio, threshold = self.min_remain_num, self.max_remain_ratio, self.reduce_threshold
        share = threshold is None or 0 <= threshold <= 1
        self.expect("reduce_threshold", share, "a probability from 0 to 1")
        self.expect("min_remain_num", 0 <= least <= num_tokens, f"0 to {num_tokens}")
        self.expect("max_remain_ratio", ratio is None or 0 < ratio <= 1, "a share in (0, 1]")
        own, text, vision = self.config, config.text, config.vision
        for name, fits in (
            ("num_attention_heads", own.num_attention_heads == text.num_heads),
            ("vision_width", own.vision_width == vision.hidden_size),
            ("reduce_layer", own.reduce_layer < text.num_layers - 1),
            ("selected_visual_layers", max(own.selected_visual_layers) <= vision.num_layers),
        ):
            said = f"{self.name}: {name} of its weights"
            expect(said, getattr(own, name), fits, "one of this model's")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the states of the tower that the predictor reads."""
        return tuple(Tap("hidden", layer) for layer in self.config.selected_visual_layers)

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns the cut after `reduce_layer`."""
        taps = tuple(Tap("scores", layer) for layer in self.config.selected_layers)
        return (LayerCut(self.config.reduce_layer + 1, taps, forgets=True),)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the budget after the cut, or without one the most tokens that may remain."""
        if self.budget.is_exact:
            return LayerPruner.schedule(self, config, num_tokens)
        left = Survivors(int(self._most(num_tokens)[num_tokens]))
        return Schedule(num_tokens, num_tokens, (left,))

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps all tokens, and notes the projected states of the tower with them."""
        n, weights = view.tokens.shape[1], self.params
        with jax.default_matmul_precision("highest"):
            notes = [
                # The tower's class token, if there is one, is the first.
                dense(weights[f"state_{number}"], tap[:, -n:].astype(jnp.float32))
                for number, tap in enumerate(view.taps)
            ]
        return super().keep(view, capacity)._replace(note=jnp.concatenate(notes, axis=2))

    def prune(self, *_: Any, **__: Any) -> None:
        """Raises a ValueError: there is nothing to read in front of a language model."""
        raise UserError(f"{self.name} prunes inside a language model: give it to `generate`")

    def probe(self) -> Float[Array, "layers e"]:
        """Returns the vectors added to the glimpse token."""
        with jax.default_matmul_precision("highest"):
            return glimpse_vectors(self.params["glimpse"], self.config)

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the best tokens of each image: `count`, or those above the threshold."""
        attention = attention_map(self.config, taps, sequence.image.shape[1])
        with jax.default_matmul_precision("highest"):
            logits = predict(self.params, self.config, sequence, attention)
        if not self.budget.is_exact:
            count = self._above(logits, sequence.image, count.shape[1])
        return sequence._replace(note=None), keep_best(logits, sequence.image, count)

    def _above(
        self, logits: Float[Array, "b s"], image: Int[Array, "b s"], images: int
    ) -> Int[Array, "b j"]:
        """Counts the tokens of each image that remain without a budget."""
        threshold = self.reduce_threshold
        threshold = self.config.reduce_threshold if threshold is None else threshold
        of_image = image[..., None] == jnp.arange(images)
        above = jax.nn.sigmoid(logits) > threshold
        found, size = (above[..., None] & of_image).sum(1), of_image.sum(1)
        return jnp.clip(found, self.min_remain_num, jnp.asarray(self._most(image.shape[1]))[size])

    def _most(self, num_tokens: int) -> Int[np.ndarray, "n"]:
        """Returns the most tokens that may remain of 0, 1, ... tokens."""
        sizes = np.arange(num_tokens + 1)
        if self.max_remain_ratio is None:
            return sizes.astype(np.int32)
        most = np.maximum((self.max_remain_ratio * sizes).astype(np.int32), self.min_remain_num)
        return np.minimum(most, sizes)
