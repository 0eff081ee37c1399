"""Reads the intermediates of vLLM's towers that some pruning methods need, by hooks of torch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from stepprune_jax.integrations.vllm_plugin.interchange import to_jax, to_torch
from stepprune_jax.integrations.vllm_plugin.tiles import TileLayout
from stepprune_jax.models.attention import Segment, attention_weights, received_attention
from stepprune_jax.policy.buckets import bucket_ladder, choose_bucket
from stepprune_jax.policy.jax_settings import jax_defaults
from stepprune_jax.user_input import UserError


class TapLayer(NamedTuple):
    """An intermediate of a tower, with a layer from 0 on; see `models.attention.Tap`."""

    kind: str
    layer: int


class TapRecorder:
    """Keeps intermediates of the last run of a tower."""

    def __init__(
        self,
        taps: Sequence[Any],
        blocks: Sequence[torch.nn.Module],
        find_attention: Callable[[torch.nn.Module], torch.nn.Module],
        num_layers: int,
    ):
        """Attaches hooks to the blocks that the intermediates come from.

        Args:
            taps: the intermediates, from `Pruner.taps`.
            blocks: the blocks of the tower that vLLM runs.
            find_attention: maps a block to the module that gets queries, keys and values.
            num_layers: number of blocks in the model's config.json. Negative layers count from it.

        Raises:
            UserError: an intermediate belongs to a block that vLLM does not run.
        """
        self._queries_and_keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, torch.Tensor] = {}
        self.taps = []
        for kind, layer in taps:
            # A state is counted by the blocks before it, so there is one more state than blocks.
            if kind != "tile" and layer < 0:
                layer += num_layers + (kind == "hidden")
            self.taps.append(TapLayer(kind, layer))
            if kind == "tile":
                continue
            if layer >= len(blocks) + (kind == "hidden"):
                raise UserError(
                    f"the method reads block {layer} of the tower, and vLLM runs only "
                    f"{len(blocks)} blocks: choose another method, or use stepprune-serve"
                )
            if kind != "hidden":
                attention = find_attention(blocks[layer])
                hook = functools.partial(self._record_attention, layer)
                attention.register_forward_pre_hook(hook, with_kwargs=True)
            elif layer == len(blocks):
                blocks[-1].register_forward_hook(functools.partial(self._record_output, layer))
            else:
                blocks[layer].register_forward_pre_hook(
                    functools.partial(self._record_input, layer)
                )

    def _record_attention(self, layer: int, _: Any, arguments: Any, keywords: Any) -> None:
        query, key = arguments[:2] if arguments else (keywords["query"], keywords["key"])
        self._queries_and_keys[layer] = query.detach(), key.detach()

    def _record_input(self, layer: int, _: Any, arguments: Any) -> None:
        self._states[layer] = arguments[0].detach()

    def _record_output(self, layer: int, _: Any, __: Any, output: torch.Tensor) -> None:
        self._states[layer] = output.detach()

    def read_patches(
        self, num_patches: Sequence[int], unit: int, orders: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, ...]]:
        """Returns the intermediates of a Qwen tower for each image.

        Args:
            num_patches: number of patches of each image of the last run.
            unit: number of consecutive patches that form a visual token.
            orders: for each image, the place of each token among the tokens as the tower runs them;
                None if the tower runs them in raster order.

        Returns:
            For each image, [n], [n, c] or [n, d] intermediates of its n visual tokens.
        """
        rows, first = [], 0
        for count, order in zip(num_patches, orders, strict=True):
            span, values = slice(first, first + count), []
            for kind, layer in self.taps:
                if kind == "hidden":
                    per_patch = self._states[layer].flatten(0, 1)[span]
                else:
                    query, key = (x.flatten(0, 1)[span] for x in self._queries_and_keys[layer])
                    is_keys = kind == "keys"
                    per_patch = key.float().mean(1) if is_keys else _received(query, key)
                per_token = per_patch.unflatten(0, (-1, unit)).mean(1)
                values.append(per_token if order is None else per_token[order])
            rows.append(tuple(values))
            first += count
        return rows

    def read_clip(
        self, num_heads: int, layouts: Sequence[TileLayout] | None, num_tiles: Sequence[int]
    ) -> list[tuple[torch.Tensor, ...]]:
        """Returns the intermediates of a CLIP tower for each image; see `llava.tower.encode`.

        Args:
            num_heads: number of attention heads.
            layouts: the tokens of each image if images have tiles; None if an image is one tile.
            num_tiles: number of tiles of each image.
        """
        rows: list[list[torch.Tensor]] = [[] for _ in num_tiles]
        for kind, layer in self.taps:
            of_tiles: Sequence[torch.Tensor | None] = [None] * len(num_tiles)
            if kind == "tile":  # only a layout has tiles
                assert layouts is not None
            elif kind == "hidden":
                of_tiles = self._states[layer].split(list(num_tiles))
            else:
                query, key = (
                    x.unflatten(-1, (num_heads, -1)).swapaxes(1, 2)
                    for x in self._queries_and_keys[layer]
                )
                of_tiles = _clip_tap(kind, query, key).split(list(num_tiles))
            for row, (image, tap) in enumerate(zip(rows, of_tiles, strict=True)):
                if layouts is not None:
                    image.append(_arrange(kind, tap, layouts[row]))
                elif tap is not None:
                    image.append(tap[0])
        return [tuple(image) for image in rows]


def _arrange(kind: str, tap: torch.Tensor | None, layout: TileLayout) -> torch.Tensor:
    """Puts the patches of all tiles into the order of LLaVA-NeXT's tokens, as `encode_image` does.

    The class token of the overview comes first in intermediates that have class tokens.
    """
    patch, is_patch = (
        torch.from_numpy(layout.patch.copy()).long(),
        torch.from_numpy(layout.is_patch.copy()),
    )
    tile = patch // layout.num_patches
    if kind == "tile":
        return torch.where(is_patch, tile, -1).int()
    assert tap is not None
    if kind == "query":
        return tap[0]
    axis = 1 if kind in ("hidden", "received") else 2  # of patches, after the axis of tiles
    values = tap.movedim(axis, 1).flatten(0, 1)
    if tap.shape[axis] > layout.num_patches:
        patch = torch.cat([patch.new_zeros(1), patch + tile + 1])
        is_patch = torch.cat([is_patch.new_ones(1), is_patch])
    values = values[patch.to(values.device)]
    mask = is_patch.to(values.device).view(-1, *[1] * (values.ndim - 1))
    return torch.where(mask, values, 0).movedim(0, axis - 1)


def _received(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns the attention [m] that each of m patches receives; query and key are [m, h, c]."""
    count = len(query)
    length = choose_bucket(count, bucket_ladder(1 << max(4, (count - 1).bit_length())))

    def pad(vectors: torch.Tensor) -> Any:
        padding = vectors.new_zeros(length - count, *vectors.shape[1:])
        return to_jax(torch.cat([vectors, padding]).swapaxes(0, 1)[None])

    is_patch = (jnp.arange(length) < count)[None]
    return to_torch(_run_received(pad(query), pad(key), is_patch))[0, :count]


_run_received = jax_defaults()(jax.jit(received_attention))


@functools.partial(jax.jit, static_argnames="kind")
def _clip_program(kind: str, query: Any, key: Any) -> Any:
    """Computes the intermediate from queries and keys [i, h, t, c]."""
    if kind == "received":
        return received_attention(query, key, jnp.ones(query.shape[::2], bool))[:, 1:]
    return attention_weights(query[:, :, :1], [Segment(key, key, None)])[:, :, 0]


def _clip_tap(kind: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns an intermediate of a block of a CLIP tower, with the axis of tiles first."""
    if kind == "keys":
        return key
    if kind == "query":
        return query[:, :, 0]
    return to_torch(jax_defaults()(_clip_program)(kind, to_jax(query), to_jax(key)))
