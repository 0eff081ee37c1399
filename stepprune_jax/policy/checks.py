"""Errors that name the argument, its shape and what was expected.

The jaxtyping annotation of a public function is its contract. `checked` enforces it for users at
trace time, at no cost inside a compiled program.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# A jax or numpy array: ArrayLike without scalars.
AnyArray = jax.Array | np.ndarray
_REAL = (jnp.floating, jnp.integer)
# Normal numbers of float32, apart from 0; an integer of Python's may be too large for any float.
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def is_static(value: Any) -> bool:
    """Returns whether `value` can be read now, that is, whether it is not traced by JAX."""
    return not isinstance(value, Tracer)


def require(holds: bool, name: str, found: Any, expected: str):
    """Raises a `ValueError` naming argument `name`, what was found and what was expected."""
    if not holds:
        raise ValueError(f"{name} is {found}, expected {expected}")


def require_finite(name: str, value: Any, mask: Any = None):
    """Raises if a static array holds NaN or infinity where `mask` is true; traced values pass."""
    if not (is_static(value) and is_static(mask)):
        return
    # Reduced on the array's device, now and outside any trace: only a count reaches the host.
    with jax.ensure_compile_time_eval():
        bad = ~jnp.isfinite(value)
        count = int(jnp.sum(bad if mask is None else bad & jnp.asarray(mask)[..., None]))
    require(
        count == 0,
        name,
        f"of shape {np.shape(value)} with {count} non-finite values",
        "finite values",
    )


@jax.jit
def _nonfinite(leaves: list[Any]) -> jax.Array:
    return jnp.stack([jnp.sum(~jnp.isfinite(leaf)) for leaf in leaves])


def require_finite_tree(name: str, tree: Any):
    """Applies `require_finite` to all leaves in one program; names the first non-finite one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves or not all(is_static(leaf) for _, leaf in leaves):
        return
    # One transfer from the device, however many leaves there are.
    counts = np.asarray(_nonfinite([leaf for _, leaf in leaves])).tolist()
    for (path, leaf), count in zip(leaves, counts, strict=True):
        require(
            count == 0,
            name + jax.tree_util.keystr(path),
            f"of shape {np.shape(leaf)} with {count} non-finite values",
            "finite values",
        )


def is_integer(value: Any) -> bool:
    """Returns whether `value` is a Python or numpy integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a Python or numpy number that float32 holds; booleans are not."""
    real = isinstance(value, int | float | np.integer | np.floating)
    if not real or isinstance(value, bool):
        return False
    value = value.item() if isinstance(value, np.generic) else value
    return value == 0 or _LEAST <= abs(value) <= _LARGEST


def require_row_numbers(name: str, value: Any, batch: int):
    """Raises unless `value` is a number or one per row, finite where it can be read."""
    require(not isinstance(value, str | None), name, repr(value), f"a number or float[{batch}]")
    found = np.asarray(value) if is_static(value) else value
    require(
        found.shape in ((), (batch,)) and any(jnp.issubdtype(found.dtype, k) for k in _REAL),
        name,
        f"of shape {found.shape} and dtype {found.dtype}",
        f"a number or float[{batch}]",
    )
    if is_static(value):
        bad = int((~(np.abs(found.astype(np.float64)) <= _LARGEST)).sum())
        shown = f"of shape {found.shape} with {bad} non-finite values" if found.ndim else str(value)
        require(bad == 0, name, shown, "finite values of float32")


def require_count(name: str, value: Any, low: int, high: int, batch: int) -> jax.Array:
    """Returns a count per row, `int32[batch]`; raises if readable and not in `[low, high]`."""
    if is_static(value):
        found = np.asarray(value)
        require(
            found.dtype.kind in "iu" and found.shape in ((), (batch,)),
            name,
            f"of shape {found.shape} and dtype {found.dtype}",
            f"an integer or int[{batch}]",
        )
        inside = bool(((found >= low) & (found <= high)).all())
        shown = f"{found.min()} to {found.max()}" if found.size > 1 else str(found)
        require(inside, name, shown, f"within [{low}, {high}]")
    return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,))


def _arms(annotation: Any) -> list[Any]:
    """The jaxtyping members of an annotation such as `Float[AnyArray, "b n"] | None`."""
    nested = [arm for part in get_args(annotation) for arm in _arms(part)]
    return [annotation] if hasattr(annotation, "dim_str") else nested


def _bind(dims: list[str], shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    """Matches `shape` against `dims`, recording named sizes; false where they disagree."""
    if dims and dims[0].startswith("*"):
        split = len(shape) - (len(dims) - 1)
        if split < 0 or sizes.setdefault(dims[0], shape[:split]) != shape[:split]:
            return False
        dims, shape = dims[1:], shape[split:]
    if len(dims) != len(shape):
        return False
    return all(
        size == (int(dim) if dim.isdigit() else sizes.setdefault(dim, size))
        for dim, size in zip(dims, shape, strict=True)
    )


def checked(function: Callable) -> Callable:
    """Checks rank, named sizes and kind of dtype of every annotated array argument.

    An argument that is annotated with a dataclass, such as the configuration, has to be one.

    Raises (from the wrapped function) a `ValueError` that names the argument, its shape and dtype,
    and the expected shape with the sizes already fixed by earlier arguments.
    """
    signature = inspect.signature(function)
    contracts = {name: _arms(p.annotation) for name, p in signature.parameters.items()}
    annotations = {name: p.annotation for name, p in signature.parameters.items()}
    records: dict[str, Any] = {n: a for n, a in annotations.items() if dataclasses.is_dataclass(a)}
    contracts = {name: arms for name, arms in contracts.items() if arms}
    optional = {n for n, p in signature.parameters.items() if type(None) in get_args(p.annotation)}

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        sizes: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in records and not isinstance(value, records[name]):
                expected = records[name].__name__
                raise ValueError(f"{function.__name__}: {name} is {value!r}, expected a {expected}")
            scalar = isinstance(value, bool | int | float | complex)
            if name not in contracts or scalar or (value is None and name in optional):
                continue
            arm = contracts[name][0]
            if value is None or not hasattr(value, "dtype"):
                raise ValueError(
                    f"{function.__name__}: {name} is of type {type(value).__name__}, expected an "
                    f"array {arm.__name__.split('[')[0]}[{arm.dim_str}]"
                )
            kinds = {dtype for a in contracts[name] for dtype in a.dtypes}
            if not _bind(arm.dim_str.split(), value.shape, sizes) or value.dtype.name not in kinds:
                known = ", ".join(f"{k}={v}" for k, v in sizes.items())
                raise ValueError(
                    f"{function.__name__}: {name} has shape {tuple(value.shape)} and dtype "
                    f"{value.dtype.name}, expected {arm.__name__.split('[')[0]}[{arm.dim_str}]"
                    + (f" with {known}" if known else "")
                )
        return function(*args, **kwargs)

    return wrapped
