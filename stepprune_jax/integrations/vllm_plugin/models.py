"""Subclasses of vLLM's models that keep a part of the tokens of each image and video."""

# vLLM is not installed where types are checked, so the classes in front of its models have bases
# that the checker does not know.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaProcessingInfo,
)
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextProcessingInfo,
)
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import PlaceholderRange
from vllm.platforms import current_platform

from stepprune_jax.integrations.vllm_plugin import positions
from stepprune_jax.integrations.vllm_plugin.processing import (
    WORDS_OF,
    PrunedLlavaNextProcessor,
    PrunedLlavaProcessor,
    PrunedQwen2_5_VLInfo,
    PrunedQwen2_5_VLProcessor,
    PrunedQwen3VLInfo,
    PrunedQwen3VLProcessor,
    read_backbone,
)
from stepprune_jax.integrations.vllm_plugin.selection import (
    EncodedItem,
    KeptTokens,
    TokenSelector,
)
from stepprune_jax.integrations.vllm_plugin.settings import read_settings
from stepprune_jax.integrations.vllm_plugin.taps import TapRecorder
from stepprune_jax.integrations.vllm_plugin.tiles import lay_out_tiles
from stepprune_jax.user_input import UserError


def make_selector(vllm_config: Any) -> TokenSelector:
    """Creates the selector of the setting for a model.

    Raises:
        UserError: the setting does not fit the model or its parallelism.
    """
    backbone = read_backbone(vllm_config.model_config)
    selector = TokenSelector(read_settings(), backbone)
    if selector.taps and vllm_config.parallel_config.tensor_parallel_size > 1:
        # Each process sees its own heads, so the processes would keep different tokens.
        raise UserError("a method that reads the tower's attention needs --tensor-parallel-size 1")
    return selector


# Inputs of vLLM's Qwen models for each modality: the pixels, and what the positions depend on.
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_LAYOUT = {
    "image": ("image_grid_thw",),
    "video": ("video_grid_thw", "second_per_grid_ts", "timestamps"),
}


