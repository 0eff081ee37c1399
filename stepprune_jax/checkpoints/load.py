"""Checkpoint files to sharded arrays, a block at a time.

Host memory never exceeds a few blocks: a large weight is allocated on its devices and filled there
block by block, each block being read only as far as a device needs it. Small weights are assembled
on the host, which saves compiling a program for each of their shapes.
"""

import collections
import concurrent.futures
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.models import vlm, weights
from stepprune_jax.models.config import ModelConfig, Tokenizer
from stepprune_jax.models.family import Processor
from stepprune_jax.models.stack import Params
from stepprune_jax.models.weights import Target
from stepprune_jax.parallel import sharding
from stepprune_jax.user_input import expect

# Size of one read, and of the largest part assembled on the host. It holds a layer's largest matrix
# of the 7B model, so that each fills a contiguous piece of its stack. A few blocks wait at a time.
BLOCK_BYTES = 96 << 20
_READERS = 3
_BLOCKS_AHEAD = 4
# Largest number of tensors of a kind listed in a message.
_LISTED = 40
# Rows copied at once in a transposition, and the padding of that tile: rows a power of two apart
# would fall on the same few cache lines.
_TILE, _PAD = 64, 32


class VLM(NamedTuple):
    """A loaded model with its tokenizer and settings.

    Attributes:
        params: the parameter tree of `stepprune_jax.models.vlm`.
        config: its configuration.
        tokenizer: a `transformers` tokenizer, or None.
        image_settings: the family's image processor settings, or None.
        folder: folder it was loaded from, or None.
        repetition_penalty: value of its ``generation_config.json``, 1 if it has none; applied by
            `generate` as in `transformers`.
    """

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer = None
    image_settings: Processor = None
    folder: Path | None = None
    repetition_penalty: float = 1.0


class _Block(NamedTuple):
    """One read: a part of a tensor, and its place in a device's part of the weight."""

    entry: safetensors.TensorEntry
    index: tuple[slice, ...]
    start: tuple[int, ...]
    transform: str


class _Part(NamedTuple):
    """The part of a weight held by a group of devices; replicas share one read."""

    target: Target
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    blocks: tuple[_Block, ...]
    patches: tuple[slice, ...] | None


def load_vlm(
    folder_or_hub_id: str | Path,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    vision_folder: str | Path | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    layers: str = "auto",
    progress: bool = True,
) -> VLM:
    """Loads a checkpoint with everything needed to generate answers.

    LLaVA-1.5 is read both in the Hugging Face layout and in the original one (with its separate
    CLIP folder), Qwen2.5-VL with the names of its published files and with those of newer
    `transformers`; all from safetensors files, or from pickles that hold tensors alone, without
    running any code they name. Configuration, tokenizer and every tensor's name and shape are
    checked before the first weight is read.

    Args:
        folder_or_hub_id: a folder, a Hugging Face hub id, or the name of a shipped model: "shapes"
            or "shapes_qwen".
        mesh: devices to shard over by the family's `SHARDING_RULES`; None for the default device.
        dtype: floating dtype of the parameters.
        vision_folder: folder of a separate tower, instead of the configured one.
        min_pixels: smallest area of a resized image, instead of that of the folder's image
            processor; for models that take images of any size.
        max_pixels: largest area; a LLaVA is given smaller images than it was trained with, in whole
            patches, whose positions are interpolated.
        layers: layout of the layers' weights: "stacked", to train through the model; "apart"; or
            "auto", apart if layers are large, see `models.stack`; or "none", not read at all, for a
            language model that runs elsewhere.
        progress: whether to show a progress bar on stderr.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a folder or file is missing; the message names it.
        ValueError: an unsupported or damaged checkpoint; all weights that do not fit are listed in
            one message.
    """
    source = folders.inspect_folder(
        folder_or_hub_id, vision_folder, min_pixels=min_pixels, max_pixels=max_pixels
    )
    tokenizer = folders.load_tokenizer(source.folder)
    settings = source.config.family.image_settings(source.vision_folder or source.folder)
    params = load_params(source, mesh, dtype, layers=layers, progress=progress)
    return make_vlm(source, params, tokenizer, settings)


