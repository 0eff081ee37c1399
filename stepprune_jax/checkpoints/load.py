"""Checkpoint files to sharded arrays, a few weights at a time.

Each weight is assembled on the host, read only as far as this process's devices hold it, and copied
to them; a few threads do so at once, so that the host never holds more than a few weights.
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
from stepprune_jax.user_input import UserError, expect, require

USES = ("answers", "training", "embeddings")
# Weights that are read at once.
_READERS = 3
# Largest number of tensors of a kind listed in a message.
_LISTED = 40
# Rows copied at once in a transposition, and the padding of that tile: rows a power of two apart
# would fall on the same few cache lines.
_TILE, _PAD = 64, 32
# Ends of the names that quantized weights have in the files of GPTQ, AWQ, bitsandbytes, float8 and
# compressed-tensors.
_QUANTIZED = (".qweight", ".absmax", ".SCB", ".weight_scale", ".weight_scale_inv", ".weight_packed")
# Bytes of the embeddings that are compared with a head at once.
_PIECE = 1 << 24

_LOG = logging.getLogger(__name__)


class VLM(NamedTuple):
    """A loaded model with its tokenizer and settings.

    Attributes:
        params: the parameter tree of `stepprune_jax.models.vlm`.
        backbone: its family's functions, with its configuration.
        tokenizer: a `transformers` tokenizer, or None.
        image_settings: the family's image processor settings, or None.
        folder: folder it was loaded from, or None.
        repetition_penalty: value of its ``generation_config.json``, 1 if it has none; applied by
            `generate` as in `transformers`.
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

    LLaVA-1.5 and LLaVA-NeXT are read both in the Hugging Face layout and in the original one (with
    its separate CLIP folder), Qwen2.5-VL and Qwen3-VL with the names of their published files, and
    all with those of newer `transformers`; all from safetensors files, or from pickles that hold
    tensors alone, without running any code they name. Configuration, tokenizer and every tensor's
    name and shape are checked before the first weight is read.

    Args:
        folder_or_hub_id: a folder, a Hugging Face hub id, or the name of a shipped model: "shapes"
            or "shapes_qwen".
        mesh: devices to shard over by the family's `SHARDING_RULES`; None for the default device.
        dtype: floating dtype of the parameters.
        use: what the weights are for. "answers"; "training", to train through the model; or
            "embeddings", without the layers of a language model that runs elsewhere. To answer on a
            GPU, matrices that read the same rows are joined, see `placement.prepare_to_answer`.
        weights: "full", or "int8" for half the memory of the language model, whose matrices are
            then rounded as they are read; see `models.int8`.
        progress: whether to show a progress bar on stderr.
        **reading: how the folder is read: `vision_folder`, `min_pixels` and `max_pixels` of
            `folder.inspect_folder`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a folder or file is missing; the message names it.
        ValueError: an unsupported or damaged checkpoint; all weights that do not fit are listed in
            one message.
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
    """Builds a `VLM` from the parts loaded from a folder, whose chat template is checked."""
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
    """Loads the weights alone.

    Args:
        source: result of `stepprune_jax.checkpoints.folder.inspect_folder`.
        mesh: as in `load_vlm`.
        dtype: as in `load_vlm`.
        use: as in `load_vlm`.
        weights: as in `load_vlm`.
        progress: as in `load_vlm`.

    Returns:
        The parameter tree. It has a head if one is stored that differs from the embeddings, even if
        the configuration says that they are tied.

    Raises:
        ValueError: `dtype` is not floating; `use` or `weights` is unknown; weights are missing,
            unused, mis-shaped or of a non-floating dtype, all of which are listed; a truncated or
            corrupt file, or numbers too large for `dtype`.
    """
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    expect("dtype", dtype, floating, "a floating one, such as jnp.bfloat16")
    expect("use", use, use in USES, f"one of {', '.join(USES)}")
    expect("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
    folders.fetch_weights(source)
    source = _with_tie(source, _is_tied(source, jnp.dtype(dtype)))
    abstract = vlm.abstract_params(source.backbone, jnp.dtype(dtype), weights)
    targets = source.backbone.weight_targets(abstract)
    entries = _collect(source, targets)
    if use == "embeddings":
        targets = [x for x in targets if not x.path.startswith("language/layers/")]
    layouts = _layouts(abstract, source.backbone, mesh)
    sizes = [sum(entries[name].nbytes for name in target.names) for target in targets]
    flat: dict[str, Array | Int8Kernel] = {}
    readers = concurrent.futures.ThreadPoolExecutor(_READERS)
    with _byte_bar(source.folder, sum(sizes), progress) as bar:
        try:
            loading = [
                readers.submit(_load_weight, x, layouts[x.path], entries, jnp.dtype(dtype))
                for x in targets
            ]
            for target, size, load in zip(targets, sizes, loading, strict=True):
                flat[target.path] = load.result()
                bar.update(size)
        finally:
            readers.shutdown(cancel_futures=True)
    # Nothing else holds them then.
    params = unflatten({x: flat.pop(x) for x in flatten(abstract) if x in flat})
    return prepare_to_answer(params) if use == "answers" else params


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


def _layouts(
    abstract: dict, backbone: Backbone, mesh: Mesh | None
) -> dict[str, Sharding | Int8Kernel]:
    """Returns a sharding for every weight."""
    if mesh is not None:
        return flatten(sharding.shardings(abstract, backbone.SHARDING_RULES, mesh))
    device = jnp.zeros(()).devices().pop()  # honours jax.default_device
    return flatten(jax.tree.map(lambda _: SingleDeviceSharding(device), abstract))


def _with_tie(source: folders.ModelFolder, tied: bool) -> folders.ModelFolder:
    """Returns a source whose head is the embedding, or is not."""
    text = dataclasses.replace(source.config.text, tie_embeddings=tied)
    return source._replace(backbone=source.backbone.replace(text=text))


def _tied_names(backbone: Backbone) -> tuple[str, str]:
    """Returns the canonical names of the embeddings and of the head."""
    names = {rule.path: rule.name for rule in backbone.weight_rules()}
    return names["language/embed/embedding"], names["language/head/kernel"]


def _is_tied(source: folders.ModelFolder, dtype: np.dtype) -> bool:
    """Returns whether the head is the embedding: as `transformers` does, not if another is stored.

    Files may hold both, and the same numbers twice.
    """
    backbone = source.backbone
    if not backbone.config.text.tie_embeddings:
        return False
    stored = {backbone.canonical_name(x): e for x, e in read_folder(source.folder).items()}
    embed, head = map(stored.get, _tied_names(backbone))
    if embed is None or head is None or _are_equal(embed, head, dtype):
        return True
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embeddings: it is used",
        source.folder / "config.json",
        head.name,
    )
    return False


