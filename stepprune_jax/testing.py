"""Tiny checkpoints for tests, in real layouts with random weights, without torch."""

import json
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json, LlamaConfig, Tokenizer
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.llava.config import ClipConfig

# Words of the vicuna_v1 prompt and small talk; each word and each prefix of it becomes a piece.
_WORDS = (
    "▁A ▁chat ▁between ▁a ▁curious ▁user ▁and ▁an ▁art ificial ▁intelligence ▁assistant . ▁The "
    "▁gives ▁helpful , ▁detailed ▁pol ite ▁answers ▁to ▁the ' s ▁questions ▁US ER : ▁ASS IST ANT "
    "▁What ▁is ▁in ▁this ▁picture ? ▁red ▁dog ▁two ▁yes ▁no"
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


def llava_encoder(tokenizer: Tokenizer) -> ConversationEncoder:
    """Returns the encoder of LLaVA's conversations with this tokenizer."""
    return ConversationEncoder(tokenizer, Llava.place_images, Llava.conversation)


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
    tensors = random_tensors(Llava.read(raw, None), dtype, seed)
    return write_folder(folder, raw, processor, tensors, tokenizer)


def random_tensors(
    backbone: Backbone, dtype: DTypeLike = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draws weights under the published names and in the files' axes.

    Norms are near 1; all others have a standard deviation of 0.1.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for target in backbone.weight_targets(vlm.abstract_params(backbone)):
        mean = 1.0 if target.path.endswith("scale") else 0.0
        for name in target.names:
            draw = random.standard_normal(target.tensor_shape, np.float32)
            tensors[name] = (mean + 0.1 * draw).astype(dtype)
    return tensors


def write_tensors(folder: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors to the safetensors file of an existing folder."""
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors.write_file(Path(folder) / safetensors.SINGLE_NAME, specs, tensors.values())


def write_folder(
    folder: str | Path,
    config: Json,
    processor: Json,
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer,
) -> Path:
    """Writes a checkpoint folder, created if needed, and returns it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tensors(folder, tensors)
    tokenizer.save_pretrained(folder)
    return folder
