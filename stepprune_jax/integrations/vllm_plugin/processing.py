"""Processors of vLLM that put one placeholder into the prompt for each kept visual token.

A processor runs in the process that reads requests, before the tower. It also hands the ids of the
question to the model, and makes them part of the item's key in vLLM's caches: otherwise a second
question about an image or a video would get the tokens that were kept for the first.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.llava import LlavaMultiModalProcessor
from vllm.model_executor.models.llava_next import LlavaNextMultiModalProcessor
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor, Qwen3VLProcessingInfo
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from stepprune_jax.integrations.vllm_plugin.questions import find_question
from stepprune_jax.integrations.vllm_plugin.settings import read_settings
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.families import find_family
from stepprune_jax.user_input import UserError

# Entry of the arguments of transformers' processor with the ids of the question.
_WORDS = "stepprune_words"
# Arguments of the model with the ids of the question, [l] for each item of a modality.
WORDS_OF = {"image": "stepprune_words_of_image", "video": "stepprune_words_of_video"}


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
    """Shortens the placeholders of items; a base class in front of a model's own processor.

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
        with_words = {**inputs.hf_processor_mm_kwargs, _WORDS: words}
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
        for modality in hashes.keys() & WORDS_OF.keys():
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
        return {**super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached), _WORDS: words}

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        words, hf_kwargs_only = _split(hf_kwargs)
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs_only)
        for modality, num_items in mm_items.get_all_counts().items():
            words_of_item = torch.tensor(words, dtype=torch.long)
            processed[WORDS_OF[modality]] = words_of_item.repeat(num_items, 1)
        return processed

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        _, hf_kwargs_only = _split(hf_processor_mm_kwargs)
        words_fields = {
            name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
            for modality, name in WORDS_OF.items()
        }
        return {**super()._get_mm_fields_config(hf_inputs, hf_kwargs_only), **words_fields}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        _, hf_kwargs_only = _split(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(mm_items, hf_kwargs_only, out_mm_kwargs)
        return [
            dataclasses.replace(update, replacement=self._shorten(update, out_mm_kwargs))
            for update in updates
        ]

    def _shorten(self, update: Any, out_mm_kwargs: Any) -> Callable[[int], list[int]]:
        """Returns a function from an item's number to its placeholders, which are equal ids."""

        def kept_placeholders(item_index: int) -> list[int]:
            # The ids of Qwen3-VL's videos contain their times. The model embeds the times together
            # with the kept tokens, so they have placeholders as well.
            replacement = update.replacement(item_index)
            ids = getattr(replacement, "full", replacement)
            placeholder, num_frames = ids[0], 1
            if update.modality == "video":
                placeholder = self.info.get_hf_config().video_token_id
                grid = out_mm_kwargs["video"][item_index]["video_grid_thw"].data
                num_frames = int(grid[0])
            num_tokens = ids.count(placeholder)
            count = self._settings.count_kept(self._backbone.config, num_tokens, num_frames)
            return [placeholder] * (len(ids) - num_tokens + count)

        return kept_placeholders


class VideoRefusal:
    """Refuses videos if the method has no meaning for them; in front of vLLM's processing info."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns the largest number of items of a prompt, so that vLLM profiles no videos."""
        limits = super().get_supported_mm_limits()
        return limits if self._refusal is None else {**limits, "video": 0}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        """Checks the number of items of a prompt.

        Raises:
            UserError: the method does not prune videos, and there is one.
        """
        if modality == "video" and num_items and self._refusal is not None:
            raise self._refusal
        super().validate_num_items(modality, num_items)

    @functools.cached_property
    def _refusal(self) -> UserError | None:
        try:
            read_settings().check_videos(read_backbone(self.ctx.model_config))
        except UserError as error:
            return error
        return None


class PrunedQwen2_5_VLInfo(VideoRefusal, Qwen2_5_VLProcessingInfo):  # noqa: N801
    """The processing info of `models.PrunedQwen2_5_VL`."""


class PrunedQwen3VLInfo(VideoRefusal, Qwen3VLProcessingInfo):
    """The processing info of `models.PrunedQwen3VL`."""


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
    return hf_kwargs_only.pop(_WORDS, ()), hf_kwargs_only
