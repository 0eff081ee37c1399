"""Loads checkpoint files into sharded arrays.

Each weight is assembled on the host and copied to the devices. A process reads only the parts that
its devices hold. A few threads load one weight each, so host memory holds only a few weights at any
time.
"""

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
# Rows that are transposed at once, and padding of each row of this tile. Without padding, the
# elements of a column would lie at multiples of a power of two and share a few cache lines.
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

_Span = tuple[int, int]  # start and stop index along an axis


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
    """Builds a `VLM` from its loaded parts, and warns if the folder's chat template differs."""
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
        targets = [x for x in targets if not x.path.startswith("language/layers/")]
    layouts = _layouts(abstract, source.backbone, mesh)
    sizes = [sum(entries[name].nbytes for name in target.names) for target in targets]
    flat: dict[str, Array | Int8Kernel] = {}
    readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS)
    with _byte_bar(source.folder, sum(sizes), progress) as bar:
        try:
            futures = [
                readers.submit(_load_weight, x, layouts[x.path], entries, jnp.dtype(dtype))
                for x in targets
            ]
            for target, size, future in zip(targets, sizes, futures, strict=True):
                flat[target.path] = future.result()
                bar.update(size)
        finally:
            readers.shutdown(cancel_futures=True)
    # pop leaves `params` as the only owner, so `prepare_to_answer` can free what it joins.
    params = unflatten({path: flat.pop(path) for path in flatten(abstract) if path in flat})
    return prepare_to_answer(params) if use == "answers" else params


def _byte_bar(folder: Path, total: int, show: bool) -> tqdm.tqdm:
    """Returns a progress bar of bytes on stderr.

    If stderr is not a terminal, only the start and the end are written.
    """
    interval = 0.1 if sys.stderr.isatty() else float("inf")
    return tqdm.tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"loading {folder.name}",
        disable=not show,
        mininterval=interval,
    )


def _layouts(
    abstract: dict, backbone: Backbone, mesh: Mesh | None
) -> dict[str, Sharding | Int8Kernel]:
    """Returns the sharding of every weight by parameter path."""
    if mesh is not None:
        return flatten(sharding.shardings(abstract, backbone.SHARDING_RULES, mesh))
    device = jnp.zeros(()).devices().pop()  # respects jax.default_device
    return flatten(jax.tree.map(lambda _: SingleDeviceSharding(device), abstract))


def _with_tie(source: folders.ModelFolder, is_tied: bool) -> folders.ModelFolder:
    """Returns a source whose configuration says whether the head is the embedding matrix."""
    text_config = dataclasses.replace(source.config.text, tie_embeddings=is_tied)
    return source._replace(backbone=source.backbone.replace(text=text_config))


def _tied_names(backbone: Backbone) -> tuple[str, str]:
    """Returns the canonical names of the embedding matrix and of the head."""
    names = {rule.path: rule.name for rule in backbone.weight_rules()}
    return names["language/embed/embedding"], names["language/head/kernel"]


def _is_tied(source: folders.ModelFolder, dtype: np.dtype) -> bool:
    """Returns whether the head is the embedding matrix.

    As in `transformers`, a configured tie does not hold if the files store a different head. Files
    may also store equal numbers under both names.
    """
    backbone = source.backbone
    if not backbone.config.text.tie_embeddings:
        return False
    entries = {
        backbone.canonical_name(name): entry for name, entry in read_folder(source.folder).items()
    }
    embed, head = map(entries.get, _tied_names(backbone))
    if embed is None or head is None or _are_equal(embed, head, dtype):
        return True
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embeddings: it is used",
        source.folder / "config.json",
        head.name,
    )
    return False


