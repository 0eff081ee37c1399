"""Processors of vLLM that put one placeholder into the prompt for each kept token of an image.

A processor runs in the process that reads requests, before the tower. It also hands the ids of the
question to the model, and makes them part of the image's key in vLLM's caches: otherwise a second
question about an image would get the tokens that were kept for the first.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.llava import LlavaMultiModalProcessor
from vllm.model_executor.models.llava_next import LlavaNextMultiModalProcessor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLMultiModalProcessor
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from stepprune_jax.integrations.vllm_plugin.questions import find_question
from stepprune_jax.integrations.vllm_plugin.settings import read_settings
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.families import find_family
from stepprune_jax.user_input import UserError

# Argument of the model with the ids of the question, [l] for each image.
WORDS = "stepprune_words"
# Kinds of items that are pruned. Videos are not: the plugin leaves them as vLLM makes them.
PRUNED_MODALITIES = ("image",)


def read_backbone(model_config: Any) -> Backbone:
    """Returns this package's view of vLLM's model, from its config.json.

    Raises:
        UserError: this package does not support the model.
    """
    name = model_config.model
    raw = get_hf_file_to_dict("config.json", name, model_config.revision)
    if raw is None:
        raise UserError(f"{name} has no config.json")
    return find_family(raw, name).read(raw, None)


class PruningProcessor(BaseMultiModalProcessor):
    """Shortens the placeholders of images; a base class in front of a model's own processor.

    The ids of the question travel through the methods of vLLM's processor as an entry of the
    keyword arguments of transformers' processor, which never sees them.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        """Checks that the method fits the model.

        Raises:
            UserError: it does not.
        """
        super().__init__(*arguments, **keywords)
        self._settings = read_settings()
        self._backbone = read_backbone(self.info.ctx.model_config)
        self._settings.check(self._backbone)

    def apply(self, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Processes a prompt; adds the ids of its question to the arguments."""
        words: tuple[int, ...] = ()
        if self._settings.outline.reads_text:
            words = find_question(self.info.get_tokenizer(), inputs.prompt)
        with_words = {**inputs.hf_processor_mm_kwargs, WORDS: words}
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=with_words)
        return super().apply(inputs, *arguments, **keywords)

    def _get_mm_hashes(self, inputs: Any) -> Any:
        words, hf_kwargs_only = _split(inputs.hf_processor_mm_kwargs)
        hashes = dict(
            super()._get_mm_hashes(
                dataclasses.replace(inputs, hf_processor_mm_kwargs=hf_kwargs_only)
            )
        )
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        for modality in hashes.keys() & {*PRUNED_MODALITIES}:
            hashes[modality] = [
                MultiModalHasher.hash_kwargs(
                    algorithm, mm_hash=item_hash, setting=self._settings.describe(), words=words
                )
                for item_hash in hashes[modality]
            ]
        return hashes

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Any:
        words, hf_kwargs_only = _split(inputs.hf_processor_mm_kwargs)
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=hf_kwargs_only)
        return {**super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached), WORDS: words}

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        words, hf_kwargs_only = _split(hf_kwargs)
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs_only)
        num_images = mm_items.get_all_counts().get("image", 0)
        if num_images:
            processed[WORDS] = torch.tensor(words, dtype=torch.long).repeat(num_images, 1)
        return processed

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        _, hf_kwargs_only = _split(hf_processor_mm_kwargs)
        words_field = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return {**super()._get_mm_fields_config(hf_inputs, hf_kwargs_only), WORDS: words_field}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        _, hf_kwargs_only = _split(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(mm_items, hf_kwargs_only, out_mm_kwargs)
        return [
            dataclasses.replace(update, replacement=self._shorten(update.replacement))
            if update.modality in PRUNED_MODALITIES
            else update
            for update in updates
        ]

    def _shorten(self, replacement: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
        """Wraps a function from an image's number to its placeholders, which are equal ids."""

        def kept_placeholders(item_index: int) -> list[int]:
            placeholders = replacement(item_index)
            schedule = self._settings.outline.schedule(self._backbone.config, len(placeholders))
            return placeholders[: schedule.enter]

        return kept_placeholders


class PrunedQwen2_5_VLProcessor(PruningProcessor, Qwen2_5_VLMultiModalProcessor):  # noqa: N801
    """The processor of `models.PrunedQwen2_5_VL`."""


class PrunedQwen3VLProcessor(PruningProcessor, Qwen3VLMultiModalProcessor):
    """The processor of `models.PrunedQwen3VL`."""


class PrunedLlavaProcessor(PruningProcessor, LlavaMultiModalProcessor):
    """The processor of `models.PrunedLlava`."""


class PrunedLlavaNextProcessor(PruningProcessor, LlavaNextMultiModalProcessor):
    """The processor of `models.PrunedLlavaNext`."""


def _split(hf_kwargs: Mapping[str, object]) -> tuple[Any, dict[str, object]]:
    """Returns the ids of the question, and the arguments of transformers' processor."""
    hf_kwargs_only = dict(hf_kwargs)
    return hf_kwargs_only.pop(WORDS, ()), hf_kwargs_only
