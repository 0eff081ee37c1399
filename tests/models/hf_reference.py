"""Small random torch models of `transformers`, their weights as our tree, and comparisons.

The mapping is written out here on purpose, independent of the package's loader.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from stepprune_jax.models.llava.config import ClipConfig, LlamaConfig, LlavaConfig

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


def randomise(model, seed=0):
    """Gives every weight, norms and biases too, values that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        fan = weight[0].numel() if weight.ndim > 1 else 1
        if "norm" in name and name.endswith("weight"):
            weight.data = 1 + 0.2 * noise
        else:
            weight.data = noise * (0.3 if weight.ndim == 1 or "embed" in name else fan**-0.5)
    return model.eval().requires_grad_(False)


def arrays(model):
    return {name: w.detach().float().numpy() for name, w in model.named_parameters()}


def stack(weights, pattern, num_layers, transform=lambda w: w):
    return np.stack([transform(weights[pattern.format(i)]) for i in range(num_layers)])


def vision_tree(weights, prefix, num_layers):
    def dense(name):
        at = prefix + "encoder.layers.{}." + name
        return {
            "kernel": stack(weights, at + ".weight", num_layers, np.transpose),
            "bias": stack(weights, at + ".bias", num_layers),
        }

    def norm(name):
        at = prefix + "encoder.layers.{}." + name
        return {
            "scale": stack(weights, at + ".weight", num_layers),
            "bias": stack(weights, at + ".bias", num_layers),
        }

    def single(name):
        return {
            "scale": weights[prefix + name + ".weight"],
            "bias": weights[prefix + name + ".bias"],
        }

    kernel = weights[prefix + "embeddings.patch_embedding.weight"]
    return {
        "class_embedding": weights[prefix + "embeddings.class_embedding"],
        "patch_embedding": {"kernel": kernel.transpose(2, 3, 1, 0).reshape(-1, kernel.shape[0])},
        "position_embedding": weights[prefix + "embeddings.position_embedding.weight"],
        "pre_norm": single("pre_layrnorm"),
        "post_norm": single("post_layernorm"),
        "layers": {
            "attention": {
                "query": dense("self_attn.q_proj"),
                "key": dense("self_attn.k_proj"),
                "value": dense("self_attn.v_proj"),
                "out": dense("self_attn.out_proj"),
            },
            "norm1": norm("layer_norm1"),
            "norm2": norm("layer_norm2"),
            "mlp": {"up": dense("mlp.fc1"), "down": dense("mlp.fc2")},
        },
    }


def language_tree(weights, prefix, num_layers):
    def dense(name):
        at = prefix + "layers.{}." + name + ".weight"
        return {"kernel": stack(weights, at, num_layers, np.transpose)}

    def norm(name):
        return {"scale": stack(weights, prefix + "layers.{}." + name + ".weight", num_layers)}

    tree = {
        "embed": {"embedding": weights[prefix + "embed_tokens.weight"]},
        "norm": {"scale": weights[prefix + "norm.weight"]},
        "layers": {
            "attention": {
                "query": dense("self_attn.q_proj"),
                "key": dense("self_attn.k_proj"),
                "value": dense("self_attn.v_proj"),
                "out": dense("self_attn.o_proj"),
            },
            "norm1": norm("input_layernorm"),
            "norm2": norm("post_attention_layernorm"),
            "mlp": {name: dense(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        },
    }
    if "lm_head.weight" in weights:
        tree["head"] = {"kernel": weights["lm_head.weight"].T}
    return tree


def clip_pair(seed=0, **changes):
    """(torch model, our config, our weights) of a tiny tower."""
    fields = {**VISION, **changes}
    config = transformers.CLIPVisionConfig(**fields)
    config._attn_implementation = "eager"
    model = randomise(transformers.CLIPVisionModel(config), seed)
    weights = {name.removeprefix("vision_model."): w for name, w in arrays(model).items()}
    params = vision_tree(weights, "", fields["num_hidden_layers"])
    return model, ClipConfig.from_hf(fields), jax.device_put(params)


def llama_pair(seed=0, **changes):
    """(torch model, our config, our weights) of a tiny Llama."""
    fields = {**TEXT, **changes}
    config = transformers.LlamaConfig(**fields)
    config._attn_implementation = "eager"
    model = randomise(transformers.LlamaForCausalLM(config), seed)
    tree = language_tree(arrays(model), "model.", fields["num_hidden_layers"])
    return model, LlamaConfig.from_hf(fields), jax.device_put(tree)


def llava_pair(**changes):
    """(torch model, our config, our weights) of a tiny LLaVA."""
    fields = {
        "vision_config": VISION,
        "text_config": TEXT,
        "image_token_index": IMAGE_ID,
        **changes,
    }
    config = transformers.LlavaConfig(**fields, attn_implementation="eager")
    model = randomise(transformers.LlavaForConditionalGeneration(config))
    model.set_attn_implementation("eager")
    weights = arrays(model)
    vision_prefix = "model.vision_tower."
    if any(name.startswith(vision_prefix + "vision_model.") for name in weights):
        vision_prefix += "vision_model."
    ours = LlavaConfig.from_hf({"model_type": "llava", **fields})
    projector = {
        our: {
            "kernel": weights[f"model.multi_modal_projector.{theirs}.weight"].T,
            "bias": weights[f"model.multi_modal_projector.{theirs}.bias"],
        }
        for our, theirs in (("up", "linear_1"), ("down", "linear_2"))
    }
    tree = {
        "vision": vision_tree(weights, vision_prefix, ours.vision.num_layers),
        "projector": projector,
        "language": language_tree(weights, "model.language_model.", ours.text.num_layers),
    }
    return model, ours, jax.device_put(tree)


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
