"""Reads everything in a checkpoint folder except the weights: configuration and tokenizer."""

import contextlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.generation_config import read_generation_config
from stepprune_jax.checkpoints.shipped import MODELS, find_shipped_model, or_shipped
from stepprune_jax.checkpoints.weight_files import WEIGHT_NAMES, read_weight_map
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.data.prompts import begins_pieces_with_a_blank, end_tokens
from stepprune_jax.extras import MissingPackageError
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import (
    FieldRule,
    Json,
    ModelConfig,
    Tokenizer,
    bool_rule,
    read_fields,
)
from stepprune_jax.models.families import find_family
from stepprune_jax.models.images import read_normalisation
from stepprune_jax.user_input import UserError, local_path, naming, warn_once

# Files downloaded from the hub first. They reveal a wrong repository before its weights, which take
# minutes, are downloaded.
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")

# `transformers` reads weights from the file that this field names; only null is supported here.
_WEIGHTS_RULE = FieldRule("transformers_weights", None, lambda x: None, "null", optional=True)

# Without this variable, `transformers` recommends torch, which its tokenizers do not need.
_NO_ADVICE = ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_LOG = logging.getLogger(__name__)


class ModelFolder(NamedTuple):
    """A checkpoint folder with its parsed configuration, as `inspect_folder` returns it.

    Attributes:
        folder: the local folder.
        backbone: the functions of the model family, with the configuration.
        vision_folder: local folder of a separate vision tower, or None.
        origins: folder or hub id that the user gave for the model, and a second one for a separate
            vision tower.
        repetition_penalty: default repetition penalty for generation; 1 has no effect.
    """

    folder: Path
    backbone: Backbone
    vision_folder: Path | None
    origins: tuple[str, ...]
    repetition_penalty: float = 1.0

    @property
    def config(self) -> ModelConfig:
        """The configuration of the backbone."""
        return self.backbone.config


def find_folder(folder_or_hub_id: str | Path, patterns: tuple[str, ...] = SMALL_FILES) -> Path:
    """Finds a checkpoint folder on disk, in the package, or on the hub.

    Args:
        folder_or_hub_id: a local folder, the name of a shipped model, or a hub id.
        patterns: glob patterns of the files to download if the name is a hub id.

    Returns:
        The local folder.

    Raises:
        FileNotFoundError: there is no such folder, or the download failed.
        NotADirectoryError: the name is a file.
    """
    folder = local_path(folder_or_hub_id)
    if folder.is_dir() and str(folder_or_hub_id):  # "" must not mean the current folder
        return folder
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file: give its folder")
    shipped_folder = find_shipped_model(folder_or_hub_id)
    if shipped_folder is not None:
        return shipped_folder
    missing = or_shipped(f"no folder {folder_or_hub_id}", folder_or_hub_id, "model", MODELS)
    source = hub.find_repository(folder_or_hub_id, missing)
    if patterns == SMALL_FILES:
        _LOG.info("%s is not a local folder; looking it up on the Hugging Face hub", source)
    return hub.download(source, patterns)


