"""The settings of a pretraining run."""

import dataclasses

from ml_collections import ConfigDict

from stepprune_jax.data.shapes.scene import GRID
from stepprune_jax.settings import (
    Settings,
    choice,
    count,
    group,
    integer,
    is_count,
    number,
    positive,
    read,
    setting,
    share,
    switch,
    text,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSettings(Settings, group="data"):
    """The data of a pretraining run.

    Attributes:
      folder: Folder of data in LLaVA's format; empty for the shapes world, written to workdir/data.
      train_scenes: Scenes of the shapes world.
      seed: Its seed.
      side: Height and width of its images in pixels; None for the world's own.
      grid: Patches along an edge of its images; None for the world's own.
      emphasis: Factor on the families of questions that are learned last; None for 1.
    """

    folder: str = text(free=True)
    train_scenes: int = count(0)
    seed: int = count(0)
    side: int | None = count(optional=True)
    grid: int | None = count(optional=True)
    emphasis: float | None = number(optional=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSettings(Settings, group="model"):
    """The shape of the model.

    Attributes:
      image_size: Height and width of its images in pixels; a multiple of `patch_size`.
      patch_size: Height and width of a patch.
      vision_width: Width of the tower.
      vision_mlp: Hidden width of its MLPs.
      vision_layers: Its blocks.
      vision_heads: Its heads.
      feature_layer: Block whose output is read, counted from 1, or from the end as a negative.
      text_width: Width of the language model.
      text_mlp: Hidden width of its MLPs.
      text_layers: Its blocks.
      text_heads: Its heads.
      rope_theta: Base of its rotary positions.
    """

    image_size: int = count()
    patch_size: int = count()
    vision_width: int = count()
    vision_mlp: int = count()
    vision_layers: int = count()
    vision_heads: int = count()
    feature_layer: int = integer()
    text_width: int = count()
    text_mlp: int = count()
    text_layers: int = count()
    text_heads: int = count()
    rope_theta: float = positive()

    def __post_init__(self):
        super().__post_init__()
        for part, divisor, why in (
            ("vision", 4, "their width holds a code of four channels a frequency"),
            ("text", 2, "rotary positions turn pairs of channels"),
        ):
            width, heads = getattr(self, f"{part}_width"), getattr(self, f"{part}_heads")
            expected = f"a multiple of {divisor} x {heads} heads ({why})"
            self.require(f"{part}_width", width % (divisor * heads) == 0, expected)
        fits = self.image_size % self.patch_size == 0
        self.require("image_size", fits, "a multiple of model.patch_size")
        # It must follow a block: images are thinned by that block's attention.
        layers = self.vision_layers
        expected = f"the state after one of {layers} blocks: 1 to {layers}, or -{layers} to -1"
        self.require("feature_layer", 1 <= abs(self.feature_layer) <= layers, expected)

    @property
    def grid(self) -> int:
        """Patches along an edge of an image."""
        return self.image_size // self.patch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Settings common to the stages of a pretraining run.

    Attributes:
      steps: Updates.
      batch_size: Images of an update; a multiple of `micro_batch`.
      lr: Peak learning rate of AdamW.
      muon_lr: Peak learning rate of Muon, for matrices; None or 0 leaves all weights to AdamW.
    """

    steps: int = count(0)
    batch_size: int = count()
    lr: float = positive()
    muon_lr: float | None = number(optional=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerSettings(StageSettings, group="tower"):
    """The first stage, in which the tower learns to label patches; 0 steps skip it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageSettings(StageSettings, group="language"):
    """The second stage, in which projector and language model learn to answer.

    Attributes:
      steps: Updates, at least one.
      whole_steps: Updates before images are thinned.
      thinned_share: Share of the later updates that show only some of the tokens.
      kept: Possible numbers of shown tokens.
      taste: How strongly the choice depends on the contents of patches.
      train_tower: Whether the tower is trained, too.
    """

    steps: int = count()
    whole_steps: int = count(0)
    thinned_share: float = share()
    kept: tuple[int, ...] = setting(
        "numbers of visual tokens", lambda kept: isinstance(kept, tuple)
    )
    taste: float = number()
    train_tower: bool = switch()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseSettings(StageSettings, group="noise"):
    """The third stage, every other update of which shows most tokens as noise; may have 0 steps.

    Attributes:
      thinned_share: Share of the other updates that show only some of the tokens.
      taste: How strongly the choice depends on the contents of patches.
    """

    thinned_share: float = share()
    taste: float = number()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(Settings):
    """The settings of a pretraining run; `configs/pretrain_shapes.py` describes each field.

    Attributes:
      method: "pretrain".
      seed: Seed of weights and of the order of samples.
      init: Model folder to start from; empty for random weights.
      micro_batch: Images whose gradient is computed at once.
      cpu_devices: CPU devices; 0 leaves their number to jax.
      log_every: Updates between lines of metrics.
      checkpoint_every: Updates between checkpoints.
      dtype: Dtype of the saved weights.
      data: The data.
      model: The shape of the model.
      tower: The first stage.
      language: The second stage.
      noise: The third stage.
    """

    method: str = choice(("pretrain",))
    seed: int = count(0)
    init: str = text()
    micro_batch: int = count()
    cpu_devices: int = count(0, free=True)
    log_every: int = count(free=True)
    checkpoint_every: int = count(free=True)
    dtype: str = choice(("float16", "bfloat16", "float32"))
    data: WorldSettings = group(WorldSettings)
    model: ShapeSettings = group(ShapeSettings)
    tower: TowerSettings = group(TowerSettings)
    language: LanguageSettings = group(LanguageSettings)
    noise: NoiseSettings = group(NoiseSettings)

    def __post_init__(self):
        super().__post_init__()
        expected = f"a multiple of micro_batch ({self.micro_batch})"
        for stage in (self.tower, self.language, self.noise):
            stage.require("batch_size", stage.batch_size % self.micro_batch == 0, expected)
        if self.language.thinned_share or self.noise.thinned_share:
            n, kept = self.model.grid**2, self.language.kept
            fits = bool(kept) and all(is_count(k) and k <= n for k in kept)
            self.language.require("kept", fits, f"numbers of visual tokens from 1 to {n}")

    def check_world(self) -> None:
        """Checks that the shapes world's patches are those of the model.

        Raises:
          ValueError: The grids differ, or there are no scenes.
        """
        self.data.require("train_scenes", self.data.train_scenes > 0, "an integer from 1")
        grid, wanted = self.data.grid or GRID, self.model.grid
        if grid != wanted:
            raise ValueError(
                f"config.data.grid is {grid}, expected {wanted}, as config.model has "
                f"{self.model.image_size} pixels in patches of {self.model.patch_size}"
            )


def read_pretraining(config: ConfigDict) -> Pretraining:
    """Reads the settings of a pretraining run from its configuration.

    Args:
      config: Configuration from `configs/pretrain_shapes.py`, with changes of the command line.

    Raises:
      ValueError: A field is unknown, missing, or has a bad value; the message names it.
    """
    return read(Pretraining, config.to_dict())
