"""Selects visual tokens of vLLM's towers with the pruners of this package."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Float, Int

from stepprune_jax.integrations.vllm_plugin.interchange import to_jax, to_torch
from stepprune_jax.integrations.vllm_plugin.settings import PluginSettings
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.sequence import split_deep
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket, row_bucket, words_bucket
from stepprune_jax.policy.jax_settings import jax_defaults
from stepprune_jax.pruning import Pruner, PrunerInputs
from stepprune_jax.selectors.base import TrainedPruner


class EncodedItem(NamedTuple):
    """An image or a video after vLLM's tower, with the question that is asked about it.

    Attributes:
        features: [n, w] visual tokens in raster order, each with its deep features appended.
        grid: rows and columns of the tokens, as `Backbone.grids` counts them. The grid of a video
            stacks the grids of its temporal patches from top to bottom.
        words: [l] ids of the user's text.
        pixels: the pixels as the tower reads them, for random numbers.
        taps: intermediates of the tower in the order of `Pruner.taps`, without an axis of items.
        num_frames: number of temporal patches of a video; 1 for an image.
    """

    features: torch.Tensor
    grid: tuple[int, int]
    words: torch.Tensor
    pixels: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()
    num_frames: int = 1


class KeptTokens(NamedTuple):
    """The visual tokens of an image or a video that enter the language model.

    Attributes:
        tokens: [k, w] the tokens, each with its deep features appended.
        place: [k] int64 raster index of the token before pruning whose position each token has.
    """

    tokens: torch.Tensor
    place: torch.Tensor


class TokenSelector:
    """Selects tokens of images and videos; `models` calls it after vLLM's tower."""

    def __init__(self, settings: PluginSettings, backbone: Backbone):
        """Loads the pruner.

        Args:
            settings: the method and its budget.
            backbone: this package's view of the model, which has no weights.

        Raises:
            UserError: the method does not fit the model.
        """
        pruner, config = settings.build(), backbone.config
        settings.check(backbone)
        pruner.check(config, config.max_image_tokens)
        self._settings = settings
        if isinstance(pruner, TrainedPruner):
            pruner = pruner.prepare()
        self._pruner, self.backbone = pruner.program(), backbone
        self.taps = pruner.taps(config)

    @property
    def after_projector(self) -> bool:
        """Whether the method reads and returns projected tokens."""
        return self._pruner.after_projector

    def select(
        self,
        items: Sequence[EncodedItem],
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[KeptTokens]:
        """Selects tokens of each image and each video.

        Args:
            items: the images and videos, as one batch.
            embed: maps ids [r, l] to the language model's embeddings [r, l, e].

        Returns:
            The kept tokens of each item, `PluginSettings.count_kept` of them.
        """
        config = self.backbone.config
        sizes = np.array([len(item.features) for item in items], np.int32)
        frames = np.array([item.num_frames for item in items], np.int32)
        counts = np.array(
            [
                self._settings.count_kept(config, len(item.features), item.num_frames)
                for item in items
            ]
        )
        n, needs_mask = int(sizes.max()), False
        if config.sizes_vary:  # few padded sizes, so that few programs are compiled
            n = choose_bucket(n, bucket_ladder(max(n, config.max_image_tokens)))
            needs_mask = True
        capacity = choose_bucket(counts, bucket_ladder(n))
        rows = [*range(len(items)), *[0] * (row_bucket(len(items)) - len(items))]
        words, num_words = self._pad_words([items[row].words for row in rows])
        features = torch.stack([_pad(items[row].features, n) for row in rows])
        taps = zip(*(self._pad_taps(items[row], n) for row in rows), strict=True)
        tokens, deep = split_deep(config, to_jax(features))
        seed = [_checksum(item) for item in items]
        inputs = PrunerInputs(
            tokens=tokens,
            mask=jnp.arange(n) < sizes[rows][:, None] if needs_mask else None,
            grid=jnp.asarray(np.array([items[row].grid for row in rows], np.int32)),
            text=to_jax(embed(words.to(features.device))),
            text_valid=jnp.arange(words.shape[1]) < num_words[:, None],
            number=jnp.zeros(len(rows), jnp.int32),
            seed=jnp.asarray(np.array([seed[row] for row in rows], np.uint32)),
            count=jnp.asarray(counts[rows].astype(np.int32)),
            taps=tuple(to_jax(torch.stack(tap)) for tap in taps),
            deep=deep,
            frames=jnp.asarray(frames[rows]) if frames.max() > 1 else None,
        )
        device = tokens.device
        inputs, self._pruner = jax.device_put((inputs, self._pruner), device)
        kept_tokens, place = map(to_torch, _keep(self._pruner, inputs, capacity=capacity))
        place = place.long()
        return [
            KeptTokens(kept_tokens[row, :count], place[row, :count])
            for row, count in enumerate(counts.tolist())
        ]

    def _pad_taps(self, item: EncodedItem, length: int) -> list[torch.Tensor]:
        """Pads the axis of tokens of an item's intermediates, as its features are padded."""
        has_class_token = self.backbone.config.received_block is None
        padded = []
        for (kind, _), tap in zip(self.taps, item.taps, strict=True):
            axis = 1 if has_class_token and kind in ("attention", "keys") else 0
            if kind != "query":
                missing = length - len(item.features)
                tap = _pad(tap.movedim(axis, 0), tap.shape[axis] + missing).movedim(0, axis)
            padded.append(tap)
        return padded

    def _pad_words(
        self, words_of_rows: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Int[np.ndarray, "r"]]:
        """Pads the ids of questions, and counts them; without ids if the method reads no text."""
        num_words = np.array([len(words) for words in words_of_rows], np.int32)
        if not self._pruner.reads_text:
            return torch.zeros(len(words_of_rows), 1, dtype=torch.long), 0 * num_words
        width = words_bucket(max(1, int(num_words.max())))
        return torch.stack([_pad(words.cpu().long(), width) for words in words_of_rows]), num_words


@functools.partial(jax.jit, static_argnames="capacity")
def _keep_program(
    pruner: Pruner, inputs: PrunerInputs, *, capacity: int
) -> tuple[Float[Array, "r k w"], Int[Array, "r k"]]:
    """Returns the kept tokens of each row, and the tokens whose positions they have."""
    kept = pruner.keep(inputs, capacity)
    return kept.tokens.astype(inputs.tokens.dtype), kept.place


_keep = jax_defaults()(_keep_program)


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Pads the first axis of a tensor with zeros to a length."""
    padding = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, padding])


def _checksum(item: EncodedItem) -> int:
    """Returns the seed of an item and a question, for methods that keep random tokens."""
    pixels = item.pixels.detach().cpu().contiguous().view(torch.uint8).numpy()
    words = item.words.cpu().numpy().astype(np.int32)
    return zlib.crc32(words.tobytes(), zlib.crc32(pixels.tobytes()))
