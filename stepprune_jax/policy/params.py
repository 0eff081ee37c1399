"""Parameter specifications: shape, initializer and sharding axes of every weight."""

from __future__ import annotations

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

# "fan_in" is normal with variance 1 / fan-in; "token" is normal with standard deviation 0.02, the
# initialization of token embeddings in GPT-2.
Init = Literal["fan_in", "token", "ones", "zeros"]


class ParamSpec(NamedTuple):
    """Specification of one weight.

    Attributes:
        shape: shape of the array.
        axes: logical name of each axis for sharding, "embed", "heads", "hidden" or None; see
            `partition_rules`.
        init: name of the initializer.
    """

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
    """Returns the specifications of multi-head attention of width d."""
    # A key bias would add one constant to all logits of a query and receive no gradient. The bias
    # of the preceding norm makes a query bias redundant.
    heads = {name: _kernel(d, d, ("embed", "heads")) for name in ("query", "key", "value")}
    return heads | {"out": _dense(d, d, ("heads", "embed"))}


def _mlp(d: int, hidden: int, down_init: Init = "fan_in"):
    return {
        "up": _dense(d, hidden, ("embed", "hidden")),
        "down": _dense(hidden, d, ("hidden", "embed"), down_init),
    }


def _encoder_specs(config: PolicyConfig, d: int, hidden: int):
    """Returns the specifications of the encoder's weights.

    Args:
        config: policy configuration.
        d: width of the encoder.
        hidden: hidden width of its MLPs.
    """
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
            pool = ParamSpec((d,), (None,), "zeros")  # pooling starts as a mean over the words
            blocks["question"] = _kernel(d, d, (None, "embed")) | {"pool": pool}
    return blocks


def _decoder_specs(config: PolicyConfig, d: int, hidden: int):
    """Returns the specifications of the decoder's weights.

    The last layer, "pointer", ends at its logits. All other layers, among them the hazard layer
    that predicts the stop, have attention over the history, cross-attention and an MLP.

    Args:
        config: policy configuration.
        d: width of the decoder.
        hidden: hidden width of its MLPs.
    """

    def history():
        return {"norm": _norm(d), "attention": _attention(d)}

    def layer():
        return {
            "history": history(),
            "cross": {"norm": _norm(d), "memory_norm": _norm(d), "attention": _attention(d)},
            "norm": _norm(d),
            "mlp": _mlp(d, hidden),
        }

    inner_layers = {f"layer_{i}": layer() for i in range(config.decoder_layers - 1)}
    if config.stop == "hazard":
        inner_layers["hazard"] = layer() | {
            "clock": ParamSpec((d,), (None,), "token"),  # embedding of the step number
            "read": _norm(d, bias=False),  # norm of the output, before the product with the stop
        }
    pointer = {
        "history": history(),
        "norm": _norm(d),
        # No bias: it would add one constant to all pointer logits of a step.
        "memory_norm": _norm(d, bias=False),
        "query": _kernel(d, d, ("embed", "heads")),
        "key": _kernel(d, d, ("embed", "heads")),
    }
    return inner_layers | {"pointer": pointer, "start": ParamSpec((d,), (None,), "token")}


def _denoiser_specs(config: PolicyConfig, d: int, hidden: int):
    """Returns the specifications of the denoiser, whose tokens attend only to themselves."""
    # Under a diagonal mask every softmax has one entry, so queries and keys would have no effect.
    # Zero output projections make the block start as the identity.
    width = config.feature_width
    return {
        "norm1": _norm(width),
        "value": _kernel(width, d, ("embed", "heads")),
        "out": _dense(d, width, ("heads", "embed"), "zeros"),
        "norm2": _norm(width),
        "mlp": _mlp(width, hidden, "zeros"),
    }


def param_specs(config: PolicyConfig) -> dict[str, Any]:
    """Returns a nested dict of `ParamSpec` with the structure of the policy weights."""
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
    """Initialises the trainable weights of a policy randomly.

    Args:
        key: PRNG key; consumed.
        config: policy configuration.

    Returns:
        A nested dict of float32 arrays; float64 if `config.dtype` is "float64". Layers cast their
        weights to the compute dtype when they use them.
    """
    dtype = score_dtype(jnp.dtype(config.dtype or jnp.float32))
    return init_params(key, param_specs(config), dtype)


