"""From pixels to the first tokens, as pure functions and as the few programs that run them.

If the images' sizes decide the number of kept tokens, one program runs a batch: `first_tokens`. For
a learned stop, the host runs `select`, reads the counts, and runs `prefill`. Some pruners decide
the number of tokens at a cut, a place between layers of the language model; for these the host runs
`select`, then `prefill_to_cut`, and then `prefill`, which continues from the cut. Two programs do
work that several batches share: `encode` runs the tower once per image, and `rank` orders tokens
once for all budgets. Weights are arguments of every program.
"""

from collections.abc import Sequence as Ordered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from stepprune_jax.inference import decoding
from stepprune_jax.inference.base import (
    CHUNK_PATCHES,
    Decoding,
    Pairs,
    Plan,
    PromptLayout,
    Trace,
)
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels
from stepprune_jax.models.sequence import Sequence, split_deep
from stepprune_jax.models.stack import Params
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.policy.jax_settings import jax_defaults
from stepprune_jax.pruning import Kept, LayerPruner, Pruner, PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.packing import take_first


def encode(
    params: Params,
    backbone: Backbone,
    pixels: Pixels,
    token_of: Int[Array, "i n"] | None = None,
    *,
    taps: Ordered[Tap],
    plan: Plan,
) -> tuple[Float[Array, "i n w"], tuple[Array, ...]]:
    """Runs the vision tower over images and temporal patches of videos.

    Args:
        params: the model's weights.
        backbone: the model.
        pixels: preprocessed images, or temporal patches.
        token_of: for a batch with videos, the index of each token of an image or video among the
            tokens of all temporal patches; -1 in the padding.
        taps: intermediate arrays of the tower to return.
        plan: static part of the program; only `execution` and `mesh` are read.

    Returns:
        The visual tokens before the projector, with their deep features appended; and the
        intermediate arrays in the order of `taps`.
    """

    def run_tower(pixels: Pixels) -> tuple[Array, tuple[Array, ...]]:
        tokens, array_of_name = backbone.encode_image(params, pixels, taps, plan.execution)
        return tokens, tuple(array_of_name[f"{tap.kind}.{tap.layer}"] for tap in taps)

    num_rows = jax.tree.leaves(pixels)[0].shape[0]
    if token_of is None:
        tokens, tap_arrays = run_tower(pixels)
    elif num_rows <= CHUNK_PATCHES:
        tokens, tap_arrays = join_tokens(run_tower(pixels), token_of)
    else:
        # Long videos run in chunks, which bounds the memory of the tower's attention.
        chunks = jax.tree.map(lambda x: x.reshape(-1, CHUNK_PATCHES, *x.shape[1:]), pixels)
        outputs = jax.lax.map(run_tower, chunks)
        outputs = jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), outputs)
        tokens, tap_arrays = join_tokens(outputs, token_of)
    return constrain_rows(plan.mesh, (tokens, tap_arrays))


def join_tokens(arrays: PyTree, token_of: Int[Array, "i n"]) -> PyTree:
    """Joins arrays of temporal patches to arrays of images and videos.

    Args:
        arrays: tree of arrays [p, m, ...] with a row for each of p temporal patches of m tokens.
        token_of: [i, n] index of each token of an image or video among the p * m tokens; -1 in the
            padding.

    Returns:
        The tree with arrays [i, n, ...]; zeros in the padding.
    """

    def join(array: Array) -> Array:
        joined = array.reshape(-1, *array.shape[2:])[jnp.maximum(token_of, 0)]
        is_token = token_of.reshape(*token_of.shape, *[1] * (array.ndim - 2)) >= 0
        return jnp.where(is_token, joined, 0)

    return jax.tree.map(join, arrays)


def make_pruner_inputs(
    params: Params, backbone: Backbone, pairs: Pairs, *, plan: Plan
) -> PrunerInputs:
    """Builds the inputs of a pruner from encoded images.

    Args:
        params: the model's weights.
        backbone: the model.
        pairs: the (image, prompt) pairs of a batch, with features.
        plan: static part of the program; only `is_projected` and `mesh` are read.

    Returns:
        The inputs, with one row per pair.
    """
    assert pairs.features is not None  # the tower has run
    n, tokens = pairs.features.shape[1], pairs.features[pairs.image]
    if plan.is_projected:
        tokens = backbone.project(params, tokens)
    tokens, deep = split_deep(backbone.config, tokens)
    return constrain_rows(
        plan.mesh,
        PrunerInputs(
            tokens=tokens,
            mask=None if pairs.size is None else jnp.arange(n) < pairs.size[:, None],
            grid=pairs.grid,
            text=decoder.embed(params["language"], pairs.words),
            text_valid=jnp.arange(pairs.words.shape[1]) < pairs.num_words[:, None],
            number=pairs.number,
            seed=pairs.seed,
            count=pairs.count,
            taps=tuple(tap[pairs.image] for tap in pairs.taps),
            deep=deep,
            frames=pairs.frames,
        ),
    )