def _are_equal(
    one: safetensors.TensorEntry, other: safetensors.TensorEntry, dtype: np.dtype
) -> bool:
    """Compares two matrices as they would be loaded, a few rows at a time."""
    if one.shape != other.shape or (one.path, one.offset) == (other.path, other.offset):
        return one.shape == other.shape
    rows = one.shape[0] if one.shape else 0  # another shape than the model's is refused later
    step = max(1, _PIECE * rows // max(1, one.nbytes))
    cuts = (slice(start, start + step) for start in range(0, rows, step))

    def read(entry, cut):
        return safetensors.read_tensor(entry, (cut,), dtype).astype(dtype)

    return all(np.array_equal(read(one, cut), read(other, cut)) for cut in cuts)


def _collect(
    source: folders.ModelFolder, targets: list[WeightTarget]
) -> dict[str, safetensors.TensorEntry]:
    """Finds the tensor of every name, and reports all mismatches in one error."""
    problems: dict[str, list[str]] = collections.defaultdict(list)
    entries: dict[str, safetensors.TensorEntry] = {}
    backbone = source.backbone

    def add(name: str, entry: safetensors.TensorEntry) -> None:
        if name in entries:
            problems["stored twice"].append(f"{entries[name].name} and {entry.name}")
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
        entries.setdefault(embed, entries[head])  # what is tied is stored under either name
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
        if name not in wanted and not backbone.may_be_unused(name):
            where = f"{entry.name} in {entry.path.name}"
            is_full = not name.endswith(_QUANTIZED)
            require(is_full, f"{source.folder}: quantized weights ({where}) are not supported")
            problems["unused"].append(where)
    if problems:
        lines = [f"the weights in {source.folder} do not fit its configuration:"]
        for kind, items in problems.items():
            lines += [f"  {kind} ({len(items)}):", *(f"    {item}" for item in items[:_LISTED])]
            lines += [f"    and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
        raise UserError("\n".join(lines))
    return entries


def _load_weight(
    target: WeightTarget,
    layout: Sharding | Int8Kernel,
    entries: Mapping[str, safetensors.TensorEntry],
    dtype: np.dtype,
) -> Array | Int8Kernel:
    """Reads what this process's devices hold of a weight, and places it on them."""
    if isinstance(layout, Int8Kernel):
        return _load_int8(target, layout, entries)
    groups: dict[tuple[tuple[int, int], ...], list[jax.Device]] = collections.defaultdict(list)
    for device, index in layout.addressable_devices_indices_map(target.shape).items():
        spans = zip(index, target.shape, strict=True)
        groups[tuple(cut.indices(size)[:2] for cut, size in spans)].append(device)
    arrays = []
    for spans, devices in groups.items():  # replicas share a read
        host = np.empty([stop - start for start, stop in spans], dtype)
        layers = range(*spans[0]) if target.is_stacked else range(1)
        cuts = tuple(slice(*span) for span in spans[target.is_stacked :])
        for layer, part in zip(layers, host if target.is_stacked else host[None], strict=True):
            _read(part, entries[target.names[layer]], cuts, target.transform)
        arrays += [jax.device_put(host, device) for device in devices]
    jax.block_until_ready(arrays)  # frees the host's copies before more are made
    return jax.make_array_from_single_device_arrays(target.shape, layout, arrays)


def _load_int8(
    target: WeightTarget, layout: Int8Kernel, entries: Mapping[str, safetensors.TensorEntry]
) -> Int8Kernel:
    """Reads a matrix, or a stack of them, as int8, and places it.

    Each scale is that of a whole column, whatever part of it a device holds.
    """
    *_, k, _ = shape = target.shape
    groups: dict[tuple[range, ...], list[tuple[jax.Device, slice]]] = collections.defaultdict(list)
    for device, (*cuts, rows, columns) in layout.value.addressable_devices_indices_map(
        shape
    ).items():
        spans = zip((*cuts, columns), (*shape[:-2], shape[-1]), strict=True)
        groups[tuple(range(size)[cut] for cut, size in spans)].append((device, rows))
    values, scales = [], []
    for spans, places in groups.items():
        *layers, columns = spans
        lead = [len(span) for span in layers]
        value = np.empty([*lead, k, len(columns)], np.int8)
        scale = np.empty([*lead, len(columns)], np.float32)
        for layer, *host in zip(
            layers[0] if layers else range(1),
            value.reshape(-1, k, len(columns)),
            scale.reshape(-1, len(columns)),
            strict=True,
        ):
            _read_int8(*host, entries[target.names[layer]], columns)
        for device, rows in places:
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
    """Reads columns of a matrix, which are rows of the file, a few at a time."""
    for start in range(0, len(columns), _TILE):
        at = slice(start, min(start + _TILE, len(columns)))
        part = columns[at]
        cut = (slice(part.start, part.stop),)
        strip = safetensors.read_tensor(entry, cut).astype(np.float32)
        value[:, at], scale[at] = quantize(strip.T)


def _read(
    host: np.ndarray, entry: safetensors.TensorEntry, cuts: tuple[slice, ...], transform: str
) -> None:
    """Reads a tensor, or a part of it, in our axes into `host`, whose dtype has to hold it."""
    if transform == "copy":
        host[...] = safetensors.read_tensor(entry, cuts, host.dtype)
        return
    if transform == "patches":  # small: read whole, cut after the transform
        data = safetensors.read_tensor(entry, dtype=host.dtype)
        host[...] = np.moveaxis(data, (0, 1), (-1, -2)).reshape(-1, data.shape[0])[cuts]
        return
    # Strip by strip: ten times as fast as numpy's own copy of a transposed matrix; as integers,
    # since numpy moves those without a call for each element.
    columns, rows = cuts
    bits = np.dtype(f"u{host.dtype.itemsize}")
    tile = np.empty((_TILE, len(host) + _PAD), host.dtype)[:, : len(host)]
    for start in range(rows.start, rows.stop, _TILE):
        stop = min(start + _TILE, rows.stop)
        strip = tile[: stop - start]
        strip[...] = safetensors.read_tensor(entry, (slice(start, stop), columns), host.dtype)
        host.view(bits)[:, start - rows.start : stop - rows.start] = strip.view(bits).T