class PruningQwen:
    """Keeps a part of the tokens of each image and video at their original positions.

    A base class in front of a Qwen model of vLLM, whose `embed_multimodal` calls
    `_postprocess_image_embeds_evs` and `_postprocess_video_embeds_evs`.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Creates the model, with vLLM's machinery for pruned items switched on.

        Raises:
            UserError: the setting does not fit the model, or vLLM is to prune videos or to guess
                tokens ahead.
        """
        multimodal_config = vllm_config.model_config.multimodal_config
        if multimodal_config.video_pruning_rate:
            raise UserError("--video-pruning-rate is not supported while the plugin prunes")
        if vllm_config.speculative_config is not None:
            raise UserError("--speculative-config is not supported while the plugin prunes")
        # The machinery is on if vLLM prunes videos. A rate of videos would also prune them, so the
        # answer to the question whether it is on is replaced for this model instead.
        multimodal_config.is_multimodal_pruning_enabled = _is_enabled
        if current_platform.is_cpu():
            _enable_on_cpus()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._selector = make_selector(vllm_config)
        self._words: dict[str, Any] = {}
        self._recorder = TapRecorder(
            self._selector.taps,
            self.visual.blocks,
            lambda block: block.attn.attn,
            self.config.vision_config.depth,
        )

    def embed_multimodal(self, **inputs: Any) -> Any:
        """Returns the embeddings of items, with channels for `recompute_mrope_positions`."""
        self._words = {modality: inputs.pop(name, ()) for modality, name in WORDS_OF.items()}
        return super().embed_multimodal(**inputs)

    def _postprocess_image_embeds_evs(
        self, image_embeds_split: Sequence[torch.Tensor], image_input: Any
    ) -> tuple[torch.Tensor, ...]:
        return self._prune("image", image_embeds_split, image_input)

    def _postprocess_video_embeds_evs(
        self, video_embeds_split: Sequence[torch.Tensor], video_input: Any
    ) -> tuple[torch.Tensor, ...]:
        return self._prune("video", video_embeds_split, video_input)

    def _prune(
        self, modality: str, features_of_items: Sequence[torch.Tensor], inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Returns the embeddings of each item that enter the language model, with channels.

        Args:
            modality: "image" or "video".
            features_of_items: [n, w] visual tokens of each item, with their deep features.
            inputs: vLLM's inputs of the tower.
        """
        side, grids = self.visual.spatial_merge_size, inputs[f"{modality}_grid_thw"].tolist()
        num_patches = [frames * rows * columns for frames, rows, columns in grids]
        # Items that were encoded elsewhere have no pixels; their features seed random numbers.
        pixels_of_items: Sequence[torch.Tensor] = features_of_items
        taps: Sequence[tuple[torch.Tensor, ...]] = [()] * len(grids)
        if inputs["type"] == _PIXELS[modality]:
            pixels_of_items = inputs[_PIXELS[modality]].split(num_patches)
            orders = [self._token_order(*grid) for grid in grids]
            taps = self._recorder.read_patches(num_patches, side**2, orders)
        elif self._selector.taps:
            raise UserError("image_embeds do not suffice for a method that reads the tower")
        items = [
            EncodedItem(
                features, (frames * rows // side, columns // side), words, pixels, item_taps, frames
            )
            for features, (frames, rows, columns), words, pixels, item_taps in zip(
                features_of_items, grids, self._words[modality], pixels_of_items, taps, strict=True
            )
        ]
        names = [name for name in _LAYOUT[modality] if inputs.get(name) is not None]
        return tuple(
            self._lay_out(
                modality, {name: SimpleNamespace(data=inputs[name][row]) for name in names}, kept
            )
            for row, kept in enumerate(self._selector.select(items, self._embed))
        )

    def _lay_out(self, modality: str, data: Any, kept: KeptTokens) -> torch.Tensor:
        """Returns the embeddings of an item in the order of its ids, with channels.

        Args:
            modality: "image" or "video".
            data: the fields of the item that its positions depend on.
            kept: the kept tokens.

        Returns:
            [k, w + NUM_CHANNELS] the kept tokens, and the text in the item's ids.
        """
        ids = self._unpruned_ids(modality, data)
        place = PlaceholderRange(offset=0, length=len(ids))
        item = SimpleNamespace(modality=modality, data=data, mm_position=place)
        offsets, _ = super().get_mrope_input_positions(ids, [item])
        all_ids = torch.tensor(ids)
        is_visual = all_ids == self._placeholder_id(modality)
        tokens, text_index = kept.tokens, (~is_visual).nonzero()[:, 0]
        index = is_visual.nonzero()[:, 0][kept.place.cpu()]
        if len(text_index):
            text = self._embed(all_ids[text_index].to(tokens.device))
            missing_width = tokens.shape[1] - text.shape[1]  # text has no deep features
            text = torch.nn.functional.pad(text, (0, missing_width))
            index, order = torch.cat([text_index, index]).sort()
            tokens = torch.cat([text.to(tokens), tokens])[order.to(tokens.device)]
        return positions.append_offsets(tokens, offsets[:, index].to(tokens.device))

    def _placeholder_id(self, modality: str) -> int:
        return self.config.image_token_id if modality == "image" else self.config.video_token_id

    def _unpruned_ids(self, modality: str, data: Any) -> list[int]:
        """Returns the ids of an image or a video in a prompt without pruning.

        Args:
            modality: "image" or "video".
            data: the fields of the item; an attribute `data` of each field has its value.
        """
        grid = data[f"{modality}_grid_thw"].data
        num_tokens = int(grid.prod()) // self.visual.spatial_merge_size**2
        return [self._placeholder_id(modality)] * num_tokens

    def _token_order(self, frames: int, rows: int, columns: int) -> torch.Tensor | None:
        """Returns the place of each token among the tokens as the tower runs them, or None."""
        return None

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.get_language_model().embed_input_ids(ids)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """Returns the positions of a prompt before its items are encoded, and its delta."""
        return positions.prompt_positions(
            super().get_mrope_input_positions,
            input_tokens,
            mm_features,
            lambda feature: self._unpruned_ids(feature.modality, feature.data),
        )

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor],
        mrope_positions: torch.Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor, int]:
        """Sets the positions of the tokens of images and videos that are computed now.

        Args:
            input_ids: [N] ids of the prompt.
            multimodal_embeddings: embeddings of these tokens by item, with their channels.
            mrope_positions: [3, N] positions of the prompt.
            num_computed_tokens: number of tokens before those that are computed now.

        Returns:
            The embeddings without channels, the positions, and the next position minus N.
        """
        num_channels = positions.NUM_CHANNELS
        delta = int(mrope_positions.max()) + 1 - mrope_positions.shape[1]
        if multimodal_embeddings:
            ids = torch.as_tensor(input_ids, device=mrope_positions.device)
            visual_ids = ids.new_tensor([self.config.image_token_id, self.config.video_token_id])
            mrope_positions = positions.add_offsets(
                mrope_positions,
                torch.isin(ids, visual_ids),
                num_computed_tokens,
                [tokens[:, -num_channels:] for tokens in multimodal_embeddings],
            )
        tokens = [tokens[:, :-num_channels] for tokens in multimodal_embeddings]
        return tokens, mrope_positions, delta


class PruningLlava:
    """Keeps a part of each image's tokens, at positions 0, 1, 2, ...

    A base class in front of a LLaVA model of vLLM, whose tokens have no other positions there.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Creates the model.

        Raises:
            UserError: the setting does not fit the model.
        """
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._selector = make_selector(vllm_config)
        vision_config = self.config.vision_config
        self._num_heads = vision_config.num_attention_heads
        self._recorder = TapRecorder(
            self._selector.taps,
            self.vision_tower.vision_model.encoder.layers,
            lambda block: block.self_attn.attn,
            vision_config.num_hidden_layers,
        )

    def embed_multimodal(self, **inputs: Any) -> Any:
        """Returns the embeddings of the kept tokens of each image."""
        words_of_images = inputs.pop(WORDS_OF["image"], ())
        image_input = self._parse_and_validate_image_input(**inputs)
        if image_input is None:
            return []
        if image_input["type"] != "pixel_values":
            raise UserError("image_embeds are not supported while the plugin prunes images")
        images = self._encode(image_input, words_of_images)
        if self._selector.after_projector:
            images = [image._replace(features=self._project(image.features)) for image in images]
        kept = self._selector.select(images, self._embed)
        if self._selector.after_projector:
            return tuple(tokens for tokens, _ in kept)
        return tuple(self._project(tokens) for tokens, _ in kept)

    def _encode(self, image_input: Any, words_of_images: Any) -> list[EncodedItem]:
        """Runs the tower; the features of the images are before the projector."""
        features, grid = (
            self._process_image_pixels(image_input),
            self._selector.backbone.config.grid,
        )
        taps = self._recorder.read_clip(self._num_heads, None, [1] * len(features))
        return [
            EncodedItem(image_features, grid, words, pixels, image_taps)
            for image_features, words, pixels, image_taps in zip(
                features, words_of_images, image_input["pixel_values"], taps, strict=True
            )
        ]

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        return self.multi_modal_projector(features)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.get_language_model().embed_input_ids(ids)


class PruningLlavaNext(PruningLlava):
    """Keeps a part of the tokens of the tiles of each image, and of the newlines between rows."""

    def _encode(self, image_input: Any, words_of_images: Any) -> list[EncodedItem]:
        pixels_of_images = [*image_input["pixel_values"]]
        num_tiles = [len(tiles) for tiles in pixels_of_images]
        patches = self._image_pixels_to_features(self.vision_tower, torch.cat(pixels_of_images))
        layouts = [
            lay_out_tiles(self._selector.backbone, height, width)
            for height, width in image_input["image_sizes"].tolist()
        ]
        taps = self._recorder.read_clip(self._num_heads, layouts, num_tiles)
        images = []
        for tile_patches, layout, words, pixels, image_taps in zip(
            patches.split(num_tiles), layouts, words_of_images, pixels_of_images, taps, strict=True
        ):
            index = torch.from_numpy(layout.patch.copy()).to(tile_patches.device)
            is_patch = torch.from_numpy(layout.is_patch.copy()).to(tile_patches.device)
            # A newline is a vector of zeros before the projector.
            features = tile_patches.flatten(0, 1)[index] * is_patch[:, None]
            images.append(EncodedItem(features, layout.grid, words, pixels, image_taps))
        return images

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        is_newline = (features == 0).all(-1, keepdim=True)
        return torch.where(is_newline, self.image_newline, super()._project(features))


def _enable_on_cpus() -> None:
    """Lets vLLM's runner for CPUs ask the model whether items are pruned.

    Other runners ask after they have loaded a model. The runner for CPUs keeps its initial False.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def ask(runner: Any) -> bool:
        config = runner.model_config.multimodal_config
        is_enabled = config is not None and config.is_multimodal_pruning_enabled()
        return is_enabled and supports_multimodal_pruning(runner.get_model())

    # A property of the class takes precedence over the attribute that the runner sets.
    CPUModelRunner.is_multimodal_pruning_enabled = property(ask, lambda runner, value: None)


def _is_enabled() -> bool:
    """Returns True; a function of a module, because vLLM pickles its configuration."""
    return True


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen2_5_VLProcessor,
    info=PrunedQwen2_5_VLInfo,
    dummy_inputs=Qwen2_5_VLDummyInputsBuilder,
)
class PrunedQwen2_5_VL(PruningQwen, Qwen2_5_VLForConditionalGeneration):  # noqa: N801
    """Qwen2.5-VL with pruned images and videos."""

    def _token_order(self, frames: int, rows: int, columns: int) -> torch.Tensor | None:
        # The tower runs the tokens window by window; entry i is the raster index of the i-th token.
        _, _, window_index, _, _ = self.visual.get_rope_by_thw(frames, rows, columns)
        return torch.argsort(window_index)


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen3VLProcessor,
    info=PrunedQwen3VLInfo,
    dummy_inputs=Qwen3VLDummyInputsBuilder,
)
class PrunedQwen3VL(PruningQwen, Qwen3VLForConditionalGeneration):
    """Qwen3-VL with pruned images and videos, which keep their deep features."""

    def _unpruned_ids(self, modality: str, data: Any) -> list[int]:
        if modality == "image":
            return super()._unpruned_ids(modality, data)
        # The ids of each temporal patch follow the ids of its time.
        frames, rows, columns = data["video_grid_thw"].data.tolist()
        side = self.visual.spatial_merge_size
        replacement = Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=[rows * columns // side**2] * frames,
            timestamps=data["timestamps"].data,
            tokenizer=self._tokenizer,
            vision_start_token_id=self.config.vision_start_token_id,
            vision_end_token_id=self.config.vision_end_token_id,
            video_token_id=self.config.video_token_id,
        )
        return replacement.full


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(PruningLlava, LlavaForConditionalGeneration):
    """LLaVA-1.5 with pruned images."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaNextProcessor, info=LlavaNextProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlavaNext(PruningLlavaNext, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT with pruned images."""
