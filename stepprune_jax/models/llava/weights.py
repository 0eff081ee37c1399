"""The name table: one rule per weight, between our tree and the files.

Files come in several dialects (two generations of Hugging Face LLaVA, the original LLaVA-v1.5, a
CLIP folder). Each name is first brought to one canonical form, the names of the published Hugging
Face LLaVA-1.5 files, by its prefix alone; the rules are written in that form once.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from stepprune_jax.models.llava.config import LlavaConfig

_VISION = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_LANGUAGE = "language_model.model."
_HEAD = "language_model.lm_head."

# First match wins, so a longer prefix stands before the shorter one it starts with.
_PREFIXES = (
    ("model.vision_tower.vision_tower.vision_model.", _VISION),  # original LLaVA-v1.5
    ("model.vision_tower.vision_model.", _VISION),
    ("model.vision_tower.", _VISION),
    ("vision_tower.vision_model.", _VISION),
    ("vision_tower.", _VISION),
    ("model.mm_projector.0.", _PROJECTOR + "linear_1."),  # original LLaVA-v1.5
    ("model.mm_projector.2.", _PROJECTOR + "linear_2."),
    ("model.multi_modal_projector.", _PROJECTOR),
    ("multi_modal_projector.", _PROJECTOR),
    ("language_model.lm_head.", _HEAD),
    ("lm_head.", _HEAD),
    ("language_model.model.", _LANGUAGE),
    ("model.language_model.", _LANGUAGE),
    ("model.", _LANGUAGE),  # original LLaVA-v1.5 is a plain Llama file
)

# Buffers that older versions stored with the weights; they are computed here.
_HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".embeddings.position_ids")
# The half of a CLIP checkpoint that is not the image tower.
_CLIP_EXTRAS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")


class Rule(NamedTuple):
    """One weight of ours and where it comes from.

    Attributes:
        path: our path, joined by slashes.
        name: canonical file name; ``{}`` stands for the layer.
        transform: "copy"; "transpose" of a `[out, in]` matrix; "patches": a `[d, 3, p, p]`
            convolution to `[p * p * 3, d]` in (row, column, channel) order.
    """

    path: str
    name: str
    transform: Literal["copy", "transpose", "patches"] = "copy"


class Target(NamedTuple):
    """A weight of ours with the tensors that make it up.

    Attributes:
        path: our path, joined by slashes.
        shape: our shape; with a leading layer axis when stacked.
        names: canonical names, one per layer or a single one.
        tensor_shape: the shape each of those tensors must have in the file.
        transform: as in `Rule`.
        stacked: whether the leading axis counts layers.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    transform: Literal["copy", "transpose", "patches"]
    stacked: bool


def _linear(path: str, name: str, bias: bool) -> tuple[Rule, ...]:
    """Rules of one linear layer."""
    kernel = Rule(f"{path}/kernel", f"{name}.weight", "transpose")
    return (kernel, Rule(f"{path}/bias", f"{name}.bias")) if bias else (kernel,)


def _layer_norm(path: str, name: str) -> tuple[Rule, ...]:
    """Rules of one layer norm with scale and bias."""
    return Rule(f"{path}/scale", f"{name}.weight"), Rule(f"{path}/bias", f"{name}.bias")


