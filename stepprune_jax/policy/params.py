"""A single table of parameter specifications: initial values, shapes and sharding axes."""

import functools
import math
import re
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from stepprune_jax.policy.base import Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import check_key, implicit_promotion
from stepprune_jax.policy.layers import score_dtype

# Normal with variance 1 / fan-in, or with a standard deviation of .02.
Init = Literal["fan_in", "token", "ones", "zeros"]


class ParamSpec(NamedTuple):
    """One weight: its shape, logical axes (see `partition_rules`) and initialiser."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init


def _kernel(rows: int, columns: int, axes: tuple[str | None, ...], init: Init = "fan_in"):
    return {"kernel": ParamSpec((rows, columns), axes, init)}


def _dense(rows: int, columns: int, axes: tuple[str | None, ...], init: Init = "fan_in"):
    return _kernel(rows, columns, axes, init) | {"bias": ParamSpec((columns,), (axes[1],), "zeros")}


def _norm(width: int, bias: bool = True):
    scale = {"scale": ParamSpec((width,), (None,), "ones")}
    return scale | ({"bias": ParamSpec((width,), (None,), "zeros")} if bias else {})


def _attention(d: int):
    # A key bias shifts all logits of a query alike and would never receive a gradient; the
    # query's is covered by the bias of the norm before it.
    heads = {name: _kernel(d, d, ("embed", "heads")) for name in ("query", "key", "value")}
    return heads | {"out": _dense(d, d, ("heads", "embed"))}


def _mlp(d: int, hidden: int, down_init: Init = "fan_in"):
    return {
        "up": _dense(d, hidden, ("embed", "hidden")),
        "down": _dense(hidden, d, ("hidden", "embed"), down_init),
    }


def _encoder_specs(config: PolicyConfig, d: int, hidden: int):
    blocks = {
        f"block_{i}": {
            "norm1": _norm(d),
            "attention": _attention(d),
            "norm2": _norm(d),
            "mlp": _mlp(d, hidden),
        }
        for i in range(config.encoder_layers)
    }
    if config.policy_width != config.feature_width:
        blocks["image_projection"] = _dense(config.feature_width, d, (None, "embed"))
    if config.text_width:
        projection = _kernel(config.text_width, d, (None, "embed"))
        blocks["text_projection"] = projection | {"norm": _norm(d)}
        if config.first_query == "question":
            pool = ParamSpec((d,), (None,), "zeros")  # a mean at first
            blocks["question"] = _kernel(d, d, (None, "embed")) | {"pool": pool}
    return blocks


def _decoder_specs(config: PolicyConfig, d: int, hidden: int):
    def history():
        return {"norm": _norm(d), "attention": _attention(d)}

    def layer():
        return {
            "history": history(),
            "cross": {"norm": _norm(d), "memory_norm": _norm(d), "attention": _attention(d)},
            "norm": _norm(d),
            "mlp": _mlp(d, hidden),
        }

    inner = {f"layer_{i}": layer() for i in range(config.decoder_layers - 1)}
    if config.stop == "hazard":
        inner["hazard"] = layer() | {
            "clock": ParamSpec((d,), (None,), "token"),
            "read": _norm(d, bias=False),
        }
    pointer = {
        "history": history(),
        "norm": _norm(d),
        # No bias: it would shift all pointer logits of a step alike.
        "memory_norm": _norm(d, bias=False),
        "query": _kernel(d, d, ("embed", "heads")),
        "key": _kernel(d, d, ("embed", "heads")),
    }
    return inner | {"pointer": pointer, "start": ParamSpec((d,), (None,), "token")}


def _denoiser_specs(config: PolicyConfig, d: int, hidden: int):
    # Under a diagonal mask every softmax has one entry: queries and keys would be dead weights.
    # Zero output projections make the block start as the identity.
    wide = config.feature_width
    return {
        "norm1": _norm(wide),
        "value": _kernel(wide, d, ("embed", "heads")),
        "out": _dense(d, wide, ("heads", "embed"), "zeros"),
        "norm2": _norm(wide),
        "mlp": _mlp(wide, hidden, "zeros"),
    }


def param_specs(config: PolicyConfig) -> dict[str, Any]:
    """Returns the table, a nested dict of `ParamSpec`: the single source of what follows."""
    d = config.policy_width
    hidden = config.mlp_ratio * d
    return {
        "encoder": _encoder_specs(config, d, hidden),
        "decoder": _decoder_specs(config, d, hidden),
        "stop": ParamSpec((d,), (None,), "token"),
        "denoiser": _denoiser_specs(config, d, hidden),
    }


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParamSpec)


def init_policy(key: jax.Array, config: PolicyConfig) -> Params:
    """Draws the trainable weights of a policy.

    Args:
        key: PRNG key; consumed.
        config: shapes and readings.

    Returns:
        A nested dict of float32 arrays (float64 if `config.dtype` says so). Weights stay in full
        precision; they are cast where they are used.
    """
    dtype = score_dtype(jnp.dtype(config.dtype or jnp.float32))
    return draw_params(key, param_specs(config), dtype)


@implicit_promotion()
def draw_params(key: jax.Array, specs: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """Draws the weights that a table of `ParamSpec`, or a part of one, describes.

    All weights are drawn by one compiled program.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=_is_spec)
    return treedef.unflatten(_draw(check_key(key), tuple(leaves), jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnames=("specs", "dtype"))
def _draw(key: jax.Array, specs: tuple[ParamSpec, ...], dtype: jnp.dtype) -> list[jax.Array]:
    """Draws weight i from the i-th part of `key`.

    Weights of one size share a loop, as XLA takes a quarter of a second to compile each draw. The
    barrier keeps the scaling out of the draw, so that no weight depends on how XLA fuses the two.
    """
    keys = jax.random.split(key, len(specs))
    places: dict[int, list[int]] = {}
    for place, spec in enumerate(specs):
        if spec.init in ("fan_in", "token"):
            places.setdefault(math.prod(spec.shape), []).append(place)
    weights = [jnp.full(spec.shape, float(spec.init == "ones"), dtype) for spec in specs]
    for size, members in places.items():

        def normal(key: jax.Array, size: int = size) -> jax.Array:
            return jax.random.normal(key, (size,), dtype)

        drawn = jax.lax.optimization_barrier(jax.lax.map(normal, keys[jnp.array(members)]))
        for place, weight in zip(members, drawn, strict=True):
            spec = specs[place]
            std = 0.02 if spec.init == "token" else 1 / math.sqrt(spec.shape[0])
            weights[place] = std * weight.reshape(spec.shape)
    return weights


def abstract_policy(config: PolicyConfig) -> Params:
    """Returns shapes and dtypes of `init_policy`, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda key: init_policy(key, config), jax.random.key(0))


def count_weights(params: Any) -> int:
    """Counts the numbers in a tree of arrays, or of anything with shapes."""
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(params))


def cast_weights(params: Params, dtype: DTypeLike | None) -> Params:
    """Casts a policy's dense layers once, for inference, so that no program does so in each step.

    StepPrune's results are bitwise the same: `layers.dense` casts kernel and bias to the dtype of
    its input anyway. Norms, the clock and single tokens are read in full precision and not cast.

    Args:
        params: weights, or a subtree of them.
        dtype: the compute dtype, `config.dtype`; `None` changes nothing.

    Returns:
        The weights, with copies of those that were cast.
    """
    if dtype is None:
        return params
    dense = {name for name in ("kernel", "bias") if "kernel" in params}
    cast = {name: params[name].astype(dtype) for name in dense & params.keys()}
    inner = {k: cast_weights(v, dtype) for k, v in params.items() if isinstance(v, dict)}
    return params | inner | cast


def flat_params(tree: Params) -> dict[str, Any]:
    """Returns every leaf by its `/`-joined path, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    return {"/".join(str(getattr(entry, "key", entry)) for entry in path): x for path, x in flat}


def param_paths(tree: Params) -> list[str]:
    """Returns the paths of `flat_params`."""
    return list(flat_params(tree))


def partition_rules(
    config: PolicyConfig, mesh_axes: dict[str, str | None]
) -> list[tuple[str, PartitionSpec]]:
    """Returns sharding rules by path: one `(regular expression, PartitionSpec)` per weight.

    Args:
        config: shapes and readings.
        mesh_axes: mesh axis for each logical axis `"embed"`, `"heads"`, `"hidden"`; a logical axis
            that is absent or `None` is replicated. For example `{"embed": "fsdp", "hidden":
            "tensor"}`.

    Returns:
        Rules whose patterns match each path of `param_paths` exactly once.
    """
    specs = param_specs(config)
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    return [
        (f"^{re.escape(path)}$", PartitionSpec(*(mesh_axes.get(axis) for axis in spec.axes)))
        for path, spec in zip(param_paths(specs), leaves, strict=True)
    ]
