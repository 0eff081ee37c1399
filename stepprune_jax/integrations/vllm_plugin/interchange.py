"""Tensors of torch as arrays of jax and back, on the same device and without copies."""

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array


def to_jax(tensor: torch.Tensor) -> Array:
    """Returns a tensor as an array."""
    return jnp.from_dlpack(tensor.detach().contiguous())


def to_torch(array: Array) -> torch.Tensor:
    """Returns an array as a tensor, after it is computed."""
    return torch.from_dlpack(jax.block_until_ready(array))
