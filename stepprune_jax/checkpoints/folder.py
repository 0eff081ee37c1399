"""Checkpoint folders apart from their weights: architecture, configuration and tokenizer."""

import contextlib
import importlib.util
import logging
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

# Files fetched from the hub first: they reveal a wrong repository before its weights are fetched.
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")

# The weights under another name than those that are looked for.
_WEIGHTS = FieldRule("transformers_weights", None, lambda x: None, "null", optional=True)

_LOG = logging.getLogger(__name__)


class ModelFolder(NamedTuple):
    """An inspected checkpoint folder; its image tower may lie in a folder of its own.

    `origins` are the given folders or hub ids.
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
    """Returns a local folder, that of a shipped model, or the downloaded files of a hub id."""
    folder = local_path(folder_or_hub_id)
    if folder.is_dir() and str(folder_or_hub_id):  # an empty name is not the current folder
        return folder
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file: give its folder")
    shipped = find_shipped_model(folder_or_hub_id)
    if shipped is not None:
        return shipped
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
    """Identifies the kind of checkpoint and reads its configuration, not its weights.

    Args:
        folder_or_hub_id: as in `load_vlm`.
        vision_folder: folder of a separate tower, instead of the one that ``config.json`` names.
        min_pixels: smallest area of a resized image, instead of that of the folder's image
            processor; for models that take images of any size.
        max_pixels: largest area; a LLaVA is given smaller images than it was trained with, in whole
            patches, whose positions are interpolated.
    """
    folder = find_folder(folder_or_hub_id)
    raw = _read_config(folder)
    family = find_family(raw, str(folder))
    file = folder / "config.json"
    with naming(file, TypeError, ValueError):
        configured = family.vision_folder(raw)
    stops, penalty = read_generation_config(folder, raw)
    tower, raw_tower, origins = None, None, (str(folder_or_hub_id),)
    if configured is not None:
        tower, origin = _vision_folder(folder, configured, vision_folder)
        raw_tower, origins = _read_config(tower), (*origins, origin)
    elif vision_folder is not None:
        raise UserError(
            f"{folder} has its image tower in the same files; vision_folder is for checkpoints "
            "with a separate tower, such as the original LLaVA-v1.5"
        )
    with naming(
        file if tower is None else f"{file} with the tower of {tower}", TypeError, ValueError
    ):
        backbone = family.read(raw | stops, raw_tower)
    backbone = backbone.bound_images(tower or folder, min_pixels, max_pixels)
    with contextlib.suppress(FileNotFoundError):  # it is missed where images are read
        backbone = backbone.replace(normalisation=read_normalisation(tower or folder))
    return ModelFolder(folder, backbone, tower, origins, penalty)


def fetch_weights(source: ModelFolder) -> None:
    """Downloads the weights of a source on the hub, of several kinds only those that are read."""
    for origin in source.origins:
        for name in WEIGHT_NAMES:
            found = find_folder(origin, (name,)) / name
            if found.is_file():
                if found.suffix == ".json":
                    find_folder(origin, tuple(set(read_weight_map(found, stored=False).values())))
                break


def _vision_folder(folder: Path, configured: str, given: str | Path | None) -> tuple[Path, str]:
    """Finds the tower's folder: the given one, one inside the checkpoint, or one on the hub."""
    name = given or configured
    beside = folder / name
    try:
        name = beside if given is None and configured and beside.is_dir() else name
        return find_folder(name), str(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        source = "vision_folder" if given else f"mm_vision_tower of {folder / 'config.json'}"
        raise FileNotFoundError(
            f"{source}: {error}. Pass vision_folder= with its folder"
        ) from error


def _read_config(folder: Path) -> Json:
    """Parses a folder's ``config.json`` and rejects unsupported kinds."""
    path = folder / "config.json"
    if not path.is_file():
        names = sorted(p.name for p in folder.iterdir())
        adapter = "adapter_config.json" in names
        said = "merge the adapter into its base model" if adapter else "not a model folder"
        raise FileNotFoundError(
            f"{folder} has no config.json: {said}; it holds {', '.join(names[:8]) or 'nothing'}"
        )
    adapter = folder / "adapter_config.json"
    unapplied = "is not applied: merge it into the model, or take it out of the folder"
    if adapter.is_file():  # `transformers` applies it, if it is installed with peft
        raise UserError(f"the adapter of {adapter} {unapplied}")
    for file in sorted(folder.glob("adapter_model.*")):
        warn_once(f"{file} {unapplied}")
    config = read_json_object(path)
    read_fields(config, str(path), {"weights": _WEIGHTS})
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise UserError(f"{path}: quantized weights ({method or quantized!r}) are not supported")
    return config


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads a folder's tokenizer, which gives the ids of the reference programs.

    A ``tokenizer.json`` is used unchanged. In a folder with only a ``tokenizer.model``, that file
    is read with Llama's rules: a begin-of-sequence id first and a blank before the text, unless
    ``tokenizer_config.json`` specifies otherwise. The automatic class of `transformers` 5 does
    neither for a folder of model type "llava". A warning names a tokenizer that appends an end
    token to every text, since prompts leave that token out.
    """
    import transformers  # takes half a second, and weights alone do not need it

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
        ends = end_tokens(tokenizer)  # the first use, which shows some wrong settings
        has_more_blanks = begins_pieces_with_a_blank(tokenizer)
    except (MissingPackageError, FileNotFoundError):
        raise
    except Exception as error:  # the Rust tokenizer raises bare Exceptions
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} could not be read as a tokenizer, with tokenizer_config.json: {reason}"
        ) from error
    if ends:
        text = "".join(tokenizer.convert_ids_to_tokens(ends))
        warn_once(
            f"{path}: the tokenizer appends {text} to every text; prompts and training rows leave "
            "it out, as the model's template has none there"
        )
    if has_more_blanks:
        _LOG.info(
            "%s: text after an image begins with a blank piece, as in LLaVA's own program; the "
            "processors of transformers have no such piece with this tokenizer (legacy: false)",
            path,
        )
    return tokenizer


def _sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """Reads ``tokenizer.model`` as the slow Llama tokenizer of earlier versions did."""
    import tokenizers
    import transformers

    absent = [
        package
        for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google"))
        if importlib.util.find_spec(module) is None
    ]
    if absent:
        raise MissingPackageError(
            f"{folder} has tokenizer.model but no tokenizer.json; reading it needs "
            f"pip install {' '.join(absent)}"
        )
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    switches = {name: bool_rule(name, True) for name in ("legacy", "add_bos_token")}
    legacy, begins = read_fields(config, str(path), switches).values()
    tokenizer = transformers.LlamaTokenizer.from_pretrained(
        folder, legacy=legacy, add_bos_token=begins
    )
    if legacy:
        # A special token that is normalized would get the blank below as well, and match no text.
        normalizers, backend = tokenizers.normalizers, tokenizer.backend_tokenizer
        for token in backend.get_added_tokens_decoder().values():
            if token.normalized:
                flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "special": token.special}
                raw = tokenizers.AddedToken(token.content, normalized=False, **flags)
                (backend.add_special_tokens if token.special else backend.add_tokens)([raw])
        # SentencePiece puts its blank before any text, even one that starts with a blank.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.pre_tokenizer = None
    return tokenizer
