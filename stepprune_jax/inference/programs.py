"""From pixels to the first tokens, as pure functions and as the few programs that run them.

If the images' sizes decide the number of kept tokens, one program runs a batch: `first_tokens`. A
learned stop runs `select` and `prefill`, and the host reads the counts in between. A pruner that
counts at a cut runs `select`, `prefill_to_cut` and `resume`. Shared work has separate programs: the
tower once per image (`encode`), and a ranking once for all budgets (`rank`). Weights are arguments
of every program.
"""

from collections.abc import Sequence as Ordered

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from stepprune_jax.inference import decoding
from stepprune_jax.inference.base import Decoding, Pairs, Plan, PromptLayout, Trace
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
from stepprune_jax.pruning import Kept, Pruner, PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.packing import take_first


def encode(
    params: Params,
    backbone: Backbone,
    pixels: Pixels,
    *,
    taps: Ordered[Tap],
    plan: Plan,
) -> tuple[Float[Array, "i n w"], tuple[Array, ...]]:
    """Runs the tower over images.

    Returns:
        The visual tokens before the projector, with their deep features appended, and the taps in
        the given order.
    """
    tokens, by_name = backbone.encode_image(params, pixels, taps, plan.execution)
    in_order = tuple(by_name[f"{tap.kind}.{tap.layer}"] for tap in taps)
    return constrain_rows(plan.mesh, (tokens, in_order))


def make_pruner_inputs(
    params: Params, backbone: Backbone, pairs: Pairs, *, plan: Plan
) -> PrunerInputs:
    """Builds the inputs of a pruner from encoded images, with a row for each pair."""
    n, tokens = pairs.features.shape[1], pairs.features[pairs.image]
    if plan.is_projected:
        tokens = backbone.project(params, tokens)
    tokens, deep = split_deep(backbone.config, tokens)
    return constrain_rows(
        plan.mesh,
        PrunerInputs(
            tokens=tokens,
            valid=None if pairs.size is None else jnp.arange(n) < pairs.size[:, None],
            grid=pairs.grid,
            text=decoder.embed(params["language"], pairs.words),
            text_valid=jnp.arange(pairs.words.shape[1]) < pairs.num_words[:, None],
            number=pairs.number,
            seed=pairs.seed,
            count=pairs.count,
            taps=tuple(tap[pairs.image] for tap in pairs.taps),
            deep=deep,
        ),
    )


def select(params: Params, backbone: Backbone, pruner: Pruner, pairs: Pairs, *, plan: Plan) -> Kept:
    """Selects tokens of each pair, from images before or after the tower."""
    if pairs.features is None:
        taps = pruner.taps(backbone.config)
        features, taps = encode(params, backbone, pairs.pixels, taps=taps, plan=plan)
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
    """Orders the tokens of each pair; the order has `steps` entries."""
    return pruner.rank(make_pruner_inputs(params, backbone, pairs, plan=plan), steps)


