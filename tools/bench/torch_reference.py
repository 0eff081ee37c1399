"""Builds a Llama of `transformers` with our weights, the reference of the benchmarks.

The functions import torch and `transformers`, because the package needs neither of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.checkpoints.save import file_tensor
from stepprune_jax.models import vlm, weights
from stepprune_jax.models.llava import Llava, LlavaConfig

CACHES = ("dynamic", "static")


def to_torch(array: Array | np.ndarray, device: str = "cpu") -> Any:
    """Copies an array to a torch tensor of the same dtype, through host memory."""
    import torch

    host = np.array(array)
    if host.dtype == np.dtype("bfloat16"):  # torch cannot read numpy's bfloat16, only its bits.
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(host).to(device)


def build(language: dict[str, Any], config: LlavaConfig, device: str = "cpu") -> Any:
    """Builds a `LlamaForCausalLM` with SDPA attention and a copy of our weights."""
    import torch
    import transformers

    fields = config.to_hf(str(language["norm"]["scale"].dtype))["text_config"]
    hf = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf)
    tensors = _tensors({"language": language}, config, device)
    state = {name.removeprefix("language_model."): tensor for name, tensor in tensors}
    model.load_state_dict(state, strict=True, assign=True)
    # The rotary frequencies are not weights: the meta device left them without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(hf).to(device)
    return model.eval().requires_grad_(False)


def _tensors(params: dict[str, Any], config: LlavaConfig, device: str) -> Iterator[tuple[str, Any]]:
    """Yields the weights as tensors, with their names in Hugging Face checkpoints."""
    flat, backbone = weights.flatten(params), Llava(config)
    for target in backbone.weight_targets(vlm.abstract_params(backbone)):
        if target.path in flat:
            for layer, name in enumerate(target.names):
                yield name, to_torch(file_tensor(target, flat[target.path], layer), device)


def new_cache(model: Any, kind: str, capacity: int) -> Any:
    """Returns an empty cache of `transformers`: "dynamic", or "static" of `capacity` slots."""
    import transformers

    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=capacity)


def wait(device: str) -> None:
    """Waits until a GPU has finished its work."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def prefill(model: Any, embeddings: Any, kind: str, capacity: int) -> tuple[Any, Any]:
    """Runs the model over embeddings [b, s, e]; returns the last logits [b, v] and the cache."""
    import torch

    cache = new_cache(model, kind, capacity)
    with torch.inference_mode():
        # Positional, because transformers 5.24 renamed the argument of the cache.
        output = model(None, None, None, cache, embeddings, use_cache=True, logits_to_keep=1)
    wait(embeddings.device.type)
    return output.logits[:, -1], cache


def decode(model: Any, cache: Any, tokens: Any) -> Any:
    """Decodes with given tokens [t, b], extends the cache, and returns the last logits [b, v]."""
    import torch

    with torch.inference_mode():
        for token in tokens:
            output = model(token[:, None], None, None, cache, use_cache=True)
    wait(tokens.device.type)
    return output.logits[:, -1]


def as_numpy(tensor: Any) -> Float[np.ndarray, "b v"]:
    """Returns logits as a float32 array."""
    return tensor.float().cpu().numpy()


def tokens_on(tokens: Int[np.ndarray, "t b"], device: str) -> Any:
    """Returns token ids as a torch tensor."""
    import torch

    return torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
