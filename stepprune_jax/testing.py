"""Writes tiny checkpoints with random weights for tests, in real layouts and without torch."""

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

# Words of the vicuna_v1 prompt and of short questions. Each word and each of its prefixes becomes a
# token.
_WORDS = (
    "▁A ▁chat ▁between ▁a ▁curious ▁user ▁and ▁an ▁art ificial ▁intelligence ▁assistant . ▁The "
    "▁gives ▁helpful , ▁detailed ▁pol ite ▁answers ▁to ▁the ' s ▁questions ▁US ER : ▁ASS IST ANT "
    "▁What ▁is ▁in ▁this ▁picture ? ▁red ▁dog ▁two ▁yes ▁no"
)


def tiny_tokenizer(image_token: bool = True) -> Tokenizer:
    """Builds a small tokenizer with the rules of Llama's tokenizer.

    It uses byte-pair encoding with byte fallback, writes blanks as ``▁``, and puts a blank before
    every text. Ids 0 to 258 equal Llama's; the begin-of-sequence id is 1.

    Args:
        image_token: whether the vocabulary contains the special token ``<image>``.

    Returns:
        A fast tokenizer of `transformers`.
    """
    import tokenizers
    import transformers

    words = _WORDS.split()
    characters = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = []  # pairs of tokens that are joined, one pair for each prefix of a word
    for word in words:
        for length in range(2, len(word) + 1):
            prefix = word[:length]
            if prefix not in vocabulary:
                vocabulary[prefix] = len(vocabulary)
                merges.append((prefix[:-1], prefix[-1]))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
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
    """Returns an encoder of conversations in LLaVA's prompt template."""
    return ConversationEncoder(tokenizer, Llava.place_images, Llava.conversation)


def tiny_hf_config(
    vocab_size: int = 512, vision: Json | None = None, text: Json | None = None
) -> Json:
    """Returns the configuration of a LLaVA that runs in milliseconds.

    Args:
        vocab_size: size of the vocabulary; its last id is the image token.
        vision: fields to change in ``vision_config``.
        text: fields to change in ``text_config``.

    Returns:
        The contents of a Hugging Face ``config.json``.
    """
    language = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        max_positions=256,
    )
    tower = ClipConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        image_size=24,
        patch_size=8,
    )
    hf_config = LlavaConfig(tower, language, vocab_size - 1).to_hf("float32")
    # Without these fields, readers derive them from the weights' dtype and the width, which callers
    # may change.
    del hf_config["dtype"], hf_config["text_config"]["head_dim"]
    hf_config["vision_config"] |= vision or {}
    hf_config["text_config"] |= text or {}
    return hf_config


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
    hf_config = tiny_hf_config(len(tokenizer), vision, text)
    image_size = hf_config["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": image_size},
        "crop_size": {"height": image_size, "width": image_size},
    }
    tensors = random_tensors(Llava.read(hf_config, None), dtype, seed)
    return write_folder(folder, hf_config, processor, tensors, tokenizer)


def random_tensors(
    backbone: Backbone, dtype: DTypeLike = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Returns normally distributed weights in the layout of the family's published files.

    The standard deviation is 0.1. Scales of norms have a mean of 1, all other weights of 0.

    Args:
        backbone: the model.
        dtype: dtype of the tensors.
        seed: seed of the weights.

    Returns:
        Tensors by their published names.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for target in backbone.weight_targets(vlm.abstract_params(backbone)):
        mean = 1.0 if target.path.endswith("scale") else 0.0
        for name in target.names:
            noise = rng.standard_normal(target.tensor_shape, np.float32)
            tensors[name] = (mean + 0.1 * noise).astype(dtype)
    return tensors


def write_tensors(folder: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors to the file `model.safetensors` of an existing folder."""
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors.write_file(Path(folder) / safetensors.SINGLE_NAME, specs, tensors.values())


def write_folder(
    folder: str | Path,
    config: Json,
    processor: Json,
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer,
) -> Path:
    """Writes a checkpoint folder.

    Args:
        folder: folder to write; created if needed.
        config: contents of `config.json`.
        processor: contents of `preprocessor_config.json`.
        tensors: weights by published name.
        tokenizer: a `transformers` tokenizer.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tensors(folder, tensors)
    tokenizer.save_pretrained(folder)
    return folder
