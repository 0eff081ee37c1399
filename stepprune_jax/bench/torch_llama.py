"""The language model of `transformers` with our weights, as the contender of the benchmarks.

torch and the models of `transformers` are imported inside the functions: nothing else of the
package needs them.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models import vlm, weights
from stepprune_jax.models.llava.config import LlavaConfig, hf_config
from stepprune_jax.models.llava.weights import weight_targets
from stepprune_jax.models.stack import layout_of

CACHES = ("dynamic", "static")


class Prefilled(NamedTuple):
    """State of the reference after a prompt: its cache and the number of tokens in it."""

    cache: Any
    length: int


def to_torch(array: Array | np.ndarray, device: str = "cpu") -> Any:
    """A torch tensor with the values and dtype of an array, through host memory."""
    import torch

    host = np.array(array)
    if host.dtype == np.dtype("bfloat16"):  # numpy's has no counterpart in torch but its bits
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(host).to(device)


def build(language: dict[str, Any], config: LlavaConfig, device: str = "cpu") -> Any:
    """Makes a `LlamaForCausalLM` with SDPA attention that holds a copy of our weights.

    Args:
        language: the tree under "language" of our parameters.
        config: the model's shape.
        device: torch device, "cpu" or "cuda".

    Returns:
        The torch model, in evaluation mode, in the dtype of the weights.
    """
    import torch
    import transformers

    fields = hf_config(config, str(language["norm"]["scale"].dtype))["text_config"]
    hf = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf)
    flat = weights.flatten({"language": language})
    abstract = vlm.abstract_params(config, layers=layout_of({"language": language}))
    state = {}
    for target in weight_targets(abstract, config):
        if target.path not in flat:
            continue
        leaf = flat[target.path]
        for layer, name in enumerate(target.names):
            tensor = to_torch(leaf[layer] if target.stacked else leaf, device)
            tensor = tensor.T.contiguous() if target.transform == "transpose" else tensor
            state[name.removeprefix("language_model.")] = tensor
    model.load_state_dict(state, strict=True, assign=True)
    # The rotary frequencies are no weights: the meta device left them without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(hf).to(device)
    return model.eval().requires_grad_(False)


def new_cache(model: Any, kind: str, capacity: int) -> Any:
    """An empty cache of `transformers`: "dynamic" grows, "static" has `capacity` slots."""
    import transformers

    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=capacity)


def wait(device: str) -> None:
    """Waits until a GPU has done what it was given."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def prefill(model: Any, embeddings: Any, kind: str, capacity: int) -> tuple[Any, Any]:
    """Runs the model over embeddings [b, s, e]; returns the last logits [b, v] and the cache."""
    import torch

    with torch.inference_mode():
        output = model(
            inputs_embeds=embeddings,
            past_key_values=new_cache(model, kind, capacity),
            use_cache=True,
            logits_to_keep=1,
        )
    wait(embeddings.device.type)
    return output.logits[:, -1], output.past_key_values


def decode(model: Any, cache: Any, tokens: Any) -> Any:
    """Reads tokens [t, b] one by one and returns the last logits [b, v]; extends the cache."""
    import torch

    with torch.inference_mode():
        for token in tokens:
            output = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
    wait(tokens.device.type)
    return output.logits[:, -1]


def fresh(cache: Any) -> Any:
    """A copy of a cache, so that a run starts where the one before started."""
    return copy.deepcopy(cache)


def as_numpy(tensor: Any) -> Float[np.ndarray, "b v"]:
    """Logits as a float32 array."""
    return tensor.float().cpu().numpy()


def tokens_on(tokens: Int[np.ndarray, "t b"], device: str) -> Any:
    """Token ids as a torch tensor."""
    import torch

    return torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
