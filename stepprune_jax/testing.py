"""Tiny checkpoints for tests, in real layouts with random weights, without torch."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.models import llava, vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.weights import is_vision_name
from stepprune_jax.models.qwen2_5_vl.config import QwenConfig

Layout = Literal["hf", "hf_new", "original"]

# Words of the vicuna_v1 prompt and small talk; each word and each prefix of it becomes a piece.
_WORDS = (
    "▁A ▁chat ▁between ▁a ▁curious ▁user ▁and ▁an ▁art ificial ▁intelligence ▁assistant . ▁The "
    "▁gives ▁helpful , ▁detailed ▁pol ite ▁answers ▁to ▁the ' s ▁questions ▁US ER : ▁ASS IST ANT "
    "▁What ▁is ▁in ▁this ▁picture ? ▁red ▁dog ▁two ▁yes ▁no"
)


def tiny_tokenizer(image_token: bool = True) -> Any:
    """Builds a small tokenizer with the rules of Llama's.

    It uses byte-pair encoding with byte fallback, writes blanks as ``▁``, puts one in front of any
    text, and has the begin-of-sequence id 1; ids 0 to 258 are those of Llama.

    Args:
        image_token: whether it knows ``<image>``, as the Hugging Face layout's does.

    Returns:
        A `transformers` tokenizer.
    """
    import tokenizers
    import transformers

    words = _WORDS.split()
    characters = sorted({c for word in words for c in word} | set("abcdefghijklmnopqrstuvwxyz"))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    norm, decode = tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    backend.decoder = decode.Sequence(
        [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if image_token:
        tokenizer.add_tokens(["<image>"], special_tokens=True)
    return tokenizer


def llava_encoder(tokenizer: Any) -> ConversationEncoder:
    """Returns the encoder of LLaVA's conversations with this tokenizer."""
    return ConversationEncoder(tokenizer, llava.place_images, llava.conversation)


def tiny_hf_config(
    vocab_size: int = 512, vision: dict | None = None, text: dict | None = None
) -> dict[str, Any]:
    """Describes a LLaVA small enough to run in milliseconds.

    Args:
        vocab_size: size of the vocabulary; its last id is the image token.
        vision: fields to change in ``vision_config``.
        text: fields to change in ``text_config``.

    Returns:
        A Hugging Face ``config.json`` dict.
    """
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": vocab_size - 1,
        "image_seq_length": 9,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 24,
            "patch_size": 8,
            **(vision or {}),
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            **(text or {}),
        },
    }


def tiny_llava(
    folder: str | Path,
    layout: Layout = "hf",
    *,
    vision: dict | None = None,
    text: dict | None = None,
    dtype: Any = np.float32,
    max_shard_bytes: int = 1 << 30,
    seed: int = 0,
) -> Path:
    """Writes a tiny LLaVA with random weights as a checkpoint folder.

    Args:
        folder: folder to write; created if needed.
        layout: "hf" with the published names, "hf_new" with the names of newer `transformers`,
            "original" for LLaVA-v1.5 with a CLIP folder ``clip`` inside.
        vision: fields to change in the vision config.
        text: fields to change in the text config.
        dtype: dtype of the tensors in the files.
        max_shard_bytes: above this many bytes the weights are split over several files.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(image_token=layout != "original")
    raw = tiny_hf_config(len(tokenizer), vision, text)
    tokenizer.save_pretrained(folder)
    side = raw["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    config = LlavaConfig.from_hf(raw)
    tensors = random_tensors(config, dtype, seed)
    if layout == "original":
        clip = folder / "clip"
        clip.mkdir(exist_ok=True)
        _write_json(
            clip / "config.json", {"model_type": "clip", "vision_config": raw["vision_config"]}
        )
        _write_json(clip / "preprocessor_config.json", processor)
        tower = {k: v for k, v in tensors.items() if is_vision_name(k)}
        write_tensors(clip, {k.removeprefix("vision_tower."): v for k, v in tower.items()}, 1 << 30)
        tensors = {_original_name(k): v for k, v in tensors.items() if k not in tower}
        raw = {**raw["text_config"], **_ORIGINAL_FIELDS}
    elif layout == "hf_new":
        tensors = {_new_name(name): tensor for name, tensor in tensors.items()}
    if layout != "original":
        _write_json(folder / "preprocessor_config.json", processor)
    _write_json(folder / "config.json", raw)
    write_tensors(folder, tensors, max_shard_bytes)
    return folder


_ORIGINAL_FIELDS = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava_llama",
    "mm_vision_tower": "clip",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "image_aspect_ratio": "pad",
}


def qwen_tokenizer() -> Any:
    """Builds a small tokenizer with the rules of Qwen's.

    It uses byte-level byte-pair encoding without a begin-of-sequence token; the template's tokens
    are the last ones.

    Returns:
        A `transformers` tokenizer.
    """
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_TOKENS)})
    return tokenizer


_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def tiny_qwen_config(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """Describes a Qwen2.5-VL small enough to run in milliseconds.

    Args:
        tokenizer: tokenizer from `qwen_tokenizer`, whose ids it uses.
        **changes: fields to change.

    Returns:
        A Hugging Face ``config.json`` dict, in the form of the published files.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _QWEN_TOKENS}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "hidden_act": "silu",
            "intermediate_size": 52,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 48,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [0, 2],
        },
        **changes,
    }


