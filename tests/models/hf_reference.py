"""A small random LLaVA of `transformers`, ours on the folder that it writes, and comparisons."""

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
    """The reference and ours, with the same weights."""

    torch: transformers.LlavaForConditionalGeneration
    config: LlavaConfig
    params: dict[str, Any]


def randomise(model):
    """Gives every weight, norms and biases too, values that matter."""
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
    """A LLaVA whose parts differ in some fields from `VISION` and `TEXT`."""
    config = transformers.LlavaConfig(
        vision_config=VISION | (vision or {}),
        text_config=TEXT | (text or {}),
        image_token_index=IMAGE_ID,
        **changes,
    )
    model = randomise(transformers.LlavaForConditionalGeneration(config))
    model.set_attn_implementation("eager")  # which returns its weights
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
    """Largest difference, relative to the largest magnitude of the reference."""
    ours, reference = as_numpy(ours), as_numpy(reference)
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def assert_close(ours, reference, tolerance=1e-5, what=""):
    found = error(ours, reference)
    assert found <= tolerance, f"{what}: {found:.2e} > {tolerance:.0e}"


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def random_reference(kind, folder):
    """A torch model of a folder with random weights, which are written to it."""
    published = (folder / "config.json").read_text()
    model = randomise(kind.from_pretrained(folder, attn_implementation="eager"))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(published)  # not as this version writes it
    return model
