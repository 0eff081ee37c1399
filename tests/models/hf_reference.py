"""A small random LLaVA of `transformers`, our model loaded from its files, and comparisons."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import VLM, load_params, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
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


class Pair(NamedTuple):
    """A model of `transformers`, and our model loaded from its checkpoint folder."""

    torch: Any
    folder: Path
    model: VLM


def make_pair(kind, folder):
    """Gives the model of a folder random weights, and loads it in both implementations."""
    model = random_reference(kind, folder)
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False))


def qwen_inputs(pair, ids, processed=None, numbers=()):
    """Returns the inputs of a torch Qwen for a prompt.

    Args:
        pair: both models.
        ids: ids of the prompt, with one image id for each visual token.
        processed: output of the reference's image processor.
        numbers: indices of the prompt's images in `processed`.
    """
    ids = torch.tensor([ids])
    is_image = (ids == pair.model.config.image_token_id).int()
    inputs = {"input_ids": ids, "mm_token_type_ids": is_image}
    if numbers:
        grid = processed["image_grid_thw"]
        image_pixels = processed["pixel_values"].split(grid.prod(1).tolist())
        inputs["image_grid_thw"] = grid[list(numbers)]
        inputs["pixel_values"] = torch.cat([image_pixels[number] for number in numbers])
    pair.torch.model.rope_deltas = None
    return inputs


def assert_patches_equal(values, processed):
    """Asserts that normalized patches of a Qwen equal the reference's, and are padded by zeros."""
    counts = processed["image_grid_thw"].numpy().prod(1)
    expected_patches = np.split(processed["pixel_values"].numpy(), np.cumsum(counts)[:-1])
    for patches, expected in zip(values, expected_patches, strict=True):
        frames = expected.reshape(len(expected), 3, 2, 16)
        for frame in range(2):
            frame_values = patches[: len(expected)].reshape(-1, 3, 16)
            np.testing.assert_array_equal(frame_values, frames[:, :, frame])
        assert not patches[len(expected) :].any()


def assert_taps_equal(tapped, block_of_keys, row, expected):
    """Asserts that the taps of an image equal received attention, keys and hidden states."""
    received, keys, hidden = expected
    count = len(received)
    assert_close(tapped["received.-1"][row, :count], received[:, 0])
    assert_close(tapped[f"keys.{block_of_keys}"][row, :count], keys)
    assert_close(tapped["hidden.-1"][row, :count], hidden)
    assert not tapped["received.-1"][row, count:].any()


def save_and_reload(model, folder):
    """Saves a model, and asserts that the reloaded model equals it, except for the weights."""
    save_vlm(model, folder)
    reloaded = load_vlm(folder, dtype=jnp.float32, progress=False)
    assert reloaded.backbone == model.backbone
    assert reloaded.image_settings == model.image_settings
    return reloaded