def inspect_folder(
    folder_or_hub_id: str | Path,
    vision_folder: str | Path | None = None,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> ModelFolder:
    """Identifies the model family of a checkpoint and reads its configuration.

    Args:
        folder_or_hub_id: as in `load_vlm`.
        vision_folder: folder or hub id of a separate vision tower; None selects the tower that
            ``config.json`` names.
        min_pixels: smallest area of a resized image in pixels, for models that take images of any
            size; None selects the area of the folder's image processor.
        max_pixels: largest area of a resized image in pixels. For a LLaVA, a smaller area reduces
            the image size to a multiple of the patch size, and position embeddings are
            interpolated.

    Returns:
        The folder with its configuration. Weights are neither read nor downloaded.

    Raises:
        FileNotFoundError: the folder, its configuration or its vision tower is missing.
        ValueError: the checkpoint or an argument is not supported.
    """
    folder = find_folder(folder_or_hub_id)
    raw_config = _read_config(folder)
    family = find_family(raw_config, str(folder))
    file = folder / "config.json"
    with naming(file, TypeError, ValueError):
        configured_tower = family.vision_folder(raw_config)
    stop_ids, penalty = read_generation_config(folder, raw_config)
    tower_folder, raw_tower_config, origins = None, None, (str(folder_or_hub_id),)
    place = str(file)
    if configured_tower is not None:
        tower_folder, tower_origin = _find_vision_folder(folder, configured_tower, vision_folder)
        raw_tower_config = _read_config(tower_folder)
        origins = (*origins, tower_origin)
        place = f"{file} with the tower of {tower_folder}"
    elif vision_folder is not None:
        raise UserError(
            f"{folder} has its image tower in the same files; vision_folder is for checkpoints "
            "with a separate tower, such as the original LLaVA-v1.5"
        )
    with naming(place, TypeError, ValueError):
        backbone = family.read(raw_config | stop_ids, raw_tower_config)
    image_folder = tower_folder or folder  # has the settings of the image processor
    backbone = backbone.bound_images(image_folder, min_pixels, max_pixels)
    # Text-only uses need no preprocessor_config.json; reading images reports a missing one.
    with contextlib.suppress(FileNotFoundError):
        backbone = backbone.replace(normalisation=read_normalisation(image_folder))
    return ModelFolder(folder, backbone, tower_folder, origins, penalty)


def fetch_weights(source: ModelFolder) -> None:
    """Downloads the weight files of a model whose name is a hub id. Local weights are not touched.

    If the repository has weights in several formats, only the format that would be read is
    downloaded.

    Args:
        source: result of `inspect_folder`.
    """
    for origin in source.origins:
        for name in WEIGHT_NAMES:
            path = find_folder(origin, (name,)) / name
            if not path.is_file():
                continue
            if path.suffix == ".json":  # an index, whose shards are downloaded next
                shards = set(read_weight_map(path, stored=False).values())
                find_folder(origin, tuple(shards))
            break


def _find_vision_folder(
    folder: Path, configured: str, argument: str | Path | None
) -> tuple[Path, str]:
    """Finds the folder of a separate vision tower.

    Args:
        folder: the model's folder. A configured relative path is looked up here.
        configured: folder or hub id of the tower in the model's ``config.json``.
        argument: folder or hub id that the user gave instead, or None.

    Returns:
        The local folder, and the folder or hub id where it came from.

    Raises:
        FileNotFoundError: there is no such folder; the message says how to pass one.
    """
    name = argument or configured
    inside = folder / name
    try:
        if argument is None and configured and inside.is_dir():
            name = inside
        return find_folder(name), str(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        source = "vision_folder" if argument else f"mm_vision_tower of {folder / 'config.json'}"
        raise FileNotFoundError(
            f"{source}: {error}. Pass vision_folder= with its folder"
        ) from error


def _read_config(folder: Path) -> Json:
    """Parses a folder's ``config.json``, and refuses adapters and quantized weights.

    Returns:
        The fields of ``config.json`` by name.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ValueError: the file is damaged, or the model has an adapter or quantized weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        has_adapter = "adapter_config.json" in names
        advice = "merge the adapter into its base model" if has_adapter else "not a model folder"
        raise FileNotFoundError(
            f"{folder} has no config.json: {advice}; it holds {', '.join(names[:8]) or 'nothing'}"
        )
    adapter = folder / "adapter_config.json"
    not_applied = "is not applied: merge it into the model, or take it out of the folder"
    # `transformers` with peft would apply this adapter, so ignoring it would change the answers.
    if adapter.is_file():
        raise UserError(f"the adapter of {adapter} {not_applied}")
    for file in sorted(folder.glob("adapter_model.*")):
        warn_once(f"{file} {not_applied}")
    config = read_json_object(path)
    read_fields(config, str(path), {"weights": _WEIGHTS_RULE})
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise UserError(f"{path}: quantized weights ({method or quantized!r}) are not supported")
    return config


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads a folder's tokenizer. Its ids equal the ids of the model's published program.

    A ``tokenizer.json`` is used unchanged. A folder with only a ``tokenizer.model`` gets Llama's
    rules: a begin-of-sequence id first and a blank before the text, unless
    ``tokenizer_config.json`` says otherwise. The automatic class of `transformers` 5 does neither
    for a folder of model type "llava". A tokenizer that appends an end token to every text causes a
    warning, because prompts omit that token.

    Args:
        folder: a local checkpoint folder.

    Returns:
        A tokenizer of `transformers`.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        MissingPackageError: reading ``tokenizer.model`` needs a package that is not installed.
        ValueError: the tokenizer's files are damaged.
    """
    os.environ.setdefault(*_NO_ADVICE)
    import transformers  # takes half a second to import

    folder = Path(folder)
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            path = folder / "tokenizer.model"
            if not path.is_file():
                raise FileNotFoundError(
                    f"{folder} has no tokenizer: expected tokenizer.json, or tokenizer.model"
                )
            tokenizer = _sentencepiece_tokenizer(folder)
        # These are the first calls of the tokenizer. They fail if some settings are wrong.
        appended_ids = end_tokens(tokenizer)
        has_extra_blanks = begins_pieces_with_a_blank(tokenizer)
    except (MissingPackageError, FileNotFoundError):
        raise
    except Exception as error:  # the Rust tokenizer raises bare Exceptions
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} could not be read as a tokenizer, with tokenizer_config.json: {reason}"
        ) from error
    if appended_ids:
        text = "".join(tokenizer.convert_ids_to_tokens(appended_ids))
        warn_once(
            f"{path}: the tokenizer appends {text} to every text; prompts and training rows leave "
            "it out, as the model's template has none there"
        )
    if has_extra_blanks:
        _LOG.info(
            "%s: text after an image begins with a blank piece, as in LLaVA's own program; the "
            "processors of transformers have no such piece with this tokenizer (legacy: false)",
            path,
        )
    return tokenizer


def _sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """Loads ``tokenizer.model`` with the rules of the slow Llama tokenizer of `transformers` 4.

    Args:
        folder: a folder with a ``tokenizer.model``. Its ``tokenizer_config.json`` is optional.

    Raises:
        MissingPackageError: a package that reads SentencePiece models is not installed.
    """
    os.environ.setdefault(*_NO_ADVICE)
    import tokenizers
    import transformers

    missing_packages = [
        package
        for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google"))
        if importlib.util.find_spec(module) is None
    ]
    if missing_packages:
        raise MissingPackageError(
            f"{folder} has tokenizer.model but no tokenizer.json; reading it needs "
            f"pip install {' '.join(missing_packages)}"
        )
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    rules = {name: bool_rule(name, True) for name in ("legacy", "add_bos_token")}
    is_legacy, adds_bos = read_fields(config, str(path), rules).values()
    tokenizer = transformers.LlamaTokenizer.from_pretrained(
        folder, legacy=is_legacy, add_bos_token=adds_bos
    )
    if is_legacy:
        # A normalized special token would also get the blank below, and then match no text.
        normalizers, backend = tokenizers.normalizers, tokenizer.backend_tokenizer
        for token in backend.get_added_tokens_decoder().values():
            if token.normalized:
                raw_token = tokenizers.AddedToken(
                    token.content,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=token.special,
                )
                add = backend.add_special_tokens if token.special else backend.add_tokens
                add([raw_token])
        # SentencePiece puts a blank before every text, even before one that starts with a blank.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.pre_tokenizer = None
    return tokenizer
