"""Checkpoint folders of Qwen2.5-VL: how they are recognised and written."""

from typing import Any

from stepprune_jax.models.qwen2_5_vl.config import QwenConfig

SUPPORTED = "Qwen2.5-VL (model_type 'qwen2_5_vl')"


def matches(raw: dict[str, Any]) -> bool:
    """Returns whether a parsed ``config.json`` is that of a Qwen2.5-VL."""
    return raw.get("model_type") == "qwen2_5_vl"


def vision_folder(raw: dict[str, Any]) -> None:
    """Returns None, as the tower is part of the checkpoint."""
    del raw


def read_config(raw: dict[str, Any], vision: dict[str, Any] | None) -> QwenConfig:
    """Builds the configuration from a parsed ``config.json``.

    Raises:
        ValueError: a field has an unsupported value; the message names it.
    """
    del vision
    return QwenConfig.from_hf(raw)


def complete_vocabulary(config: QwenConfig, tokenizer: Any) -> tuple[QwenConfig, Any]:
    """Returns its arguments: the vocabulary has all tokens that the layout needs."""
    return config, tokenizer