def select(params: Params, backbone: Backbone, pruner: Pruner, pairs: Pairs, *, plan: Plan) -> Kept:
    """Selects tokens of each (image, prompt) pair; runs the tower first if images have pixels.

    Args:
        params: the model's weights.
        backbone: the model.
        pruner: the pruner.
        pairs: the pairs of a batch, with pixels or features.
        plan: static part of the program.

    Returns:
        The kept tokens, one row per pair.
    """
    if pairs.features is None:
        taps = pruner.taps(backbone.config)
        features, taps = encode(
            params, backbone, pairs.pixels, pairs.token_of, taps=taps, plan=plan
        )
        pairs = pairs._replace(features=features, taps=taps)
    return pruner.keep(make_pruner_inputs(params, backbone, pairs, plan=plan), plan.capacity)


def rank(
    params: Params,
    backbone: Backbone,
    pruner: Ranker,
    pairs: Pairs,
    *,
    plan: Plan,
    steps: int,
) -> Ranking:
    """Orders the tokens of each (image, prompt) pair; returns the first `steps` of the order."""
    return pruner.rank(make_pruner_inputs(params, backbone, pairs, plan=plan), steps)


def build_sequence(
    params: Params, backbone: Backbone, kept: Kept, layout: PromptLayout, *, plan: Plan
) -> Sequence:
    """Projects the kept tokens and puts them in place of the images of each prompt.

    Args:
        params: the model's weights.
        backbone: the model.
        kept: kept tokens, one row per (image, prompt) pair.
        layout: the prompts, and the pair of each image.
        plan: static part of the program.

    Returns:
        The rows before the first layer of the language model.
    """
    # An image fills at most the slots of a row. One more token shows that the row is truncated.
    capacity = plan.slots[0]
    kept = jax.tree.map(
        lambda array: array if array.ndim == 1 else array[:, : capacity + 1],
        kept._replace(order=None),
    )
    if not plan.is_projected:
        kept = kept._replace(tokens=backbone.project(params, kept.tokens))
    kept = jax.tree.map(lambda array: array[layout.pair], kept)  # [r, ...] to [b, j, ...]
    sequence = assemble(
        params,
        backbone,
        layout.ids,
        layout.length,
        kept._replace(valid=kept.valid & layout.has_image[..., None]),
        layout.grid,
        positions=plan.positions,
        capacity=capacity,
        clips=layout.clips,
    )
    return constrain_rows(plan.mesh, sequence)


def prefill_to_cut(
    params: Params,
    backbone: Backbone,
    pruner: Pruner,
    kept: Kept,
    layout: PromptLayout,
    *,
    plan: Plan,
) -> tuple[vlm.PausedPrefill, Int[Array, "b 2"]]:
    """Runs the language model up to the cut where the pruner decides how many tokens remain.

    Args:
        params: the model's weights.
        backbone: the model.
        pruner: a pruner with exactly one cut, a place between layers where it drops tokens.
        kept: kept tokens before the first layer, one row per (image, prompt) pair.
        layout: the prompts, and the pair of each image.
        plan: static part of the program.

    Returns:
        The state of the language model at the cut; and [b, 2], the numbers of all tokens and of
        visual tokens of each row that remain after the cut.
    """
    sequence = build_sequence(params, backbone, kept, layout, plan=plan)
    (cut,) = _make_cuts(pruner, layout, plan)
    paused = vlm.prefill_to_cut(
        params,
        backbone.config,
        sequence,
        cut,
        room=plan.max_tokens - 1,
        execution=plan.execution,
    )
    remains = paused.keep & sequence.rows.valid
    is_remaining_visual = remains & (sequence.image >= 0)
    counts = jnp.stack([remains.sum(1), is_remaining_visual.sum(1)], axis=1)
    return constrain_rows(plan.mesh, (paused, counts))


def prefill(
    params: Params,
    backbone: Backbone,
    pruner: Pruner | None,
    tokens: Kept | vlm.PausedPrefill,
    layout: PromptLayout,
    sampling: Sampling,
    *,
    plan: Plan,
) -> tuple[Decoding, Trace]:
    """Runs the language model over prompts with kept tokens, and samples the first tokens.

    Args:
        params: the model's weights.
        backbone: the model.
        pruner: drops further tokens between layers; None if the plan has no cuts.
        tokens: kept tokens, one row per (image, prompt) pair; or the result of `prefill_to_cut`, to
            continue from its cut.
        layout: the prompts, and the pair of each image.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        plan: static part of the program.

    Returns:
        The decoding state, and the trace of the kept tokens.
    """
    config, paused, order = backbone.config, None, None
    if isinstance(tokens, Kept):
        sequence = build_sequence(params, backbone, tokens, layout, plan=plan)
        if tokens.order is not None:
            order = jnp.where(layout.has_image[..., None], tokens.order[layout.pair], -1)
    else:
        sequence, paused = tokens.sequence, tokens
    prefilled = vlm.prefill(
        params,
        config,
        sequence,
        plan.max_tokens - 1,  # no later token attends to the last token, which needs no slot
        _make_cuts(pruner, layout, plan),
        execution=plan.execution,
        paused=paused,
    )
    prompt_tokens = None
    if sampling.repetition_penalty is not None:
        prompt_tokens = decoding.mark_tokens(config, layout.ids, sequence)
    state = decoding.start(prefilled, prompt_tokens, sampling, plan.max_tokens)
    stages = tuple(rows.without_values() for rows in (sequence, *prefilled.cuts))
    return constrain_rows(plan.mesh, (state, Trace(prefilled.logits, stages, order)))


