"""Tiny checkpoints for tests, in real layouts with random weights, without torch."""

import json
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.models import vlm
from stepprune_jax.models.config import Json, LlamaConfig, ModelConfig, Tokenizer
from stepprune_jax.models.llava import LLAVA, LlavaConfig
from stepprune_jax.models.llava.config import ClipConfig
from stepprune_jax.models.qwen2_5_vl import QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig

# Words of the vicuna_v1 prompt and small talk; each word and each prefix of it becomes a piece.
_WORDS = (
    "▁A ▁chat ▁between ▁a ▁curious ▁user ▁and ▁an ▁art ificial ▁intelligence ▁assistant . ▁The "
    "▁gives ▁helpful , ▁detailed ▁pol ite ▁answers ▁to ▁the ' s ▁questions ▁US ER : ▁ASS IST ANT "
    "▁What ▁is ▁in ▁this ▁picture ? ▁red ▁dog ▁two ▁yes ▁no"
)
_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def tiny_tokenizer(image_token: bool = True) -> Tokenizer:
    """Builds a small tokenizer with the rules of Llama's, with or without ``<image>``.

    It uses byte-pair encoding with byte fallback, writes blanks as ``▁``, puts one in front of any
    text, and has the begin-of-sequence id 1; ids 0 to 258 are those of Llama.
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


def qwen_tokenizer() -> Tokenizer:
    """Builds a small tokenizer with the rules of Qwen's: bytes, and the template's tokens last."""
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


def llava_encoder(tokenizer: Tokenizer) -> ConversationEncoder:
    """Returns the encoder of LLaVA's conversations with this tokenizer."""
    return ConversationEncoder(tokenizer, LLAVA.place_images, LLAVA.conversation)


def tiny_hf_config(
    vocab_size: int = 512, vision: Json | None = None, text: Json | None = None
) -> Json:
    """Describes a LLaVA small enough to run in milliseconds.

    Args:
        vocab_size: size of the vocabulary; its last id is the image token.
        vision: fields to change in ``vision_config``.
        text: fields to change in ``text_config``.

    Returns:
        A Hugging Face ``config.json`` dict.
    """
    language = LlamaConfig(vocab_size, 48, 96, 2, 4, 2, 12, 1e4, 1e-5, max_positions=256)
    raw = LlavaConfig(ClipConfig(32, 64, 3, 4, 24, 8), language, vocab_size - 1).to_hf("float32")
    del raw["dtype"], raw["text_config"]["head_dim"]  # they follow from weights and width
    raw["vision_config"] |= vision or {}
    raw["text_config"] |= text or {}
    return raw


def tiny_qwen_config(tokenizer: Tokenizer, **changes: object) -> Json:
    """Describes a Qwen2.5-VL small enough to run in milliseconds, as published files do.

    Args:
        tokenizer: tokenizer from `qwen_tokenizer`, whose ids it uses.
        **changes: fields to change.

    Returns:
        A Hugging Face ``config.json`` dict.
    """
    ids = {name.strip("<|>"): tokenizer.convert_tokens_to_ids(name) for name in _QWEN_TOKENS}
    language = LlamaConfig(
        len(tokenizer), 48, 96, 3, 4, 2, 12, 1e6, 1e-6, max_positions=512, rope_sections=(2, 2, 2)
    )
    vision = QwenVisionConfig(32, 52, 3, 2, 4, window_size=16, full_blocks=(0, 2), out_size=48)
    ends = (ids["im_end"], ids["endoftext"])
    raw = QwenConfig(vision, language, ids["image_pad"], eos_token_ids=ends).to_hf("float32")
    del raw["dtype"]
    marks = {f"{name}_token_id": ids[name] for name in ("vision_start", "vision_end")}
    return {**raw, **marks, "video_token_id": ids["video_pad"], **changes}


def tiny_llava(
    folder: str | Path,
    *,
    vision: Json | None = None,
    text: Json | None = None,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
) -> Path:
    """Writes a tiny LLaVA with random weights as a checkpoint folder.

    Args:
        folder: folder to write; created if needed.
        vision: fields to change in the vision config.
        text: fields to change in the text config.
        dtype: dtype of the tensors in the files.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    tokenizer = tiny_tokenizer()
    raw = tiny_hf_config(len(tokenizer), vision, text)
    side = raw["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    tensors = random_tensors(LlavaConfig.from_hf(raw), dtype, seed)
    return _write_folder(folder, raw, processor, tensors, tokenizer)


def tiny_qwen(
    folder: str | Path,
    *,
    min_pixels: int = 256,
    max_pixels: int = 2304,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Writes a tiny Qwen2.5-VL with random weights as a checkpoint folder.

    Args:
        folder: folder to write; created if needed.
        min_pixels: smallest area of a resized image; a token is 64 pixels.
        max_pixels: largest area of a resized image.
        dtype: dtype of the tensors in the files.
        seed: seed of the weights.
        **changes: fields to change in the config.

    Returns:
        The folder.
    """
    tokenizer = qwen_tokenizer()
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
    return _write_folder(folder, raw, processor, tensors, tokenizer)


def random_tensors(
    config: ModelConfig, dtype: DTypeLike = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draws weights under the published names and in the files' axes.

    Norms are near 1; all others have a standard deviation of 0.1.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for target in config.family.weight_targets(vlm.abstract_params(config), config):
        mean = 1.0 if target.path.endswith("scale") else 0.0
        for name in target.names:
            draw = random.standard_normal(target.tensor_shape, np.float32)
            tensors[name] = (mean + 0.1 * draw).astype(dtype)
    return tensors


def write_tensors(folder: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors to the safetensors file of an existing folder."""
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors.write_file(Path(folder) / safetensors.SINGLE_NAME, specs, tensors.values())


def _write_folder(
    folder: str | Path,
    config: Json,
    processor: Json,
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer,
) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tensors(folder, tensors)
    tokenizer.save_pretrained(folder)
    return folder