def build_sequence(
    params: Params, backbone: Backbone, kept: Kept, layout: PromptLayout, *, plan: Plan
) -> Sequence:
    """Projects the kept tokens and puts them in place of the images of each prompt."""
    # An image fills at most the slots of a row; one more token reveals that the row is truncated.
    capacity = plan.slots[0]
    kept = jax.tree.map(
        lambda part: part if part.ndim == 1 else part[:, : capacity + 1],
        kept._replace(order=None),
    )
    if not plan.is_projected:
        kept = kept._replace(tokens=backbone.project(params, kept.tokens))
    kept = jax.tree.map(lambda part: part[layout.pair], kept)
    sequence = assemble(
        params,
        backbone,
        layout.ids,
        layout.length,
        kept._replace(valid=kept.valid & layout.has_image[..., None]),
        layout.grid,
        positions=plan.positions,
        capacity=capacity,
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
    """Runs the language model to a pruner's cut, whose selection decides the number of tokens.

    Returns:
        The rows at the cut, and how many tokens of each row remain: all, and visual tokens.
    """
    sequence = build_sequence(params, backbone, kept, layout, plan=plan)
    (cut,) = _make_cuts(pruner, layout, plan)
    paused = vlm.prefill_to_cut(
        params,
        backbone.config,
        sequence,
        cut,
        room=_cache_room(plan),
        execution=plan.execution,
    )
    remains = paused.keep & sequence.rows.valid
    is_visual = remains & (sequence.image >= 0)
    counts = jnp.stack([remains.sum(1), is_visual.sum(1)], axis=1)
    return constrain_rows(plan.mesh, (paused, counts))


def prefill(
    params: Params,
    backbone: Backbone,
    pruner: Pruner | None,
    kept: Kept,
    layout: PromptLayout,
    sampling: Sampling,
    *,
    plan: Plan,
) -> tuple[Decoding, Trace]:
    """Runs the language model over prompts with kept tokens, and samples the first tokens."""
    sequence = build_sequence(params, backbone, kept, layout, plan=plan)
    state, trace = _prefill_rows(params, backbone, pruner, sequence, layout, sampling, plan)
    if kept.order is not None:
        order = jnp.where(layout.has_image[..., None], kept.order[layout.pair], -1)
        trace = trace._replace(order=constrain_rows(plan.mesh, order))
    return state, trace


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
    """Runs `select` and `prefill` as one program, for counts that the images' sizes decide."""
    kept = select(params, backbone, pruner, pairs, plan=plan)
    return prefill(params, backbone, pruner, kept, layout, sampling, plan=plan)


def resume(
    params: Params,
    backbone: Backbone,
    pruner: Pruner,
    paused: vlm.PausedPrefill,
    layout: PromptLayout,
    sampling: Sampling,
    *,
    plan: Plan,
) -> tuple[Decoding, Trace]:
    """Runs the language model from the cut of `prefill_to_cut`, and samples the first tokens."""
    return _prefill_rows(
        params, backbone, pruner, paused.sequence, layout, sampling, plan, paused=paused
    )


def _prefill_rows(
    params: Params,
    backbone: Backbone,
    pruner: Pruner | None,
    sequence: Sequence,
    layout: PromptLayout,
    sampling: Sampling,
    plan: Plan,
    *,
    paused: vlm.PausedPrefill | None = None,
) -> tuple[Decoding, Trace]:
    """Runs the language model over rows, with the pruner's cuts, and samples the first tokens."""
    config = backbone.config
    result = vlm.prefill(
        params,
        config,
        sequence,
        _cache_room(plan),
        _make_cuts(pruner, layout, plan),
        execution=plan.execution,
        paused=paused,
    )
    prompt_tokens = None
    if sampling.repetition_penalty is not None:
        prompt_tokens = decoding.mark_tokens(config, layout.ids, sequence)
    state = decoding.start(result, prompt_tokens, sampling, plan.max_tokens)
    stages = tuple(rows.without_values() for rows in (sequence, *result.cuts))
    return constrain_rows(plan.mesh, (state, Trace(result.logits, stages)))


def _cache_room(plan: Plan) -> int:
    """Returns the cache slots for new tokens; the last token is never read, so it needs none."""
    return plan.max_tokens - 1


def _make_cuts(pruner: Pruner | None, layout: PromptLayout, plan: Plan) -> list[vlm.Cut]:
    """Builds the cuts of a plan, with the functions of its pruner."""
    num_queries = {"last": 1, "text": plan.text_slots}

    def make_drop(cut, count):
        return lambda rows, taps: pruner.drop(cut, rows, taps, count)

    return [
        vlm.Cut(
            layer=cut.layer,
            slots=slots,
            drop=make_drop(cut, count),
            taps=cut.taps,
            rows=num_queries[cut.rows],
            renumber=plan.positions == "compact",
            forgets=cut.forgets,
            probe=pruner.probe(),
        )
        for cut, slots, count in zip(plan.cuts, plan.slots[1:], layout.counts, strict=True)
    ]


def resize(kept: Kept, *, capacity: int, mesh: Mesh | None) -> Kept:
    """Pads or truncates the kept tokens to a capacity that holds every row."""

    def fit(part: Array, padding: int | bool) -> Array:
        part = part[:, :capacity]
        widths = [(0, 0), (0, capacity - part.shape[1]), *[(0, 0)] * (part.ndim - 2)]
        return jnp.pad(part, widths, constant_values=padding)

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
run_resume = jit_for_weights(resume, ("backbone", "plan"), answers=True)
run_take = jax.jit(jax_defaults()(take_first), static_argnames="capacity")
run_resize = jax.jit(jax_defaults()(resize), static_argnames=("capacity", "mesh"))


def num_compiled() -> int:
    """Returns how many of these programs, and of decoding, this process has compiled so far."""
    programs = run_encode, run_select, run_rank, run_prefill_to_cut
    programs += run_prefill, run_first_tokens, run_resume, decoding.run_decode
    count = run_take._cache_size() + run_resize._cache_size()
    return count + sum(program.num_compiled() for program in programs)
