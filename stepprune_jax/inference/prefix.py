"""From a request to the embedded, pruned and padded rows that the language model reads."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy, check_fits
from stepprune_jax.inference.buckets import ladder, row_bucket
from stepprune_jax.inference.request import Request
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT, expanded_length, pad_batch, truncate
from stepprune_jax.parallel.placement import (
    beside,
    constrain_rows,
    jit_for_weights,
    mesh_of,
    place_rows,
)
from stepprune_jax.policy import Pruned, prune
from stepprune_jax.pruning import autoselect
from stepprune_jax.pruning.autoselect import AutoSelectConfig

# (features [i, n, d], text [i, l, e], text_mask [i, l]) -> what is kept of each image.
SelectFn = Callable[[Array, Array, Array], Pruned]


class Prefix(NamedTuple):
    """A batch ready for the language model.

    Attributes:
        sequence: the embedded rows.
        visual_tokens: of each row before pruning, over all its images.
        kept: of each row in the sequence.
        shapes: what the compiled programs of this batch depend on.
    """

    sequence: vlm.Sequence
    visual_tokens: tuple[int, ...]
    kept: tuple[int, ...]
    shapes: tuple[Any, ...]


class _Pairs(NamedTuple):
    """Every (prompt, image) pair is a row of the policy; the rows are padded to a bucket."""

    image: np.ndarray  # [r] row in the pixels
    prompt: np.ndarray  # [r] row in the batch
    slot: np.ndarray  # [b, j] pair of each image of each prompt
    present: np.ndarray  # [b, j]
    count: int  # without the padding


def _encode(params, config: LlavaConfig, pixels, attention: str, mesh: Mesh | None):
    return constrain_rows(mesh, vlm.encode_image(params, config, pixels, attention=attention)[0])


def _pair_up(params, config: LlavaConfig, features, image, ids, length, mesh: Mesh | None):
    """Features, text and text mask of each pair."""
    text = vlm.embed_text(params, config, ids)
    mask = jnp.arange(ids.shape[1]) < length[:, None]
    return constrain_rows(mesh, (features[image], text, mask))


def _place(
    params,
    config: LlavaConfig,
    ids: Int[Array, "b l"],
    length: Int[Array, "b"],
    pruned: Pruned,
    slot: Int[Array, "b j"],
    present: Bool[Array, "b j"],
    positions: str,
    capacity: int,
    mesh: Mesh | None,
) -> vlm.Sequence:
    """Projects what was kept and puts it in its places."""
    visual = vlm.project(params, config, pruned.tokens)[slot]
    valid = pruned.valid[slot] & present[..., None]
    sequence = vlm.assemble(
        params, config, ids, length, visual, valid, pruned.index[slot], positions, capacity
    )
    return constrain_rows(mesh, sequence)


encode_images = jit_for_weights(_encode, ("config", "attention", "mesh"))
pair_up = jit_for_weights(_pair_up, ("config", "mesh"))
place = jit_for_weights(_place, ("config", "positions", "capacity", "mesh"))


def policy_selector(
    model: VLM, policy: Policy, budget: int | None = None, stop_bias: float | int | None = None
) -> SelectFn:
    """Makes a policy the selector of a model, after checking that it fits.

    Args:
        model: the model.
        policy: the policy; copied to the model's devices unless it lies there.
        budget: exact number of tokens to keep of each image; None lets the policy stop by itself.
        stop_bias: in place of the policy's own; irrelevant with a budget.

    Returns:
        A selector for `prepare` and `generate`.

    Raises:
        ValueError: widths that differ, a budget out of range, or none for a policy without a stop.
    """
    check_fits(policy, model.config)
    check_budget(policy, model.config, budget)
    one_shot = isinstance(policy.config, AutoSelectConfig)
    if one_shot and budget is None:
        raise ValueError("an AutoSelect policy has no stop of its own: give a budget (--budget)")
    params, stats = beside(model.params, (policy.params, policy.stats))
    bias = policy.stop_bias if stop_bias is None else stop_bias

    def select(features, text, text_mask):
        seen = (text, text_mask) if policy.config.text_width else (None, None)
        if one_shot:
            return autoselect.prune(
                params, policy.config, features, seen[0], text_mask=seen[1], stats=stats,
                budget=budget,
            )  # fmt: skip
        return prune(
            params, policy.config, features, seen[0], text_mask=seen[1], stats=stats,
            budget=budget, stop_bias=bias,
        )  # fmt: skip

    return select


def check_budget(policy: Policy | None, config: LlavaConfig, budget: int | None) -> None:
    """Refuses a budget that no policy could keep to.

    Args:
        policy: the policy, if any.
        config: the model's configuration.
        budget: tokens to keep of each image, if asked for.

    Raises:
        ValueError: a budget without a policy, or outside 1 to T_max.
    """
    if budget is None:
        return
    if policy is None:
        raise ValueError("a budget (--budget) needs a policy (--policy)")
    steps = policy.config.steps(config.num_image_tokens)
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= steps:
        raise ValueError(
            f"budget is {budget!r}, expected an integer from 1 to {steps} (T_max of the policy for "
            f"{config.num_image_tokens} visual tokens); without policy and budget all are kept"
        )


def prepare(
    model: VLM,
    request: Request,
    *,
    select_fn: SelectFn | None = None,
    positions: str = "original",
    context_limit: int = CONTEXT_LIMIT,
    attention: str = "matmul",
) -> Prefix:
    """Encodes each image once, prunes it for each prompt that shows it, and assembles the rows.

    Only kept tokens go through the projector. Shapes are padded to buckets: the number of programs
    is bounded, whatever the prompts.

    Args:
        model: the model.
        request: from `read_request`.
        select_fn: what to keep; None keeps everything.
        positions: position ids of kept tokens, "original" or "compact"; see `vlm.assemble`.
        context_limit: longest row after expansion; longer ones are cut at the right end, with a
            warning, as the reference does.
        attention: "matmul", "xla" or "cudnn", for the tower.

    Returns:
        The prefix.

    Raises:
        ValueError: unknown positions, or a selector that returns something else than a `Pruned`
            of the images it was given.
    """
    mesh = mesh_of(model.params)
    n = model.config.num_image_tokens
    pairs = _pairs(request)
    if pairs.count:
        pruned, shapes = _select(model, request, pairs, select_fn, attention, mesh)
        counts = np.asarray(pruned.count)
    else:
        pruned, shapes, counts = _nothing(model), (), np.zeros(0, int)
    kept = [
        tuple(int(counts[pair]) for pair in slots[there])
        for slots, there in zip(pairs.slot, pairs.present, strict=True)
    ]
    longest = max(expanded_length(ids, k) for ids, k in zip(request.ids, kept, strict=True))
    if longest > context_limit:
        warnings.warn(
            f"a prompt of {longest} embeddings was cut to its first {context_limit}: its end, and "
            "so the question, may be lost",
            stacklevel=3,
        )
        kept = [
            truncate(ids, k, context_limit).kept for ids, k in zip(request.ids, kept, strict=True)
        ]
    capacity = _bucket(min(longest, context_limit), ladder(context_limit))
    ids, length = _padded(request.ids)
    arrays = place_rows(mesh, (ids, length, pairs.slot, pairs.present))
    ids, length, slot, present = arrays
    sequence = place(
        model.params, model.config, ids, length, pruned, slot, present,
        positions=positions, capacity=capacity, mesh=mesh,
    )  # fmt: skip
    shapes += (ids.shape, slot.shape, pruned.tokens.shape, capacity, positions, attention)
    return Prefix(
        sequence, tuple(n * len(row) for row in request.image_of), tuple(map(sum, kept)), shapes
    )


def _bucket(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that holds `size`."""
    return next(bucket for bucket in sizes if bucket >= size)