@implicit_promotion()
def init_params(key: jax.Array, specs: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """Initialises the weights that a tree of `ParamSpec` describes, in one compiled program.

    Args:
        key: PRNG key; consumed.
        specs: any pytree with `ParamSpec` leaves.
        dtype: dtype of the weights.

    Returns:
        A tree of the same structure whose leaves are arrays.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=_is_spec)
    return treedef.unflatten(_init_leaves(check_key(key), tuple(leaves), jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnames=("specs", "dtype"))
def _init_leaves(key: jax.Array, specs: tuple[ParamSpec, ...], dtype: jnp.dtype) -> list[jax.Array]:
    """Initialises all weights in one program; weight i uses the i-th key of a split of `key`.

    Args:
        key: PRNG key; consumed.
        specs: specification of each weight.
        dtype: dtype of the weights.

    Returns:
        The weights, in the order of `specs`.
    """
    keys = jax.random.split(key, len(specs))
    indices_by_size: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        if spec.init in ("fan_in", "token"):
            indices_by_size.setdefault(math.prod(spec.shape), []).append(i)
    # Constants. Random weights are replaced below.
    weights = [jnp.full(spec.shape, float(spec.init == "ones"), dtype) for spec in specs]
    # Weights of equal size share a loop, because XLA takes a quarter of a second to compile each
    # random array.
    for size, indices in indices_by_size.items():

        def sample_normal(key: jax.Array, size: int = size) -> jax.Array:
            return jax.random.normal(key, (size,), dtype)

        # The barrier separates sampling from scaling: the values must not depend on how XLA fuses
        # the two.
        samples = jax.lax.optimization_barrier(jax.lax.map(sample_normal, keys[jnp.array(indices)]))
        for i, sample in zip(indices, samples, strict=True):
            spec = specs[i]
            std = 0.02 if spec.init == "token" else 1 / math.sqrt(spec.shape[0])
            weights[i] = std * sample.reshape(spec.shape)
    return weights


def abstract_policy(config: PolicyConfig) -> Params:
    """Returns shapes and dtypes of `init_policy`, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda key: init_policy(key, config), jax.random.key(0))


def count_weights(params: Any) -> int:
    """Returns the total number of elements of a tree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(params))


def cast_weights(params: Params, dtype: DTypeLike | None) -> Params:
    """Casts the kernels and biases of dense layers to the compute dtype, for inference.

    Casting once saves a cast in every step. The results are bitwise equal, because `layers.dense`
    casts kernel and bias to the dtype of its input anyway. Norms, the hazard's clock and single
    tokens are used in full precision and are not cast.

    Args:
        params: policy weights, or a subtree of them.
        dtype: the compute dtype, `config.dtype`; None returns `params` unchanged.

    Returns:
        A tree with cast copies of the dense weights; other weights are shared with `params`.
    """
    if dtype is None:
        return params
    # Only dense layers have a kernel. A bias without a kernel belongs to a norm.
    dense_names = {name for name in ("kernel", "bias") if "kernel" in params}
    cast = {name: params[name].astype(dtype) for name in dense_names & params.keys()}
    subtrees = {
        name: cast_weights(subtree, dtype)
        for name, subtree in params.items()
        if isinstance(subtree, dict)
    }
    return params | subtrees | cast


def flat_params(tree: Params) -> dict[str, Any]:
    """Maps the `/`-joined path of every leaf to the leaf, in the order of `jax.tree.leaves`."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    return {
        "/".join(str(getattr(node, "key", node)) for node in path): leaf
        for path, leaf in paths_and_leaves
    }


def param_paths(tree: Params) -> list[str]:
    """Returns the `/`-joined path of every leaf, in the order of `jax.tree.leaves`."""
    return list(flat_params(tree))


def partition_rules(
    config: PolicyConfig, mesh_axes: dict[str, str | None]
) -> list[tuple[str, PartitionSpec]]:
    """Returns sharding rules: one `(regular expression, PartitionSpec)` per weight.

    Args:
        config: policy configuration.
        mesh_axes: mesh axis of each logical axis `"embed"`, `"heads"`, `"hidden"`; a missing
            logical axis, or None, is replicated. For example `{"embed": "fsdp", "hidden":
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