def tiny_qwen(
    folder: str | Path,
    *,
    new_names: bool = False,
    min_pixels: int = 256,
    max_pixels: int = 2304,
    dtype: Any = np.float32,
    max_shard_bytes: int = 1 << 30,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Writes a tiny Qwen2.5-VL with random weights as a checkpoint folder.

    Args:
        folder: folder to write; created if needed.
        new_names: whether weights have the names of newer `transformers`.
        min_pixels: smallest area of a resized image; a token is 64 pixels.
        max_pixels: largest area of a resized image.
        dtype: dtype of the tensors in the files.
        max_shard_bytes: above this many bytes the weights are split over several files.
        seed: seed of the weights.
        **changes: fields to change in the config.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(folder)
    raw = tiny_qwen_config(tokenizer, **changes)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "patch_size": raw["vision_config"]["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    tensors = random_tensors(QwenConfig.from_hf(raw), dtype, seed)
    if new_names:
        tensors = {_new_qwen_name(name): tensor for name, tensor in tensors.items()}
    _write_json(folder / "preprocessor_config.json", processor)
    _write_json(folder / "config.json", raw)
    write_tensors(folder, tensors, max_shard_bytes)
    return folder


def _new_qwen_name(name: str) -> str:
    """Maps a published weight name to that of newer versions of `transformers`."""
    if name.startswith("model."):
        return "model.language_model." + name.removeprefix("model.")
    return "model." + name if name.startswith("visual.") else name


def random_tensors(
    config: ModelConfig, dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draws weights under the published Hugging Face names and in the files' axes.

    Args:
        config: configuration of the model.
        dtype: dtype of the tensors.
        seed: seed of the draw.

    Returns:
        A dict from name to tensor; norms are near 1, all others have a standard deviation of 0.1.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for target in config.family.weight_targets(vlm.abstract_params(config), config):
        mean = 1.0 if target.path.endswith("scale") else 0.0
        for name in target.names:
            draw = random.standard_normal(target.tensor_shape, np.float32)
            tensors[name] = (mean + 0.1 * draw).astype(dtype)
    return tensors


def write_tensors(
    folder: str | Path, tensors: dict[str, np.ndarray], max_shard_bytes: int = 1 << 30
) -> None:
    """Writes tensors as one safetensors file, or as shards with an index.

    Args:
        folder: existing folder to write to.
        tensors: arrays by name.
        max_shard_bytes: above this many bytes the tensors are split.
    """
    folder = Path(folder)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = safetensors.plan_shards(sizes, max_shard_bytes)
    for file, members in shards:
        specs = {name: (tensors[name].dtype, tensors[name].shape) for name in members}
        safetensors.write_file(folder / file, specs, (tensors[name] for name in members))
    if len(shards) > 1:
        safetensors.write_index(folder, shards, sum(sizes.values()))


def _new_name(name: str) -> str:
    """Maps a published weight name to that of newer versions of `transformers`."""
    name = name.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "language_model.")
    name = name.replace("vision_tower.vision_model.", "vision_tower.")
    return name if name.startswith("lm_head") else f"model.{name}"


def _original_name(name: str) -> str:
    """Maps a published weight name to that of the original LLaVA-v1.5."""
    name = name.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "model.")
    name = name.replace("multi_modal_projector.linear_1", "model.mm_projector.0")
    return name.replace("multi_modal_projector.linear_2", "model.mm_projector.2")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")