def _padded(rows: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ids and lengths; the width is a bucket."""
    longest = max(map(len, rows))
    return pad_batch(rows, multiple=_bucket(longest, ladder(max(longest, 1 << 16), 16)))


def _pairs(request: Request) -> _Pairs:
    """Lists the pairs, padded by repeating the first."""
    b = len(request.ids)
    j = row_bucket(max(map(len, request.image_of)))
    image, prompt = [], []
    slot, present = np.zeros((b, j), np.int32), np.zeros((b, j), bool)
    for row, numbers in enumerate(request.image_of):
        for place_of, number in enumerate(numbers):
            slot[row, place_of], present[row, place_of] = len(image), True
            image.append(number)
            prompt.append(row)
    count = len(image)
    padding = row_bucket(count, range(b, count + b, b)) - count if count else 0
    image, prompt = (np.array(x + x[:1] * padding, np.int32) for x in (image, prompt))
    return _Pairs(image, prompt, slot, present, count)


def _nothing(model: VLM) -> Pruned:
    """Stands for the kept tokens of a batch without images."""
    d, dtype = model.config.vision.hidden_size, jax.tree.leaves(model.params)[0].dtype
    one = np.zeros((1, 1), np.int32)
    return Pruned(one, np.zeros((1, 1, d), dtype), one > 0, one[0])


def _select(
    model: VLM,
    request: Request,
    pairs: _Pairs,
    select_fn: SelectFn | None,
    attention: str,
    mesh: Mesh | None,
) -> tuple[Pruned, tuple[Any, ...]]:
    """Features of all images and what is kept of them, one row per pair."""
    b, pixels = len(request.ids), request.pixels
    padding = row_bucket(len(pixels), range(b, len(pixels) + b, b)) - len(pixels)
    pixels = np.concatenate([pixels, np.repeat(pixels[:1], padding, axis=0)])
    pixels = place_rows(mesh, pixels)
    features = encode_images(model.params, model.config, pixels, attention=attention, mesh=mesh)
    asked = tuple(request.question_ids[row] for row in pairs.prompt)
    text_ids, length = _padded(asked)
    image, text_ids, length = place_rows(mesh, (pairs.image, text_ids, length))
    features, text, mask = pair_up(
        model.params, model.config, features, image, text_ids, length, mesh=mesh
    )
    shapes = (pixels.shape, text_ids.shape)
    r, n, d = features.shape
    if select_fn is None:
        index = np.broadcast_to(np.arange(n, dtype=np.int32), (r, n))
        return Pruned(index, features, np.ones((r, n), bool), np.full(r, n, np.int32)), shapes
    pruned = select_fn(features, text, mask)
    if not isinstance(pruned, Pruned):
        raise ValueError(f"select_fn returned {type(pruned).__name__}, expected a Pruned")
    if pruned.tokens.shape[::2] != (r, d) or pruned.valid.shape != pruned.tokens.shape[:2]:
        raise ValueError(
            f"select_fn returned tokens {pruned.tokens.shape} with valid {pruned.valid.shape}, "
            f"expected [{r}, k, {d}] and [{r}, k]"
        )
    return pruned, shapes


def check_positions(positions: str) -> None:
    """Raises a ValueError unless `positions` is one of those of `vlm.assemble`."""
    if positions not in vlm.POSITIONS:
        raise ValueError(f"positions is {positions!r}; supported: {', '.join(vlm.POSITIONS)}")
