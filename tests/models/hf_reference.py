"""A small random LLaVA of `transformers`, our model loaded from its files, and comparisons."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import load_params
from stepprune_jax.models.llava.config import LlavaConfig

torch.set_num_threads(1)

VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
NUM_PATCHES = 16
IMAGE_ID = 95


class Llava(NamedTuple):
    """The reference model, and our configuration and weights with the same values."""

    torch: transformers.LlavaForConditionalGeneration
    config: LlavaConfig
    params: dict[str, Any]


def randomise(model):
    """Sets all weights, including norms and biases, to random values that influence the result."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        fan = weight[0].numel() if weight.ndim > 1 else 1
        if "norm" in name and name.endswith("weight"):
            weight.data = 1 + 0.2 * noise
        else:
            weight.data = noise * (0.3 if weight.ndim == 1 or "embed" in name else fan**-0.5)
    return model.eval().requires_grad_(False)


def make_llava(folder, vision=None, text=None, **changes):
    """Makes a LLaVA with changes to the fields of `VISION` and `TEXT`."""
    config = transformers.LlavaConfig(
        vision_config=VISION | (vision or {}),
        text_config=TEXT | (text or {}),
        image_token_index=IMAGE_ID,
        **changes,
    )
    model = randomise(transformers.LlavaForConditionalGeneration(config))
    model.set_attn_implementation("eager")  # the only implementation that returns attention weights
    model.save_pretrained(folder)
    source = inspect_folder(folder)
    return Llava(model, source.config, load_params(source, dtype=jnp.float32, progress=False))


def as_torch(array):
    return torch.from_numpy(np.array(array))


def as_numpy(array):
    if isinstance(array, torch.Tensor):
        return array.detach().float().numpy()
    return np.asarray(array, np.float32 if array.dtype == jnp.bfloat16 else None)


def error(ours, reference):
    """Returns the largest difference, relative to the largest magnitude of the reference."""
    ours, reference = as_numpy(ours), as_numpy(reference)
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def assert_close(ours, reference, tolerance=1e-5, what=""):
    difference = error(ours, reference)
    assert difference <= tolerance, f"{what}: {difference:.2e} > {tolerance:.0e}"


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def random_reference(kind, folder):
    """Loads a folder into a torch model, randomises its weights and saves them to the folder."""
    published_config = (folder / "config.json").read_text()
    model = randomise(kind.from_pretrained(folder, attn_implementation="eager"))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(published_config)  # restores the published fields
    return model