def _are_equal(a: safetensors.TensorEntry, b: safetensors.TensorEntry, dtype: np.dtype) -> bool:
    """Returns whether the matrices `a` and `b` are equal after conversion to `dtype`."""
    if a.shape != b.shape or (a.path, a.offset) == (b.path, b.offset):
        return a.shape == b.shape
    # A tensor without axes cannot be a head. `_collect_entries` reports its shape later.
    num_rows = a.shape[0] if a.shape else 0
    step = max(1, _COMPARED_BYTES * num_rows // max(1, a.nbytes))
    blocks = (slice(start, start + step) for start in range(0, num_rows, step))

    def read(entry: safetensors.TensorEntry, rows: slice) -> np.ndarray:
        return safetensors.read_tensor(entry, (rows,), dtype).astype(dtype)

    return all(np.array_equal(read(a, rows), read(b, rows)) for rows in blocks)


def _collect_entries(
    source: folders.ModelFolder, targets: list[WeightTarget]
) -> dict[str, safetensors.TensorEntry]:
    """Finds the stored tensors of all weights, and checks their names, shapes and dtypes.

    Args:
        source: the checkpoint.
        targets: the weights of the model, each with the canonical names of its tensors.

    Returns:
        Entries by canonical name.

    Raises:
        ValueError: tensors are missing, stored twice, unused, mis-shaped or of a non-floating
            dtype. One message lists all of them.
    """
    problems: dict[str, list[str]] = collections.defaultdict(list)
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
    """Returns a message that lists the problems of a folder's weights by kind."""
    lines = [f"the weights in {folder} do not fit its configuration:"]
    for kind, items in problems.items():
        if items:
            lines += [f"  {kind} ({len(items)}):", *(f"    {x}" for x in items[:_MAX_LISTED])]
        if len(items) > _MAX_LISTED:
            lines.append(f"    and {len(items) - _MAX_LISTED} more")
    return "\n".join(lines)


def _read_entries(
    source: folders.ModelFolder, duplicates: list[str]
) -> dict[str, safetensors.TensorEntry]:
    """Reads the entries of a checkpoint and its vision folder by canonical name.

    Args:
        source: the checkpoint.
        duplicates: output list. Tensors with a common canonical name are appended.
    """
    entries: dict[str, safetensors.TensorEntry] = {}
    backbone = source.backbone

    def add(name: str, entry: safetensors.TensorEntry) -> None:
        if name in entries:
            duplicates.append(f"{entries[name].name} and {entry.name}")
        entries[name] = entry

    for name, entry in read_folder(source.folder).items():
        add(backbone.canonical_name(name), entry)
    if source.vision_folder and not any(map(backbone.is_vision_name, entries)):
        for name, entry in read_folder(source.vision_folder).items():
            canonical = backbone.canonical_name(name, of_vision_folder=True)
            if canonical is not None:
                add(canonical, entry)
    embed, head = _tied_names(backbone)
    if backbone.config.text.tie_embeddings and head in entries:
        # A tied matrix may be stored under the head's name only.
        entries.setdefault(embed, entries[head])
    return entries


def _load_weight(
    target: WeightTarget,
    layout: Sharding | Int8Kernel,
    entries: Mapping[str, safetensors.TensorEntry],
    dtype: np.dtype,
) -> Array | Int8Kernel:
    """Reads the parts of a weight that this process's devices hold, and copies them there.

    Args:
        target: shape of the weight, and names and transform of its tensors.
        layout: sharding of the weight; for an int8 weight, shardings of values and scales.
        entries: tensors by canonical name.
        dtype: dtype of a weight that is not int8.

    Returns:
        The sharded weight.
    """
    if isinstance(layout, Int8Kernel):
        return _load_int8(target, layout, entries)
    devices_by_spans: dict[tuple[_Span, ...], list[jax.Device]] = collections.defaultdict(list)
    for device, index in layout.addressable_devices_indices_map(target.shape).items():
        axes = zip(index, target.shape, strict=True)
        spans = tuple(part.indices(size)[:2] for part, size in axes)
        devices_by_spans[spans].append(device)
    arrays = []
    for spans, devices in devices_by_spans.items():  # replicas share one read
        host = np.empty([stop - start for start, stop in spans], dtype)
        layers = range(*spans[0]) if target.is_stacked else range(1)
        index = tuple(slice(*span) for span in spans[target.is_stacked :])
        for layer, out in zip(layers, host if target.is_stacked else host[None], strict=True):
            _read_block(out, entries[target.names[layer]], index, target.transform)
        arrays += [jax.device_put(host, device) for device in devices]
    jax.block_until_ready(arrays)  # frees this weight's host memory before the next weight
    return jax.make_array_from_single_device_arrays(target.shape, layout, arrays)


def _load_int8(
    target: WeightTarget, layout: Int8Kernel, entries: Mapping[str, safetensors.TensorEntry]
) -> Int8Kernel:
    """Reads a matrix or a stack of matrices as int8, and copies the parts to their devices.

    The scale of a column covers all its rows, also on a device that holds only some of them.

    Args:
        target: a weight [k, n] or [layers, k, n].
        layout: shardings of the values and of the scales.
        entries: tensors by canonical name.
    """
    *_, k, _ = shape = target.shape
    # Devices that hold the same layers and columns share one read. They may differ in rows.
    parts: dict[tuple[range, ...], list[tuple[jax.Device, slice]]] = collections.defaultdict(list)
    indices = layout.value.addressable_devices_indices_map(shape)
    for device, (*layers, rows, columns) in indices.items():
        axes = zip((*layers, columns), (*shape[:-2], shape[-1]), strict=True)
        parts[tuple(range(size)[part] for part, size in axes)].append((device, rows))
    values, scales = [], []
    for (*layers, columns), devices in parts.items():
        leading_shape = [len(part) for part in layers]
        value = np.empty([*leading_shape, k, len(columns)], np.int8)
        scale = np.empty([*leading_shape, len(columns)], np.float32)
        for layer, layer_value, layer_scale in zip(
            layers[0] if layers else range(1),
            value.reshape(-1, k, len(columns)),
            scale.reshape(-1, len(columns)),
            strict=True,
        ):
            _read_int8(layer_value, layer_scale, entries[target.names[layer]], columns)
        for device, rows in devices:
            values.append(jax.device_put(value[..., rows, :], device))
            scales.append(jax.device_put(scale, device))
    jax.block_until_ready((values, scales))
    make = jax.make_array_from_single_device_arrays
    return Int8Kernel(
        make(shape, layout.value, values),
        make((*shape[:-2], shape[-1]), layout.scale, scales),
    )


def _read_int8(
    value: np.ndarray, scale: np.ndarray, entry: safetensors.TensorEntry, columns: range
) -> None:
    """Reads and quantizes columns of a matrix, a tile at a time.

    Args:
        value: output [k, len(columns)], int8.
        scale: output [len(columns)], float32.
        entry: the stored matrix, whose rows are our columns.
        columns: the columns to read.
    """
    for start in range(0, len(columns), _TILE_ROWS):
        tile = slice(start, min(start + _TILE_ROWS, len(columns)))
        stored_rows = slice(columns[tile].start, columns[tile].stop)
        block = safetensors.read_tensor(entry, (stored_rows,)).astype(np.float32)
        value[:, tile], scale[tile] = quantize(block.T)


def _read_block(
    out: np.ndarray, entry: safetensors.TensorEntry, index: tuple[slice, ...], transform: str
) -> None:
    """Reads a block of a tensor in our axis order.

    Args:
        out: output array, whose dtype must be able to hold the numbers.
        entry: the stored tensor.
        index: the block, as one slice per axis of our order.
        transform: relation of the axis orders: "copy", "patches" or "transpose".
    """
    if transform == "copy":
        out[...] = safetensors.read_tensor(entry, index, out.dtype)
        return
    if transform == "patches":  # a small tensor, which is read completely and then indexed
        data = safetensors.read_tensor(entry, dtype=out.dtype)
        out[...] = np.moveaxis(data, (0, 1), (-1, -2)).reshape(-1, data.shape[0])[index]
        return
    # Transposing in tiles is ten times as fast as numpy's copy of a transposed matrix. The tiles
    # are copied as integers, because numpy copies the ml_dtypes types with a call per element.
    columns, rows = index
    bits = np.dtype(f"u{out.dtype.itemsize}")
    buffer = np.empty((_TILE_ROWS, len(out) + _TILE_PADDING), out.dtype)[:, : len(out)]
    for start in range(rows.start, rows.stop, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, rows.stop)
        tile = buffer[: stop - start]
        tile[...] = safetensors.read_tensor(entry, (slice(start, stop), columns), out.dtype)
        out.view(bits)[:, start - rows.start : stop - rows.start] = tile.view(bits).T
