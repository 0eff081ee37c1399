"""The settings of a pretraining run."""

import dataclasses
from typing import Any

from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.settings import Settings, choice, count, number, positive, setting, share


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Settings, path="config.data"):
    """The data of a pretraining run.

    Attributes:
        folder: folder of data in LLaVA's format, with or without labels of patches.
    """

    folder: str = setting("data/pretrain_shapes", free=True)


# Fields of a small Qwen2.5-VL. A small LLaVA has None.
_QWEN_FIELDS = ("least_size", "window_size", "full_blocks", "rope_sections")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSettings(Settings, path="config.model"):
    """The shape of the model.

    Attributes:
        family: "llava" or "qwen2_5_vl".
        image_size: side of the largest images in pixels, a multiple of `token_size`.
        least_size: side of the smallest images in pixels. Qwen2.5-VL only.
        patch_size: side of a patch in pixels.
        vision_width: width of the tower.
        vision_mlp: hidden width of the tower's MLPs.
        vision_layers: number of blocks of the tower.
        vision_heads: number of heads of the tower.
        feature_layer: block whose output is read: from 1, or negative from the end. LLaVA only.
        window_size: side in pixels of the windows of most blocks. Qwen2.5-VL only.
        full_blocks: blocks that attend to all patches, including the last block. Qwen2.5-VL only.
        text_width: width of the language model.
        text_mlp: hidden width of the language model's MLPs.
        text_layers: number of layers of the language model.
        text_heads: number of attention heads of the language model.
        text_kv_heads: number of key and value heads; None takes `text_heads`.
        rope_theta: base of the rotary positions.
        rope_sections: channel pairs of a head for time, row and column. Qwen2.5-VL only.
    """

    family: str = choice("llava", ("llava", "qwen2_5_vl"))
    image_size: int = count(96)
    least_size: int | None = count(None)
    patch_size: int = count(8)
    vision_width: int = count(128)
    vision_mlp: int = count(384)
    vision_layers: int = count(4)
    vision_heads: int = count(8)
    feature_layer: int | None = -1
    window_size: int | None = count(None)
    full_blocks: tuple[int, ...] | None = None
    text_width: int = count(128)
    text_mlp: int = count(344)
    text_layers: int = count(4)
    text_heads: int = count(8)
    text_kv_heads: int | None = count(None)
    rope_theta: float = positive(1e6)  # Slow rotations match the contents of distant patches.
    rope_sections: tuple[int, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        family_fields = {"llava": ("feature_layer",), "qwen2_5_vl": _QWEN_FIELDS}
        for name in dict.fromkeys(name for names in family_fields.values() for name in names):
            has_value = getattr(self, name) is not None
            is_needed = name in family_fields[self.family]
            expected = f"{'a value' if is_needed else 'None'} where family is {self.family!r}"
            self.expect(name, has_value == is_needed, expected)
        for part, divisor, reason in (
            ("vision", 4, "the position code has four channels for each frequency"),
            ("text", 2, "rotary positions rotate pairs of channels"),
        ):
            width, heads = getattr(self, f"{part}_width"), getattr(self, f"{part}_heads")
            expected = f"a multiple of {divisor} x {heads} heads ({reason})"
            self.expect(f"{part}_width", width % (divisor * heads) == 0, expected)
        heads, grouped = self.text_heads, self.text_kv_heads or self.text_heads
        self.expect("text_kv_heads", heads % grouped == 0, f"a divisor of {heads} heads")
        token, layers = self.token_size, self.vision_layers
        size = "model.patch_size" if token == self.patch_size else f"{token}, a token's pixels"
        self.expect("image_size", self.image_size % token == 0, f"a multiple of {size}")
        if self.family != "qwen2_5_vl":
            # Pretraining thins images by the attention of this block, so 0 is not allowed.
            expected = f"the state after one of {layers} blocks: 1 to {layers}, or -{layers} to -1"
            self.expect("feature_layer", 1 <= abs(self.feature_layer) <= layers, expected)
            return
        is_valid = self.least_size % token == 0 and self.least_size <= self.image_size
        self.expect("least_size", is_valid, f"a multiple of {size}, up to model.image_size")
        self.expect("window_size", self.window_size >= token, f"at least {token} pixels")
        blocks = set(self.full_blocks)
        is_valid = layers - 1 in blocks and blocks <= {*range(layers)}
        expected = (
            f"blocks from 0 to {layers - 1} that include the last, whose attention thins images"
        )
        self.expect("full_blocks", is_valid, expected)
        pairs = self.text_width // heads // 2
        is_valid = len(self.rope_sections) == 3 and sum(self.rope_sections) == pairs
        self.expect("rope_sections", is_valid, f"three numbers that add up to {pairs}")

    def language(self, vocab_size: int, **family_options: Any) -> LlamaConfig:
        """Returns the configuration of the language model.

        Args:
            vocab_size: number of tokens of the vocabulary.
            **family_options: further fields of the model family.
        """
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.text_width,
            intermediate_size=self.text_mlp,
            num_layers=self.text_layers,
            num_heads=self.text_heads,
            num_kv_heads=self.text_kv_heads or self.text_heads,
            head_dim=self.text_width // self.text_heads,
            max_positions=2048,
            rope_theta=self.rope_theta,
            **family_options,
        )

    @property
    def token_size(self) -> int:
        """Side in pixels of the square that becomes a visual token."""
        return self.patch_size * (2 if self.family == "qwen2_5_vl" else 1)

    @property
    def least_grid(self) -> int:
        """Visual tokens along an edge of the smallest images."""
        return (self.least_size or self.image_size) // self.token_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Settings common to the stages of a pretraining run.

    Attributes:
        steps: number of updates.
        batch_size: images of an update, a multiple of `micro_batch`.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon, for matrices; None or 0 trains all weights with AdamW.
    """

    steps: int = count(800, minimum=0)
    batch_size: int = count(32)
    lr: float = positive(1e-3)
    muon_lr: float | None = number(0.02)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerSettings(StageSettings, path="config.tower"):
    """Settings of the first stage, which trains the tower to label patches; 0 steps skip it."""

    batch_size: int = count(64)
    lr: float = positive(1.5e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageSettings(StageSettings, path="config.language"):
    """Settings of the second stage, which trains connector and language model to answer.

    Attributes:
        steps: number of updates, at least one.
        whole_steps: number of first updates, which show all visual tokens.
        thinned_share: fraction of the later updates that show only some of the visual tokens.
        kept: possible numbers of shown tokens.
        taste: how strongly the selection of shown tokens depends on the contents of patches.
        train_tower: whether this stage also trains the tower.
    """

    steps: int = count(4000)
    lr: float = positive(2e-3)
    whole_steps: int = count(2200, minimum=0)
    thinned_share: float = share(0.75)
    kept: tuple[int, ...] = (2, 4, 8, 16, 32, 48, 64)
    taste: float = number(2.0)
    train_tower: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseSettings(StageSettings, path="config.noise"):
    """Settings of the third stage, which replaces most tokens by noise in every second update.

    Attributes:
        steps: number of updates; 0 skips the stage.
        thinned_share: fraction of the updates without noise that show only some of the tokens.
        taste: how strongly the selection of shown tokens depends on the contents of patches.
    """

    steps: int = count(1200, minimum=0)
    muon_lr: float | None = number(0.01)
    thinned_share: float = share(0.5)
    taste: float = number(4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(Settings):
    """The settings of a pretraining run.

    Attributes:
        seed: seed of weights and of the order of samples.
        micro_batch: images of one gradient computation.
        cpu_devices: number of CPU devices; 0 takes jax's default.
        log_every: updates between rows of metrics.
        checkpoint_every: updates between checkpoints.
        dtype: dtype of the saved weights.
        data: settings of the data.
        model: settings of the model's shape.
        tower: settings of the first stage.
        language: settings of the second stage.
        noise: settings of the third stage.
    """

    seed: int = count(0, minimum=0)
    micro_batch: int = count(8)
    cpu_devices: int = count(2, minimum=0, free=True)
    log_every: int = count(20, free=True)
    checkpoint_every: int = count(200, free=True)
    dtype: str = choice("float16", ("float16", "bfloat16", "float32"))
    data: DataSettings = DataSettings()
    model: ShapeSettings = ShapeSettings()
    tower: TowerSettings = TowerSettings()
    language: LanguageSettings = LanguageSettings()
    noise: NoiseSettings = NoiseSettings()

    def __post_init__(self):
        super().__post_init__()
        expected = f"a multiple of micro_batch ({self.micro_batch})"
        for stage in (self.tower, self.language, self.noise):
            stage.expect("batch_size", stage.batch_size % self.micro_batch == 0, expected)
        n, kept = self.model.least_grid**2, self.language.kept
        if self.language.thinned_share or self.noise.thinned_share:
            is_valid = bool(kept) and all(1 <= k <= n for k in kept)
            self.language.expect("kept", is_valid, f"numbers of visual tokens from 1 to {n}")
