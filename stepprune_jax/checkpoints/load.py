"""Loads checkpoint files into sharded arrays.

Each weight is assembled on the host and copied to the devices. A process reads only the parts that
its devices hold. A few threads load one weight each, so host memory holds only a few weights at any
time.

A weight is an array of the parameter tree. A weight that is stacked over the layers of a model
consists of several tensors in the files, one per layer. A canonical name is the name of a tensor in
one layout of a model family; the names in all other layouts are mapped to it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.chat_template import warn_of_template
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone, Processor
from stepprune_jax.models.config import ModelConfig, Tokenizer
from stepprune_jax.models.int8 import WEIGHTS, Int8Kernel, quantize
from stepprune_jax.models.stack import Params
from stepprune_jax.models.weights import WeightTarget, flatten, unflatten
from stepprune_jax.parallel import sharding
from stepprune_jax.parallel.placement import prepare_to_answer
from stepprune_jax.policy.params import count_weights
from stepprune_jax.user_input import UserError, expect

USES = ("answers", "training", "embeddings")
# Three threads overlap reading, transposing and copying to a device. More threads would only hold
# more weights in host memory.
_NUM_READERS = 3
# Longer lists of tensors would hide the first line of an error message.
_MAX_LISTED = 40
# Number of rows that are transposed at once (a tile), and padding of each row of a tile. Without
# padding, the elements of a column would lie at multiples of a power of two and share a few cache
# lines.
_TILE_ROWS, _TILE_PADDING = 64, 32
# Name suffixes of quantized weights in files of GPTQ, AWQ, bitsandbytes, float8 and
# compressed-tensors. They identify checkpoints that cannot be loaded.
_QUANTIZED_SUFFIXES = (
    ".qweight",
    ".absmax",
    ".SCB",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_packed",
)
# Parts of the names that peft gives to the weights of an adapter and of the layers that it wraps.
_ADAPTER_PARTS = ("base_model.model.", ".base_layer.", ".lora_A.", ".lora_B.", ".modules_to_save.")
# Bytes of each matrix that `_are_equal` compares at once: 16 MiB, instead of a gigabyte.
_COMPARED_BYTES = 1 << 24

_LOG = logging.getLogger(__name__)

_Span = tuple[int, int]  # start and stop index of a block along an axis


class VLM(NamedTuple):
    """A loaded model with its tokenizer and settings.

    Attributes:
        params: the parameter tree of `stepprune_jax.models.vlm`.
        backbone: the family's functions, with the model's configuration.
        tokenizer: a `transformers` tokenizer, or None.
        image_settings: the family's image processor settings, or None.
        folder: folder that the model was loaded from, or None.
        repetition_penalty: value of ``generation_config.json``, by default 1. `generate` applies it
            as `transformers` does.
    """

    params: Params
    backbone: Backbone
    tokenizer: Tokenizer = None
    image_settings: Processor = None
    folder: Path | None = None
    repetition_penalty: float = 1.0

    def __repr__(self) -> str:
        """Returns one line, without the weights."""
        weights = f"{count_weights(self.params):,} weights"
        return f"VLM({type(self.backbone).__name__}, {weights}, folder={self.folder})"

    @property
    def config(self) -> ModelConfig:
        """The configuration of the backbone."""
        return self.backbone.config


def load_vlm(
    folder_or_hub_id: str | Path,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    use: str = "answers",
    weights: str = "full",
    progress: bool = True,
    **reading: Any,
) -> VLM:
    """Loads a checkpoint with everything needed to generate answers.

    LLaVA-1.5 and LLaVA-NeXT are read in the Hugging Face layout and in the original layout with a
    separate CLIP folder. Qwen2.5-VL and Qwen3-VL are read with the tensor names of their published
    files. All families are also read with the tensor names of newer `transformers` releases. The
    files are safetensors, or files of `torch.save`, which are read without running code that they
    name. Configuration, tokenizer, and the name and shape of every tensor are checked before the
    first weight is read.

    Args:
        folder_or_hub_id: a folder, a Hugging Face hub id, or the name of a shipped model: "shapes"
            or "shapes_qwen".
        mesh: devices to shard over by the family's `SHARDING_RULES`; None selects the default
            device.
        dtype: floating dtype of the parameters.
        use: purpose of the weights. "answers" joins matrices with a common input on a GPU, see
            `placement.prepare_to_answer`. "training" keeps all matrices separate. "embeddings"
            omits the layers of the language model, which then runs elsewhere.
        weights: "full", or "int8" to round the matrices of the language model to half the memory of
            bfloat16, see `models.int8`.
        progress: whether to show a progress bar on stderr.
        **reading: the arguments `vision_folder`, `min_pixels` and `max_pixels` of
            `folder.inspect_folder`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a folder or file is missing; the message names it.
        ValueError: the checkpoint is not supported or is damaged. One message lists all weights
            that do not fit the configuration.
    """
    source = folders.inspect_folder(folder_or_hub_id, **reading)
    tokenizer = folders.load_tokenizer(source.folder)
    settings = source.backbone.image_settings(source.vision_folder or source.folder)
    params = load_params(source, mesh, dtype, use=use, weights=weights, progress=progress)
    source = _with_tie(source, "head" not in params["language"])
    return make_vlm(source, params, tokenizer, settings)


def make_vlm(
    source: folders.ModelFolder, params: Params, tokenizer: Tokenizer, image_settings: Processor
) -> VLM:
    """Builds a `VLM` from its loaded parts, and logs a warning about an unusual chat template.

    Args:
        source: result of `inspect_folder`.
        params: the parameter tree.
        tokenizer: the folder's tokenizer.
        image_settings: the family's image processor settings.
    """
    warn_of_template(source.folder, source.backbone, tokenizer)
    penalty = source.repetition_penalty
    return VLM(params, source.backbone, tokenizer, image_settings, source.folder, penalty)


def load_params(
    source: folders.ModelFolder,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    use: str = "answers",
    weights: str = "full",
    progress: bool = True,
) -> Params:
    """Loads the weights of a checkpoint, without tokenizer and image settings.

    Args:
        source: result of `stepprune_jax.checkpoints.folder.inspect_folder`.
        mesh: as in `load_vlm`.
        dtype: as in `load_vlm`.
        use: as in `load_vlm`.
        weights: as in `load_vlm`.
        progress: as in `load_vlm`.

    Returns:
        The parameter tree. It has a separate head if the files store a head that differs from the
        embeddings, even if the configuration ties the two.

    Raises:
        ValueError: `dtype` is not floating; `use` or `weights` is unknown; a file is truncated or
            corrupt; a number is too large for `dtype`; or weights are missing, unused, mis-shaped
            or of a non-floating dtype. One message lists all such weights.
    """
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    expect("dtype", dtype, is_floating, "a floating one, such as jnp.bfloat16")
    expect("use", use, use in USES, f"one of {', '.join(USES)}")
    expect("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
    folders.fetch_weights(source)
    source = _with_tie(source, _is_tied(source, jnp.dtype(dtype)))
    abstract = vlm.abstract_params(source.backbone, jnp.dtype(dtype), weights)
    targets = source.backbone.weight_targets(abstract)
    entries = _collect_entries(source, targets)
    if use == "embeddings":
        targets = [target for target in targets if not target.path.startswith("language/layers/")]
    layouts = _make_layouts(abstract, source.backbone, mesh)
    byte_counts = [sum(entries[name].nbytes for name in target.names) for target in targets]
    loaded: dict[str, Array | Int8Kernel] = {}  # weights by parameter path
    readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS)
    with _make_byte_bar(source.folder, sum(byte_counts), progress) as bar:
        try:
            futures = [
                readers.submit(
                    _load_weight, target, layouts[target.path], entries, jnp.dtype(dtype)
                )
                for target in targets
            ]
            for target, byte_count, future in zip(targets, byte_counts, futures, strict=True):
                loaded[target.path] = future.result()
                bar.update(byte_count)
        finally:
            readers.shutdown(cancel_futures=True)
    # `pop` leaves `params` as the only owner, so `prepare_to_answer` can free what it joins.
    params = unflatten({path: loaded.pop(path) for path in flatten(abstract) if path in loaded})
    return prepare_to_answer(params) if use == "answers" else params


def _make_byte_bar(folder: Path, num_bytes: int, show: bool) -> tqdm.tqdm:
    """Returns a progress bar of bytes on stderr.

    If stderr is not a terminal, only the start and the end are written.

    Args:
        folder: the checkpoint folder, whose name labels the bar.
        num_bytes: number of bytes at the end.
        show: False returns a bar that writes nothing.
    """
    interval = 0.1 if sys.stderr.isatty() else float("inf")
    return tqdm.tqdm(
        total=num_bytes,
        unit="B",
        unit_scale=True,
        desc=f"loading {folder.name}",
        disable=not show,
        mininterval=interval,
    )


def _make_layouts(
    abstract: dict, backbone: Backbone, mesh: Mesh | None
) -> dict[str, Sharding | Int8Kernel]:
    """Returns the sharding of every weight by parameter path.

    Args:
        abstract: the parameter tree with shapes instead of arrays.
        backbone: the model, with the sharding rules of its family.
        mesh: devices to shard over; None puts every weight on the default device.

    Returns:
        Shardings by parameter path. An int8 weight has an `Int8Kernel` of two shardings.
    """
    if mesh is not None:
        return flatten(sharding.shardings(abstract, backbone.SHARDING_RULES, mesh))
    device = jnp.zeros(()).devices().pop()  # respects jax.default_device
    return flatten(jax.tree.map(lambda _: SingleDeviceSharding(device), abstract))


def _with_tie(source: folders.ModelFolder, is_tied: bool) -> folders.ModelFolder:
    """Returns `source` with the field `tie_embeddings` of its text configuration replaced.

    Args:
        source: the checkpoint.
        is_tied: whether the output head is the embedding matrix.
    """
    text_config = dataclasses.replace(source.config.text, tie_embeddings=is_tied)
    return source._replace(backbone=source.backbone.replace(text=text_config))


def _tied_names(backbone: Backbone) -> tuple[str, str]:
    """Returns the canonical names of the embedding matrix and of the head."""
    names = {rule.path: rule.name for rule in backbone.weight_rules()}
    return names["language/embed/embedding"], names["language/head/kernel"]


def _is_tied(source: folders.ModelFolder, dtype: np.dtype) -> bool:
    """Returns whether the output head of a checkpoint is its embedding matrix (tied weights).

    As in `transformers`, the configured value true is ignored if the files store a head that
    differs from the embeddings. Some files store equal matrices under both names.

    Args:
        source: the checkpoint.
        dtype: dtype of the parameters. The two matrices are compared in this dtype.
    """
    backbone = source.backbone
    if not backbone.config.text.tie_embeddings:
        return False
    entries = {
        backbone.canonical_name(name): entry for name, entry in read_folder(source.folder).items()
    }
    embedding, head = map(entries.get, _tied_names(backbone))
    if embedding is None or head is None or _are_equal(embedding, head, dtype):
        return True
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embeddings: it is used",
        source.folder / "config.json",
        head.name,
    )
    return False


def _are_equal(a: safetensors.TensorEntry, b: safetensors.TensorEntry, dtype: np.dtype) -> bool:
    """Returns whether the matrices `a` and `b` are equal after conversion to `dtype`."""
    if a.shape != b.shape:
        return False
    if (a.path, a.offset) == (b.path, b.offset):  # one stored tensor
        return True
    # A tensor without axes cannot be a head. `_collect_entries` reports its shape later.
    num_rows = a.shape[0] if a.shape else 0
    rows_per_block = max(1, _COMPARED_BYTES * num_rows // max(1, a.nbytes))

    def read(entry: safetensors.TensorEntry, rows: slice) -> np.ndarray:
        return safetensors.read_tensor(entry, (rows,), dtype).astype(dtype)

    blocks = (slice(row, row + rows_per_block) for row in range(0, num_rows, rows_per_block))
    return all(np.array_equal(read(a, rows), read(b, rows)) for rows in blocks)


def _collect_entries(
    source: folders.ModelFolder, targets: list[WeightTarget]
) -> dict[str, safetensors.TensorEntry]:
    """Finds the stored tensors of all weights, and checks their names, shapes and dtypes.

    Args:
        source: the checkpoint.
        targets: the weights of the model, each with the canonical names of its tensors.

    Returns:
        Location of each stored tensor by canonical name.

    Raises:
        ValueError: tensors are missing, stored twice, unused, mis-shaped or of a non-floating
            dtype. One message lists all of them.
    """
    problems: dict[str, list[str]] = collections.defaultdict(list)  # lines by kind of problem
    entries = _read_entries(source, problems["stored twice"])
    backbone = source.backbone
    expected = {name: target for target in targets for name in target.names}
    for name, target in expected.items():
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
        if name not in expected and not backbone.may_be_unused(name):
            place = f"{entry.name} in {entry.path.name}"
            if name.endswith(_QUANTIZED_SUFFIXES):
                raise UserError(f"{source.folder}: quantized weights ({place}) are not supported")
            if any(part in name for part in _ADAPTER_PARTS):
                raise UserError(
                    f"{source.folder}: the weights hold an adapter ({place}); merge the adapter "
                    "into its model, and save the merged model"
                )
            problems["unused"].append(place)
    if any(problems.values()):
        raise UserError(_list_problems(source.folder, problems))
    return entries


def _list_problems(folder: Path, problems: Mapping[str, list[str]]) -> str:
    """Returns an error message of several lines about the weights of a folder.

    Args:
        folder: the checkpoint folder.
        problems: descriptions of tensors by kind of problem, such as "missing".
    """
    lines = [f"the weights in {folder} do not fit its configuration:"]
    for kind, tensors in problems.items():
        if tensors:
            lines.append(f"  {kind} ({len(tensors)}):")
            lines += [f"    {tensor}" for tensor in tensors[:_MAX_LISTED]]
        if len(tensors) > _MAX_LISTED:
            lines.append(f"    and {len(tensors) - _MAX_LISTED} more")
    return "\n".join(lines)


def _read_entries(
    source: folders.ModelFolder, duplicates: list[str]
) -> dict[str, safetensors.TensorEntry]:
    """Reads the locations of all tensors of a checkpoint and of its separate vision tower.

    Args:
        source: the checkpoint.
        duplicates: output list of messages. Two tensors with the same canonical name append a line
            to this list.

    Returns:
        Location of each stored tensor by canonical name.
    """
    entries: dict[str, safetensors.TensorEntry] = {}
    backbone = source.backbone

    def add(name: str, entry: safetensors.TensorEntry) -> None:
        if name in entries:
            duplicates.append(f"{entries[name].name} and {entry.name}")
        entries[name] = entry

    for name, entry in read_folder(source.folder).items():
        canonical = backbone.canonical_name(name)
        if canonical is not None:
            add(canonical, entry)
    if source.vision_folder and not any(map(backbone.is_vision_name, entries)):
        for name, entry in read_folder(source.vision_folder).items():
            canonical = backbone.canonical_name(name, of_vision_folder=True)
            if canonical is not None:
                add(canonical, entry)
    embedding_name, head_name = _tied_names(backbone)
    if backbone.config.text.tie_embeddings and head_name in entries:
        # A tied matrix may be stored under the head's name only.
        entries.setdefault(embedding_name, entries[head_name])
    return entries


def _load_weight(
    target: WeightTarget,
    layout: Any,
    entries: Mapping[str, safetensors.TensorEntry],
    dtype: np.dtype,
) -> Array | Int8Kernel:
    """Reads the blocks of a weight that the devices of this process hold, and copies them there.

    Args:
        target: path and shape of the weight, and the names and axis order of its stored tensors.
        layout: sharding of the weight; for an int8 weight, the shardings of values and scales.
        entries: location of each stored tensor by canonical name.
        dtype: dtype of the weight; ignored for an int8 weight.

    Returns:
        The sharded weight.
    """
    if isinstance(layout, Int8Kernel):
        return _load_int8(target, layout, entries)
    # Devices that hold the same block share one read. A block is given by its spans.
    devices_by_block: dict[tuple[_Span, ...], list[Any]] = collections.defaultdict(list)
    for device, slices in layout.addressable_devices_indices_map(target.shape).items():
        sized_slices = zip(slices, target.shape, strict=True)
        spans = tuple(axis_slice.indices(size)[:2] for axis_slice, size in sized_slices)
        devices_by_block[spans].append(device)
    arrays = []
    for spans, devices in devices_by_block.items():
        block = np.empty([stop - start for start, stop in spans], dtype)
        if target.is_stacked:  # one stored tensor per layer
            layers, layer_spans, layer_blocks = range(*spans[0]), spans[1:], block
        else:
            layers, layer_spans, layer_blocks = range(1), spans, block[None]
        index = tuple(slice(*span) for span in layer_spans)
        for layer, layer_block in zip(layers, layer_blocks, strict=True):
            _read_block(layer_block, entries[target.names[layer]], index, target.transform)
        arrays += [jax.device_put(block, device) for device in devices]
    jax.block_until_ready(arrays)  # frees this weight's host memory before the next weight
    return jax.make_array_from_single_device_arrays(target.shape, layout, arrays)


def _load_int8(
    target: WeightTarget, layout: Any, entries: Mapping[str, safetensors.TensorEntry]
) -> Int8Kernel:
    """Reads a matrix or a stack of matrices as int8, and copies the blocks to their devices.

    Each column has one scale. It is computed from all rows of the column, even if no device holds
    all rows.

    Args:
        target: a weight of shape [k, n], or [layers, k, n] if it is stacked.
        layout: an `Int8Kernel` with the shardings of the values and of the scales.
        entries: location of each stored tensor by canonical name.

    Returns:
        The sharded weight: values [k, n] in int8 and scales [n] in float32, or stacks of these.
    """
    *leading_shape, k, n = shape = target.shape  # leading_shape is [layers] or []
    # Devices that hold the same layers and columns share one read. They may hold different rows.
    devices_by_block: dict[tuple[range, ...], list[tuple[Any, slice]]]
    devices_by_block = collections.defaultdict(list)
    device_slices = layout.value.addressable_devices_indices_map(shape)
    for device, (*layer_slices, row_slice, column_slice) in device_slices.items():
        sized_slices = zip((*layer_slices, column_slice), (*leading_shape, n), strict=True)
        block = tuple(range(size)[axis_slice] for axis_slice, size in sized_slices)
        devices_by_block[block].append((device, row_slice))
    values, scales = [], []  # one array per device
    for (*layer_ranges, columns), devices in devices_by_block.items():
        layers = layer_ranges[0] if target.is_stacked else range(1)
        value = np.empty([len(layers), k, len(columns)], np.int8)
        scale = np.empty([len(layers), len(columns)], np.float32)
        for layer, layer_value, layer_scale in zip(layers, value, scale, strict=True):
            _read_int8(layer_value, layer_scale, entries[target.names[layer]], columns)
        if not target.is_stacked:
            value, scale = value[0], scale[0]
        for device, row_slice in devices:
            values.append(jax.device_put(value[..., row_slice, :], device))
            scales.append(jax.device_put(scale, device))
    jax.block_until_ready((values, scales))
    make_array = jax.make_array_from_single_device_arrays
    return Int8Kernel(
        make_array(shape, layout.value, values),
        make_array((*leading_shape, n), layout.scale, scales),
    )


def _read_int8(
    value: np.ndarray, scale: np.ndarray, entry: safetensors.TensorEntry, columns: range
) -> None:
    """Reads columns of a matrix and quantizes them to int8, a tile at a time.

    Args:
        value: output array [k, len(columns)], int8, which is filled.
        scale: output array [len(columns)], float32, which is filled.
        entry: location of the matrix, stored as [n, k].
        columns: indices of the columns to read, which are rows of the stored matrix.
    """
    for start in range(0, len(columns), _TILE_ROWS):
        tile = slice(start, min(start + _TILE_ROWS, len(columns)))
        stored_rows = slice(columns[tile].start, columns[tile].stop)
        block = safetensors.read_tensor(entry, (stored_rows,)).astype(np.float32)
        value[:, tile], scale[tile] = quantize(block.T)


def _read_block(
    block: np.ndarray, entry: safetensors.TensorEntry, index: tuple[slice, ...], transform: str
) -> None:
    """Reads a block of a tensor into an array, and changes the order of its axes.

    Args:
        block: output array, which is filled. The numbers of the file must fit its dtype.
        entry: location of the stored tensor.
        index: position of the block in the weight, as one slice per axis.
        transform: how the axes of the weight follow from the stored axes. "copy": they are equal.
            "transpose": they are reversed. "patches": a convolution kernel [d, channels,
            *window] becomes a matrix with the axes [*window, channels] flattened to rows, and d
            columns.
    """
    if transform == "copy":
        block[...] = safetensors.read_tensor(entry, index, block.dtype)
        return
    if transform == "patches":  # a small tensor, which is read completely and then indexed
        kernel = safetensors.read_tensor(entry, dtype=block.dtype)
        matrix = np.moveaxis(kernel, (0, 1), (-1, -2)).reshape(-1, kernel.shape[0])
        block[...] = matrix[index]
        return
    # Transposing in tiles is ten times as fast as numpy's copy of a transposed matrix. The tiles
    # are copied as integers, because numpy copies the ml_dtypes types with a call per element.
    columns, rows = index  # slices of the stored matrix: its rows are the columns of the weight
    bits_dtype = np.dtype(f"u{block.dtype.itemsize}")
    buffer = np.empty((_TILE_ROWS, len(block) + _TILE_PADDING), block.dtype)[:, : len(block)]
    for start in range(rows.start, rows.stop, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, rows.stop)
        tile = buffer[: stop - start]
        tile[...] = safetensors.read_tensor(entry, (slice(start, stop), columns), block.dtype)
        block_columns = slice(start - rows.start, stop - rows.start)
        block.view(bits_dtype)[:, block_columns] = tile.view(bits_dtype).T