def make_vlm(
    source: folders.Source, params: Params, tokenizer: Tokenizer, image_settings: Processor
) -> VLM:
    """Builds a `VLM` from the parts loaded from a folder."""
    penalty = source.repetition_penalty
    return VLM(params, source.config, tokenizer, image_settings, source.folder, penalty)


def load_params(
    source: folders.Source,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    layers: str = "auto",
    progress: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> Params:
    """Loads the weights alone.

    Args:
        source: result of `stepprune_jax.checkpoints.folder.inspect_folder`.
        mesh: as in `load_vlm`.
        dtype: as in `load_vlm`.
        layers: as in `load_vlm`.
        progress: as in `load_vlm`.
        block_bytes: bytes read at once; host memory in use is a few times this.

    Returns:
        The parameter tree.

    Raises:
        ValueError: `dtype` is not floating; weights are missing, unused, mis-shaped or of a
            non-floating dtype, all of which are listed; a truncated or corrupt file, or numbers too
            large for `dtype`.
    """
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    expect("dtype", dtype, floating, "a floating one, such as jnp.bfloat16")
    platform = None if mesh is None else mesh.devices.flat[0].platform
    layout = "auto" if layers == "none" else layers
    abstract = vlm.abstract_params(source.config, jnp.dtype(dtype), layout, platform)
    targets = source.config.family.weight_targets(abstract, source.config)
    folders.fetch_weights(source)
    entries = _collect(source, targets)
    if layers == "none":
        targets = [x for x in targets if not x.path.startswith("language/layers/")]
    layouts = _layouts(abstract, source.config, mesh)
    parts = [
        part
        for target in targets
        for part in _parts(target, layouts[target.path], entries, block_bytes)
    ]
    pieces: dict[str, list[Array]] = collections.defaultdict(list)
    total = sum(_block_bytes(block) for part in parts for block in part.blocks)
    with _byte_bar(source.folder, total, progress) as bar:
        for part, arrays in _fill(parts, jnp.dtype(dtype), block_bytes, bar):
            pieces[part.target.path] += arrays
    flat = {
        target.path: jax.make_array_from_single_device_arrays(
            target.shape, layouts[target.path], pieces.pop(target.path)
        )
        for target in targets
    }
    return weights.unflatten({x: flat[x] for x in weights.flatten(abstract) if x in flat})


def _byte_bar(folder: Path, total: int, show: bool) -> tqdm.tqdm:
    """Returns a progress bar of bytes on stderr; in a file, only its start and end are drawn."""
    interval = 0.1 if sys.stderr.isatty() else float("inf")
    return tqdm.tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"loading {folder.name}",
        disable=not show,
        mininterval=interval,
    )


def _layouts(abstract: dict, config: ModelConfig, mesh: Mesh | None) -> dict[str, Sharding]:
    """Returns a sharding for every weight."""
    if mesh is not None:
        return weights.flatten(sharding.shardings(abstract, config.family.SHARDING_RULES, mesh))
    device = jnp.zeros(()).devices().pop()  # honours jax.default_device
    return {path: SingleDeviceSharding(device) for path in weights.flatten(abstract)}


