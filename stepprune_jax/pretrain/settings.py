"""Checks of a pretraining configuration, before any data is read or written."""

from typing import Any

from stepprune_jax.data.shapes.scene import GRID
from stepprune_jax.training.settings import flat

_COUNTS = (
    "micro_batch", "log_every", "checkpoint_every", "tower.batch_size", "language.batch_size",
    "noise.batch_size",
    "language.steps", "model.image_size", "model.patch_size", "model.vision_width",
    "model.vision_mlp", "model.vision_layers", "model.vision_heads", "model.text_width",
    "model.text_mlp", "model.text_layers", "model.text_heads",
)  # fmt: skip
_DTYPES = ("float16", "bfloat16", "float32")


def check_config(config: Any) -> None:
    """Refuses a configuration that makes no sense.

    Args:
      config: See `configs/pretrain_shapes.py`.

    Raises:
      ValueError: A field is missing or has a bad value; the message names it.
    """
    values = flat(config)
    for name in _COUNTS:
        _require(values, name, _is_count(values.get(name), 1), "an integer from 1")
    for name in ("seed", "tower.steps", "language.whole_steps", "noise.steps", "cpu_devices"):
        _require(values, name, _is_count(values.get(name), 0), "an integer from 0")
    for name in ("tower.muon_lr", "language.muon_lr", "noise.muon_lr"):
        muon = values.get(name, 0.0)
        valid = isinstance(muon, int | float) and muon >= 0
        _require(values, name, valid, "a number from 0")
    for name in ("tower.lr", "language.lr", "noise.lr", "model.rope_theta"):
        rate = values.get(name)
        _require(values, name, isinstance(rate, int | float) and rate > 0, "a number above 0")
    for name in ("tower.batch_size", "language.batch_size", "noise.batch_size"):
        whole = values[name] % values["micro_batch"] == 0
        _require(values, name, whole, f"a multiple of micro_batch ({values['micro_batch']})")
    _require(values, "dtype", values.get("dtype") in _DTYPES, f"one of {', '.join(_DTYPES)}")
    _check_model(values)
    _check_thinning(values)


def _check_model(values: dict[str, Any]) -> None:
    for part, divisor, why in (
        ("vision", 4, "their width holds a code of four channels a frequency"),
        ("text", 2, "rotary positions turn pairs of channels"),
    ):
        width, heads = values[f"model.{part}_width"], values[f"model.{part}_heads"]
        _require(
            values, f"model.{part}_width", width % (divisor * heads) == 0,
            f"a multiple of {divisor} x {heads} heads ({why})",
        )  # fmt: skip
    fits = values["model.image_size"] % values["model.patch_size"] == 0
    _require(values, "model.image_size", fits, "a multiple of model.patch_size")
    layers, layer = values["model.vision_layers"], values.get("model.feature_layer")
    # One that follows a block: pictures are thinned by that block's attention.
    _require(
        values, "model.feature_layer",
        isinstance(layer, int) and (1 <= layer <= layers or -layers <= layer <= -1),
        f"the state after one of {layers} blocks: 1 to {layers}, or -{layers} to -1",
    )  # fmt: skip


def _check_thinning(values: dict[str, Any]) -> None:
    shares = [values.get(f"{stage}.thinned_share") for stage in ("language", "noise")]
    for stage, share in zip(("language", "noise"), shares, strict=True):
        valid = isinstance(share, int | float) and 0 <= share <= 1
        _require(values, f"{stage}.thinned_share", valid, "a share from 0 to 1")
        taste = values.get(f"{stage}.taste")
        valid = isinstance(taste, int | float) and taste >= 0
        _require(values, f"{stage}.taste", valid, "a number from 0")
    if not any(shares):
        return
    kept = values.get("language.kept")
    n = grid_side(values) ** 2
    counts = isinstance(kept, list) and kept and all(_is_count(k, 1) and k <= n for k in kept)
    _require(values, "language.kept", bool(counts), f"numbers of visual tokens from 1 to {n}")


def check_world(config: Any) -> None:
    """Refuses a shapes world whose patches are not those of the model.

    Args:
      config: A configuration that `check_config` let pass; `data.side` and `data.grid` may be
        absent.

    Raises:
      ValueError: The grids differ, or there are no scenes.
    """
    values = flat(config)
    scenes = _is_count(values.get("data.train_scenes"), 1)
    _require(values, "data.train_scenes", scenes, "an integer from 1")
    grid, wanted = values.get("data.grid", GRID), grid_side(values)
    if grid != wanted:
        raise ValueError(
            f"config.data.grid is {grid}, expected {wanted}, as config.model has "
            f"{values['model.image_size']} pixels in patches of {values['model.patch_size']}"
        )


def grid_side(values: dict[str, Any]) -> int:
    """Patches along an edge of a picture, of a configuration as `flat` gives it."""
    return values["model.image_size"] // values["model.patch_size"]


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(values: dict[str, Any], name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"config.{name} is {values.get(name)!r}, expected {expected}")
