"""Trees of weights by path, and rules that map tensors of a checkpoint to their leaves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Transform = Literal["copy", "transpose", "patches"]
# Matrices that multiply the same rows: `join` makes one of them, `layers.side_by_side` uses it.
_JOINED = (("query", "key", "value"), ("gate", "up"))


class WeightRule(NamedTuple):
    """A weight's path (ours, joined by slashes) and its canonical name, with ``{}`` for the layer.

    Transforms: "copy"; "transpose" of an `[out, in]` matrix; "patches", a convolution without
    overlap `[d, channels, *window]` to `[window * channels, d]`, channels fastest.
    """

    path: str
    name: str
    transform: Transform = "copy"
    window: tuple[int, ...] = ()


class WeightTarget(NamedTuple):
    """A weight with the tensors that make it up: one, or one for each layer if `stacked`.

    `tensor_shape` is that of each of these tensors in the file.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    transform: Transform
    stacked: bool


def linear(path: str, name: str, bias: bool) -> tuple[WeightRule, ...]:
    """Returns the rules of one linear layer: its kernel, and its bias if it has one."""
    kernel = WeightRule(f"{path}/kernel", f"{name}.weight", "transpose")
    return (kernel, WeightRule(f"{path}/bias", f"{name}.bias")) if bias else (kernel,)


def language_rules(model: str, head: str, qkv_bias: bool) -> tuple[WeightRule, ...]:
    """Returns the rules of a language model with Llama's names behind a prefix such as "model."."""
    layer, ours = model + "layers.{}.", "language/layers"
    return (
        WeightRule("language/embed/embedding", model + "embed_tokens.weight"),
        WeightRule(f"{ours}/norm1/scale", layer + "input_layernorm.weight"),
        *linear(f"{ours}/attention/query", layer + "self_attn.q_proj", qkv_bias),
        *linear(f"{ours}/attention/key", layer + "self_attn.k_proj", qkv_bias),
        *linear(f"{ours}/attention/value", layer + "self_attn.v_proj", qkv_bias),
        *linear(f"{ours}/attention/out", layer + "self_attn.o_proj", False),
        WeightRule(f"{ours}/attention/query_norm/scale", layer + "self_attn.q_norm.weight"),
        WeightRule(f"{ours}/attention/key_norm/scale", layer + "self_attn.k_norm.weight"),
        WeightRule(f"{ours}/norm2/scale", layer + "post_attention_layernorm.weight"),
        *linear(f"{ours}/mlp/gate", layer + "mlp.gate_proj", False),
        *linear(f"{ours}/mlp/up", layer + "mlp.up_proj", False),
        *linear(f"{ours}/mlp/down", layer + "mlp.down_proj", False),
        WeightRule("language/norm/scale", model + "norm.weight"),
        *linear("language/head", head, False),
    )


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Replaces the first matching prefix of a name; a longer prefix comes before a shorter one."""
    for prefix, other in prefixes:
        if name.startswith(prefix):
            return other + name[len(prefix) :]
    return name


def flatten(tree: Mapping) -> dict[str, Any]:
    """Flattens a nested dict of leaves to paths joined by slashes, in the tree's own order."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, object]) -> dict:
    """The inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, key = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = leaf
    return tree


def targets(abstract: Mapping, rules: Sequence[WeightRule]) -> list[WeightTarget]:
    """Lists every weight of a model with the tensors that make it up, in the order of the rules.

    Rules of absent leaves are ignored.
    """
    flat = flatten(abstract)
    listed = [_target(rule, flat[rule.path].shape) for rule in rules if rule.path in flat]
    assert len(listed) == len(flat), "a leaf without a rule"
    return listed


def _target(rule: WeightRule, shape: tuple[int, ...]) -> WeightTarget:
    stacked = "{}" in rule.name
    names = tuple(rule.name.format(i) for i in range(shape[0])) if stacked else (rule.name,)
    one = shape[1:] if stacked else shape
    if rule.transform == "transpose":
        one = one[::-1]
    elif rule.transform == "patches":
        one = (one[1], one[0] // math.prod(rule.window), *rule.window)
    return WeightTarget(rule.path, tuple(shape), names, tuple(one), rule.transform, stacked)


def join(params: dict[str, Any]) -> dict[str, Any]:
    """Joins matrices that multiply the same rows, and their biases, column by column.

    A GPU starts one kernel for two or three then. Joined matrices leave `params`, so that they are
    not there twice.
    """
    joined = {name: join(x) if isinstance(x, dict) else x for name, x in params.items()}
    for names in _JOINED:
        if all(isinstance(joined.get(name), dict) for name in names):
            for name in names:
                params.pop(name)
            parts = [joined.pop(name) for name in names]
            leaves = {
                leaf: jax.tree.map(
                    lambda *x: jnp.concatenate(x, axis=-1), *(part.pop(leaf) for part in parts)
                )
                for leaf in list(parts[0])
            }
            joined["_".join(names)] = leaves
    return joined


def separate(params: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `join`, for a tree that has the names and widths of `like` without it."""
    taken, groups = {}, {"_".join(names): names for names in _JOINED}
    for name, part in params.items():
        start = 0
        for each in groups.get(name, ()):
            stop = start + like[each]["kernel"].shape[-1]
            taken[each] = {leaf: x[..., start:stop] for leaf, x in part.items()}
            start = stop
        if name not in groups:
            inner = isinstance(part, dict) and isinstance(like.get(name), dict)
            taken[name] = separate(part, like[name]) if inner else part
    return taken