def _collect(source: folders.Source, targets: list[Target]) -> dict[str, safetensors.TensorEntry]:
    """Finds the tensor of every name, and reports all mismatches in one error."""
    problems: dict[str, list[str]] = collections.defaultdict(list)
    entries: dict[str, safetensors.TensorEntry] = {}
    family = source.config.family

    def add(name: str, entry: safetensors.TensorEntry) -> None:
        if name in entries:
            problems["stored twice"].append(f"{entries[name].name} and {entry.name}")
        entries[name] = entry

    for name, entry in read_folder(source.folder).items():
        add(family.canonical_name(name), entry)
    if source.vision_folder and not any(map(family.is_vision_name, entries)):
        for name, entry in read_folder(source.vision_folder).items():
            canonical = family.canonical_name(name, of_vision_folder=True)
            if canonical is not None:
                add(canonical, entry)
    wanted = {name: target for target in targets for name in target.names}
    for name, target in wanted.items():
        entry = entries.get(name)
        if entry is None:
            problems["missing"].append(f"{name} (for {target.path})")
        elif entry.shape != target.tensor_shape:
            problems["wrong shape"].append(
                f"{entry.name} is {list(entry.shape)} in {entry.path.name}, "
                f"expected {list(target.tensor_shape)}"
            )
        elif not jnp.issubdtype(entry.dtype, jnp.floating):
            problems["wrong dtype"].append(
                f"{entry.name} is {entry.dtype}, expected floating point"
            )
    for name, entry in entries.items():
        if name not in wanted and not family.is_harmless(name, source.config):
            problems["unused"].append(f"{entry.name} in {entry.path.name}")
    if problems:
        lines = [f"the weights in {source.folder} do not fit its configuration:"]
        for kind, items in problems.items():
            lines += [f"  {kind} ({len(items)}):", *(f"    {item}" for item in items[:_LISTED])]
            lines += [f"    and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
        raise ValueError("\n".join(lines))
    return entries


def _parts(
    target: Target,
    layout: Sharding,
    entries: dict[str, safetensors.TensorEntry],
    block_bytes: int,
) -> Iterator[_Part]:
    """Yields the distinct parts of a weight over this process's devices, with their reads."""
    groups: dict[tuple[tuple[int, int], ...], list[jax.Device]] = collections.defaultdict(list)
    for device, index in layout.addressable_devices_indices_map(target.shape).items():
        spans = zip(index, target.shape, strict=True)
        groups[tuple(cut.indices(size)[:2] for cut, size in spans)].append(device)
    for spans, devices in groups.items():
        shape = tuple(stop - start for start, stop in spans)
        layers = range(*spans[0]) if target.stacked else range(1)
        inner = tuple(slice(*span) for span in (spans[1:] if target.stacked else spans))
        if target.transform == "patches":  # small: read whole, cut after the transform
            block = _Block(entries[target.names[0]], (), (0,) * len(shape), target.transform)
            yield _Part(target, shape, tuple(devices), (block,), inner)
            continue
        blocks = [
            block
            for number, layer in enumerate(layers)
            for block in _cut(target, entries[target.names[layer]], inner, number, block_bytes)
        ]
        yield _Part(target, shape, tuple(devices), tuple(blocks), None)


def _cut(
    target: Target,
    entry: safetensors.TensorEntry,
    inner: tuple[slice, ...],
    number: int,
    block_bytes: int,
) -> Iterator[_Block]:
    """Divides a tensor's required region into blocks of rows of the file."""
    transposed = target.transform == "transpose"
    region = inner[::-1] if transposed else inner
    columns = math.prod(cut.stop - cut.start for cut in region[1:])
    total = region[0].stop - region[0].start
    count = -(-total * columns * entry.dtype.itemsize // block_bytes)
    rows = -(-total // min(count, total))  # equal blocks, as every shape is compiled for
    for row in range(region[0].start, region[0].stop, rows):
        index = (slice(row, min(row + rows, region[0].stop)), *region[1:])
        start = [0] * len(inner)
        start[-1 if transposed else 0] = row - region[0].start
        lead = (number,) if target.stacked else ()
        yield _Block(entry, index, (*lead, *start), target.transform)


def _fill(
    parts: list[_Part], dtype: np.dtype, block_bytes: int, bar: tqdm.tqdm
) -> Iterator[tuple[_Part, list[Array]]]:
    """Reads every part and yields it with one array per device, in order."""
    reads = _read_ahead([block for part in parts for block in part.blocks], dtype)
    for part in parts:
        small = math.prod(part.shape) * dtype.itemsize <= block_bytes
        fill = _fill_on_host if small else _fill_on_device
        yield part, fill(part, dtype, reads, bar)


def _fill_on_host(
    part: _Part, dtype: np.dtype, reads: Iterator[np.ndarray], bar: tqdm.tqdm
) -> list[Array]:
    """Assembles a small part on the host and copies it to its devices."""
    host = np.empty(part.shape, dtype)
    for block in part.blocks:
        data = next(reads)
        bar.update(data.nbytes)
        data = data if part.patches is None else data[part.patches]
        lead = (block.start[0],) if part.target.stacked else ()
        inner = block.start[len(lead) :]
        cut = tuple(slice(at, at + size) for at, size in zip(inner, data.shape, strict=True))
        host[lead + cut] = data
    return [jax.device_put(host, device) for device in part.devices]


def _fill_on_device(
    part: _Part, dtype: np.dtype, reads: Iterator[np.ndarray], bar: tqdm.tqdm
) -> list[Array]:
    """Allocates a large part on its devices and writes the blocks into it there."""
    buffers = [jnp.zeros(part.shape, dtype, device=device) for device in part.devices]
    for block in part.blocks:
        data = next(reads)
        start = tuple(np.int32(at) for at in block.start)
        buffers = [
            _write(buffer, jax.device_put(data, device), start)
            for buffer, device in zip(buffers, part.devices, strict=True)
        ]
        # The host block is freed once it is copied; without this wait blocks would accumulate.
        jax.block_until_ready(buffers)
        bar.update(data.nbytes)
    return buffers


@partial(jax.jit, donate_argnums=0)
def _write(buffer: Array, block: Array, start: tuple) -> Array:
    """Converts a block and writes it into the donated buffer of the weight."""
    block = block.astype(buffer.dtype)
    block = block.reshape((1,) * (buffer.ndim - block.ndim) + block.shape)
    # As integers: on a CPU, XLA would convert all of a bfloat16 buffer to float32 and back.
    bits = jnp.dtype(f"u{buffer.dtype.itemsize}")
    as_bits = partial(jax.lax.bitcast_convert_type, new_dtype=bits)
    written = jax.lax.dynamic_update_slice(as_bits(buffer), as_bits(block), start)
    return jax.lax.bitcast_convert_type(written, buffer.dtype)


def _read_ahead(blocks: list[_Block], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Reads blocks in order, a few ahead of the consumer."""
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        waiting: collections.deque = collections.deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_read, block, dtype))
                if len(waiting) >= _BLOCKS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _read(block: _Block, dtype: np.dtype) -> np.ndarray:
    """Reads one block that `dtype` can hold, and transposes it from the file's axes to ours."""
    data = safetensors.read_tensor(block.entry, block.index, dtype)
    if block.transform == "patches":
        return np.moveaxis(data, (0, 1), (-1, -2)).reshape(-1, data.shape[0])
    if block.transform == "copy":
        return data
    # Strip by strip: ten times as fast as numpy's own copy of a transposed matrix, and done by the
    # reading threads; as integers, since numpy moves those without a call for each element.
    bits = data.view(np.dtype(f"u{data.dtype.itemsize}"))
    rows, columns = bits.shape
    out = np.empty((columns, rows), bits.dtype)
    tile = np.empty((_TILE, columns + _PAD), bits.dtype)[:, :columns]
    for row in range(0, rows, _TILE):
        count = min(_TILE, rows - row)
        tile[:count] = bits[row : row + count]
        out[:, row : row + count] = tile[:count].T
    return out.view(data.dtype)


def _block_bytes(block: _Block) -> int:
    """Returns the bytes of a block."""
    spans = [cut.indices(size) for cut, size in zip(block.index, block.entry.shape, strict=False)]
    cells = math.prod(stop - start for start, stop, _ in spans)
    return cells * math.prod(block.entry.shape[len(spans) :]) * block.entry.dtype.itemsize