def _rules() -> tuple[Rule, ...]:
    """All rules of a LLaVA with an output head of its own."""
    tower, block = _VISION, _VISION + "encoder.layers.{}."
    llama = _LANGUAGE + "layers.{}."
    return (
        Rule("vision/class_embedding", tower + "embeddings.class_embedding"),
        Rule(
            "vision/patch_embedding/kernel", tower + "embeddings.patch_embedding.weight", "patches"
        ),
        Rule("vision/position_embedding", tower + "embeddings.position_embedding.weight"),
        *_layer_norm("vision/pre_norm", tower + "pre_layrnorm"),
        *_layer_norm("vision/layers/norm1", block + "layer_norm1"),
        *_linear("vision/layers/attention/query", block + "self_attn.q_proj", True),
        *_linear("vision/layers/attention/key", block + "self_attn.k_proj", True),
        *_linear("vision/layers/attention/value", block + "self_attn.v_proj", True),
        *_linear("vision/layers/attention/out", block + "self_attn.out_proj", True),
        *_layer_norm("vision/layers/norm2", block + "layer_norm2"),
        *_linear("vision/layers/mlp/up", block + "mlp.fc1", True),
        *_linear("vision/layers/mlp/down", block + "mlp.fc2", True),
        *_layer_norm("vision/post_norm", tower + "post_layernorm"),
        *_linear("projector/up", _PROJECTOR + "linear_1", True),
        *_linear("projector/down", _PROJECTOR + "linear_2", True),
        Rule("language/embed/embedding", _LANGUAGE + "embed_tokens.weight"),
        Rule("language/layers/norm1/scale", llama + "input_layernorm.weight"),
        *_linear("language/layers/attention/query", llama + "self_attn.q_proj", False),
        *_linear("language/layers/attention/key", llama + "self_attn.k_proj", False),
        *_linear("language/layers/attention/value", llama + "self_attn.v_proj", False),
        *_linear("language/layers/attention/out", llama + "self_attn.o_proj", False),
        Rule("language/layers/norm2/scale", llama + "post_attention_layernorm.weight"),
        *_linear("language/layers/mlp/gate", llama + "mlp.gate_proj", False),
        *_linear("language/layers/mlp/up", llama + "mlp.up_proj", False),
        *_linear("language/layers/mlp/down", llama + "mlp.down_proj", False),
        Rule("language/norm/scale", _LANGUAGE + "norm.weight"),
        *_linear("language/head", _HEAD.removesuffix("."), False),
    )


RULES = _rules()


def canonical_name(name: str) -> str:
    """Brings a weight name of any supported dialect to its canonical form.

    Args:
        name: the name in the file.

    Returns:
        The canonical name; a name of no dialect is returned as it is.
    """
    for prefix, canonical in _PREFIXES:
        if name.startswith(prefix):
            return canonical + name[len(prefix) :]
    return name


def canonical_clip_name(name: str) -> str | None:
    """Brings a weight name of a CLIP folder to its canonical form.

    Args:
        name: the name in the file.

    Returns:
        The canonical name; None for the text half of a full CLIP.
    """
    if name.startswith(_CLIP_EXTRAS):
        return None
    return _VISION + name.removeprefix("vision_model.")


def is_vision_name(name: str) -> bool:
    """Whether a canonical name belongs to the image tower."""
    return name.startswith(_VISION)


def is_harmless(name: str, config: LlavaConfig) -> bool:
    """Whether a weight that nothing uses may lie in a file without being an error.

    Args:
        name: its canonical name.
        config: the model; with tied embeddings a stored copy of the head is harmless.

    Returns:
        True for the short list of known extras.
    """
    return name.endswith(_HARMLESS_ENDINGS) or (
        config.text.tie_embeddings and name.startswith(_HEAD)
    )


def flatten(tree: Mapping) -> dict[str, object]:
    """Flattens a nested dict of leaves to paths joined by slashes.

    Args:
        tree: nested dicts.

    Returns:
        Path to leaf, in the tree's own order.
    """
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, object]) -> dict:
    """The inverse of `flatten`.

    Args:
        flat: path to leaf.

    Returns:
        Nested dicts.
    """
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, key = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = leaf
    return tree


def targets(abstract: Mapping[str, object], config: LlavaConfig) -> list[Target]:
    """Lists every weight of a model with the tensors that make it up.

    Args:
        abstract: the model's tree, of anything with a shape.
        config: the model, for the patch size.

    Returns:
        One target per leaf, in the order of the name table.

    Raises:
        ValueError: the tree has a leaf without a rule.
    """
    flat = flatten(abstract)
    found = [_target(rule, flat[rule.path].shape, config) for rule in RULES if rule.path in flat]
    extra = set(flat) - {target.path for target in found}
    if extra:
        raise ValueError(f"no rule in the name table for {', '.join(sorted(extra))}")
    return found


def _target(rule: Rule, shape: tuple[int, ...], config: LlavaConfig) -> Target:
    """Works out the tensors of one weight."""
    stacked = "{}" in rule.name
    names = tuple(rule.name.format(i) for i in range(shape[0])) if stacked else (rule.name,)
    one = shape[1:] if stacked else shape
    if rule.transform == "transpose":
        one = one[::-1]
    elif rule.transform == "patches":
        side = config.vision.patch_size
        one = (one[1], math.prod(one) // (side * side * one[1]), side, side)
    return Target(rule.path, tuple(shape), names, tuple(one), rule.transform, stacked)