def first_tokens(
    params: Params,
    backbone: Backbone,
    pruner: Pruner,
    pairs: Pairs,
    layout: PromptLayout,
    sampling: Sampling,
    *,
    plan: Plan,
) -> tuple[Decoding, Trace]:
    """Runs `select` and `prefill` in one program.

    Args:
        params: the model's weights.
        backbone: the model.
        pruner: a pruner whose numbers of kept tokens follow from the images' sizes.
        pairs: the (image, prompt) pairs of a batch, with pixels.
        layout: the prompts, and the pair of each image.
        sampling: how tokens are sampled, from `Sampling.resolve`.
        plan: static part of the program.

    Returns:
        The decoding state, and the trace of the kept tokens.
    """
    kept = select(params, backbone, pruner, pairs, plan=plan)
    return prefill(params, backbone, pruner, kept, layout, sampling, plan=plan)


def _make_cuts(pruner: Pruner | None, layout: PromptLayout, plan: Plan) -> list[vlm.Cut]:
    """Builds the cuts of the language model from the cuts of a pruner.

    Args:
        pruner: selects the tokens at each cut; other pruners than `LayerPruner` have no cuts.
        layout: has the number of tokens of each image that remain after each cut.
        plan: has the pruner's cuts, and the row length of each stage.
    """
    if not isinstance(pruner, LayerPruner):
        return []
    num_queries = {"last": 1, "text": plan.text_slots}

    def make_drop(cut, count):
        # A function, because a lambda in the loop would capture only the last cut.
        return lambda rows, taps: pruner.drop(cut, rows, taps, count)

    return [
        vlm.Cut(
            layer=cut.layer,
            slots=slots,
            drop=make_drop(cut, count),
            taps=cut.taps,
            rows=num_queries[cut.rows],
            renumber=plan.positions == "compact",
            prunes_cache=cut.prunes_cache,
            probe=pruner.probe(),
        )
        for cut, slots, count in zip(plan.cuts, plan.slots[1:], layout.counts, strict=True)
    ]


def resize(kept: Kept, *, capacity: int, mesh: Mesh | None) -> Kept:
    """Changes the padded number of kept tokens.

    Args:
        kept: kept tokens, one row per (image, prompt) pair.
        capacity: new padded number of tokens. Later tokens of a row are dropped.
        mesh: mesh of the weights; None on a single device.

    Returns:
        The kept tokens, padded or truncated.
    """

    def fit(array: Array, padding: int | bool) -> Array:
        array = array[:, :capacity]
        widths = [(0, 0), (0, capacity - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
        return jnp.pad(array, widths, constant_values=padding)

    return constrain_rows(
        mesh,
        Kept(
            index=fit(kept.index, -1),
            place=fit(kept.place, 0),
            tokens=fit(kept.tokens, 0),
            valid=fit(kept.valid, False),
            count=kept.count,
            order=None if kept.order is None else fit(kept.order, -1),
            note=None if kept.note is None else fit(kept.note, 0),
        ),
    )


run_encode = jit_for_weights(encode, ("backbone", "taps", "plan"), answers=True)
run_select = jit_for_weights(select, ("backbone", "plan"), answers=True)
run_rank = jit_for_weights(rank, ("backbone", "plan", "steps"))
run_build_sequence = jit_for_weights(build_sequence, ("backbone", "plan"))
run_prefill_to_cut = jit_for_weights(prefill_to_cut, ("backbone", "plan"), answers=True)
run_prefill = jit_for_weights(prefill, ("backbone", "plan"), answers=True)
run_first_tokens = jit_for_weights(first_tokens, ("backbone", "plan"), answers=True)
run_take: Any = jax.jit(jax_defaults()(take_first), static_argnames="capacity")
run_resize: Any = jax.jit(jax_defaults()(resize), static_argnames=("capacity", "mesh"))


def num_compiled() -> int:
    """Returns how many programs of inference this process has compiled so far."""
    programs = run_encode, run_select, run_rank, run_prefill_to_cut
    programs += run_prefill, run_first_tokens, decoding.run_decode
    num_plain = run_take._cache_size() + run_resize._cache_size()
    return num_plain + sum(program.num_compiled() for program in programs)
