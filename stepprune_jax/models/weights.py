"""Trees of weights by path, and rules that map tensors of a checkpoint to their leaves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Transform = Literal["copy", "transpose", "patches"]
# Matrices that multiply the same rows. `join_kernels` joins each group into one matrix, which
# `layers.joined_dense` multiplies by.
_JOINED = (("query", "key", "value"), ("gate", "up"))


class WeightRule(NamedTuple):
    """Mapping from a tensor of a checkpoint to a weight, or from one tensor per layer.

    Attributes:
        path: path of the weight in the tree of weights, joined by slashes.
        name: canonical name of the tensor, with ``{}`` for the layer if there is one per layer.
        transform: "copy"; "transpose" of an [out, in] matrix; or "patches", which maps a
            convolution without overlap, [d, channels, *window], to [window * channels, d] with
            channels fastest.
        window: sides of the convolution's window, for "patches".
    """

    path: str
    name: str
    transform: Transform = "copy"
    window: tuple[int, ...] = ()


class WeightTarget(NamedTuple):
    """A weight with the tensors that it is loaded from.

    `list_targets` creates targets from rules; loading and saving read them.

    Attributes:
        path: path of the weight in the tree of weights, joined by slashes.
        shape: shape of the weight.
        names: canonical names of the tensors: one, or one per layer if the weight is stacked.
        tensor_shape: shape of each tensor in the file.
        transform: see `WeightRule`.
        is_stacked: whether the weight has a leading axis of layers.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    transform: Transform
    is_stacked: bool


def linear_rules(path: str, name: str, has_bias: bool) -> tuple[WeightRule, ...]:
    """Returns the rules of a linear layer: its kernel, and its bias if it has one."""
    kernel = WeightRule(f"{path}/kernel", f"{name}.weight", "transpose")
    return (kernel, WeightRule(f"{path}/bias", f"{name}.bias")) if has_bias else (kernel,)


def norm_rules(path: str, name: str) -> tuple[WeightRule, ...]:
    """Returns the rules of a layer norm: its scale and its bias."""
    return WeightRule(f"{path}/scale", f"{name}.weight"), WeightRule(f"{path}/bias", f"{name}.bias")


def language_rules(prefix: str, head: str, qkv_bias: bool) -> tuple[WeightRule, ...]:
    """Returns the rules of a language model whose tensors have Llama's names.

    Args:
        prefix: prefix of all names except the output head's, such as "model.".
        head: name of the output head.
        qkv_bias: whether the projections to queries, keys and values have biases.

    Returns:
        Rules for all weights that any language model has. `list_targets` ignores rules of weights
        that a model does not have.
    """
    layer, path = prefix + "layers.{}.", "language/layers"
    return (
        WeightRule("language/embed/embedding", prefix + "embed_tokens.weight"),
        WeightRule(f"{path}/norm1/scale", layer + "input_layernorm.weight"),
        *linear_rules(f"{path}/attention/query", layer + "self_attn.q_proj", qkv_bias),
        *linear_rules(f"{path}/attention/key", layer + "self_attn.k_proj", qkv_bias),
        *linear_rules(f"{path}/attention/value", layer + "self_attn.v_proj", qkv_bias),
        *linear_rules(f"{path}/attention/out", layer + "self_attn.o_proj", False),
        WeightRule(f"{path}/attention/query_norm/scale", layer + "self_attn.q_norm.weight"),
        WeightRule(f"{path}/attention/key_norm/scale", layer + "self_attn.k_norm.weight"),
        WeightRule(f"{path}/norm2/scale", layer + "post_attention_layernorm.weight"),
        *linear_rules(f"{path}/mlp/gate", layer + "mlp.gate_proj", False),
        *linear_rules(f"{path}/mlp/up", layer + "mlp.up_proj", False),
        *linear_rules(f"{path}/mlp/down", layer + "mlp.down_proj", False),
        WeightRule("language/norm/scale", prefix + "norm.weight"),
        *linear_rules("language/head", head, False),
    )


def replace_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Replaces the first matching prefix of a name.

    Args:
        name: the name.
        prefixes: pairs (prefix, replacement). A longer prefix must precede a shorter prefix that it
            starts with.

    Returns:
        The new name; the unchanged name if no prefix matches.
    """
    for prefix, replacement in prefixes:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


def flatten(tree: Mapping) -> dict[str, Any]:
    """Flattens a nested dict to leaves by path, joined by slashes, in the order of the dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, object]) -> dict:
    """Builds the nested dict of leaves by path; the inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, key = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = leaf
    return tree


def list_targets(abstract: Mapping, rules: Sequence[WeightRule]) -> list[WeightTarget]:
    """Lists every weight of a model with the tensors that it is loaded from.

    Args:
        abstract: tree of the weights' shapes; every leaf must have a rule.
        rules: rules for the weights. Rules of weights that the model does not have are ignored.

    Returns:
        The targets, in the order of the rules.
    """
    flat = flatten(abstract)
    listed = [_make_target(rule, flat[rule.path].shape) for rule in rules if rule.path in flat]
    assert len(listed) == len(flat), "a leaf without a rule"
    return listed


def _make_target(rule: WeightRule, shape: tuple[int, ...]) -> WeightTarget:
    is_stacked = "{}" in rule.name
    names = tuple(rule.name.format(i) for i in range(shape[0])) if is_stacked else (rule.name,)
    tensor_shape = shape[1:] if is_stacked else shape
    if rule.transform == "transpose":
        tensor_shape = tensor_shape[::-1]
    elif rule.transform == "patches":
        values, width = tensor_shape
        tensor_shape = (width, values // math.prod(rule.window), *rule.window)
    return WeightTarget(
        rule.path, tuple(shape), names, tuple(tensor_shape), rule.transform, is_stacked
    )


def join_kernels(params: dict[str, Any]) -> dict[str, Any]:
    """Joins matrices that multiply the same rows, and their biases, along the last axis.

    A GPU then runs one kernel instead of two or three.

    Args:
        params: nested dicts of weights. Joined matrices are removed from these dicts, so that they
            are not in memory twice.

    Returns:
        The weights, with a joined layer such as "query_key_value" in place of each group.
    """
    joined = {
        name: join_kernels(part) if isinstance(part, dict) else part
        for name, part in params.items()
    }
    for names in _JOINED:
        if all(isinstance(joined.get(name), dict) for name in names):
            for name in names:
                params.pop(name)
            layers = [joined.pop(name) for name in names]
            joined["_".join(names)] = {
                leaf: jax.tree.map(
                    lambda *arrays: jnp.concatenate(arrays, axis=-1),
                    *(layer.pop(leaf) for layer in layers),
                )
                for leaf in list(layers[0])
            }
    return joined


def separate_kernels(params: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Splits the matrices that `join_kernels` joined.

    Args:
        params: weights with or without joined matrices.
        like: weights or shapes of the model without joined matrices, for names and widths.

    Returns:
        The weights without joined matrices.
    """
    separated, groups = {}, {"_".join(names): names for names in _JOINED}
    for name, part in params.items():
        if name in groups:
            start = 0
            for layer in groups[name]:
                stop = start + like[layer]["kernel"].shape[-1]
                separated[layer] = {leaf: array[..., start:stop] for leaf, array in part.items()}
                start = stop
        elif isinstance(part, dict) and isinstance(like.get(name), dict):
            separated[name] = separate_kernels(part, like[name])
        else:
            separated[name] = part
    return separated
