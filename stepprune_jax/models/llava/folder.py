"""Checkpoint folders of LLaVA: how they are recognised and written."""

import copy
import dataclasses
from typing import Any

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models.llava.config import LlavaConfig

SUPPORTED = (
    "LLaVA-1.5 in the Hugging Face layout (model_type 'llava' with text_config and vision_config) "
    "or in the original one (a Llama config.json with mm_vision_tower)"
)


def matches(raw: dict[str, Any]) -> bool:
    """Returns whether a parsed ``config.json`` is that of a LLaVA-1.5, in either layout."""
    return _is_original(raw) or (raw.get("model_type") == "llava" and "text_config" in raw)


def _is_original(raw: dict[str, Any]) -> bool:
    return "mm_vision_tower" in raw or "mm_projector_type" in raw


def vision_folder(raw: dict[str, Any]) -> str | None:
    """Returns the CLIP folder of the original layout, "" if unspecified; None if there is none.

    Raises:
        ValueError: the field is not a string.
    """
    if not _is_original(raw):
        return None
    name = raw.get("mm_vision_tower") or ""
    if not isinstance(name, str):
        raise ValueError(f"config.json: mm_vision_tower is {name!r}, expected a folder or hub id")
    return name


def read_config(raw: dict[str, Any], vision: dict[str, Any] | None) -> LlavaConfig:
    """Builds the configuration from a parsed ``config.json`` and that of the CLIP folder, if any.

    Raises:
        ValueError: a field has an unsupported value; the message names it.
    """
    return LlavaConfig.from_hf(raw) if vision is None else LlavaConfig.from_original(raw, vision)


def complete_vocabulary(config: LlavaConfig, tokenizer: Any) -> tuple[LlavaConfig, Any]:
    """Adds the image token that the Hugging Face layout needs and the original one lacks.

    Args:
        config: the model's configuration.
        tokenizer: a `transformers` tokenizer, which is copied, or None.

    Returns:
        Configuration and tokenizer with the token; the vocabulary may have grown.
    """
    if config.image_token_id is not None:
        return config, tokenizer
    token = config.text.vocab_size
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
        token = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
    text = dataclasses.replace(config.text, vocab_size=max(token + 1, config.text.vocab_size))
    return dataclasses.replace(config, text=text, image_token_id=token), tokenizer
