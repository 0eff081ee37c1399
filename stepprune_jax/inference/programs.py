"""From pixels to the first token, as pure functions and as the few programs that run them.

A batch whose counts are known on the host runs as one program, `begin`; one whose pruner stops by
itself as two, `choose` and `begin`, with its counts read back between them; one whose pruner counts
at a cut as `choose`, `halt` and `begin`. Shared work has its own programs: the tower once per image
(`encode`), and a ranking once for all budgets (`rank`). Weights are arguments of every program.
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
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels
from stepprune_jax.models.sequence import Sequence, split_deep
from stepprune_jax.models.stack import Params
from stepprune_jax.parallel.placement import constrain_rows
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.policy.jax_settings import jax_defaults
from stepprune_jax.pruning import Kept, Pruner, PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.base import take_first


def encode(
    params: Params,
    backbone: Backbone,
    pixels: Pixels,
    *,
    taps: Ordered[Tap],
    plan: Plan,
) -> tuple[Float[Array, "i n w"], tuple[Array, ...]]:
    """Runs the tower over images; returns the features and the taps in their order."""
    tokens, tapped = backbone.encode_image(params, pixels, taps, plan.execution)
    chosen = tuple(tapped[f"{tap.kind}.{tap.layer}"] for tap in taps)
    return constrain_rows(plan.mesh, (tokens, chosen))


def make_pruner_inputs(
    params: Params, backbone: Backbone, pairs: Pairs, *, plan: Plan
) -> PrunerInputs:
    """Builds a pruner's view of encoded images, with a row for each pair."""
    n, tokens = pairs.images.shape[1], pairs.images[pairs.image]
    if plan.projected:
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


def choose(params: Params, backbone: Backbone, pruner: Pruner, pairs: Pairs, *, plan: Plan) -> Kept:
    """Keeps tokens of each pair, from images before or after the tower."""
    if pairs.taps is None:
        taps = pruner.taps(backbone.config)
        tokens, taps = encode(params, backbone, pairs.images, taps=taps, plan=plan)
        pairs = pairs._replace(images=tokens, taps=taps)
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


def place(
    params: Params, backbone: Backbone, kept: Kept, texts: PromptLayout, *, plan: Plan
) -> Sequence:
    """Projects the kept tokens and puts them in place of the images."""
    # No image fills more slots than a row has; one more slot reveals that the row is truncated.
    capacity = plan.slots[0]
    parts = (kept.index, kept.place, kept.tokens, kept.valid)
    index, at, tokens, valid = (part[:, : capacity + 1] for part in parts)
    tokens = tokens if plan.projected else backbone.project(params, tokens)
    index, at, tokens, valid = (part[texts.pair] for part in (index, at, tokens, valid))
    note = None if kept.note is None else kept.note[:, : capacity + 1][texts.pair]
    visual = vlm.Visual(tokens, valid & texts.shown[..., None], index, at, texts.grid, note)
    sequence = vlm.assemble(
        params, backbone, texts.ids, texts.length, visual, plan.positions, capacity
    )
    return constrain_rows(plan.mesh, sequence)


def halt(
    params: Params,
    backbone: Backbone,
    pruner: Pruner,
    kept: Kept,
    texts: PromptLayout,
    *,
    plan: Plan,
) -> tuple[vlm.PausedPrefill, Int[Array, "b 2"]]:
    """Runs the language model to a pruner's cut, whose choice sets the number of tokens.

    Returns the rows, and how many of their tokens remain: in all, and of the images.
    """
    sequence = place(params, backbone, kept, texts, plan=plan)
    (cut,) = decoding.make_cuts(pruner, texts, plan)
    room = plan.max_tokens - 1  # as in `decoding.start`
    halted = vlm.halt(params, backbone.config, sequence, cut, room=room, execution=plan.execution)
    remain = halted.keep & sequence.rows.valid
    visual = remain & (sequence.image >= 0)
    count = jnp.stack([remain.sum(1), visual.sum(1)], axis=1)
    return constrain_rows(plan.mesh, (halted, count))


def begin(
    params: Params,
    backbone: Backbone,
    pruner: Pruner | None,
    tokens: Kept | Pairs | vlm.PausedPrefill,
    texts: PromptLayout,
    sampling: Sampling,
    *,
    plan: Plan,
) -> tuple[Decoding, Trace]:
    """Runs the language model over prompts with kept tokens, and draws the first tokens.

    Tokens that have not been kept before are chosen here, by `choose`.
    """
    if isinstance(tokens, vlm.PausedPrefill):
        return decoding.start(
            params, backbone.config, pruner, tokens.sequence, texts, sampling, plan, tokens
        )
    kept = tokens
    if isinstance(tokens, Pairs):
        kept = choose(params, backbone, pruner, tokens, plan=plan)
    sequence = place(params, backbone, kept, texts, plan=plan)
    state, trace = decoding.start(params, backbone.config, pruner, sequence, texts, sampling, plan)
    if kept.order is not None:
        order = jnp.where(texts.shown[..., None], kept.order[texts.pair], -1)
        trace = trace._replace(order=constrain_rows(plan.mesh, order))
    return state, trace


def resize(kept: Kept, *, capacity: int, mesh: Mesh | None) -> Kept:
    """Cuts or pads the kept tokens to a capacity that holds every row."""

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
run_make_pruner_inputs = jit_for_weights(make_pruner_inputs, ("backbone", "plan"))
run_choose = jit_for_weights(choose, ("backbone", "plan"), answers=True)
run_rank = jit_for_weights(rank, ("backbone", "plan", "steps"))
run_place = jit_for_weights(place, ("backbone", "plan"))
run_halt = jit_for_weights(halt, ("backbone", "plan"), answers=True)
run_begin = jit_for_weights(begin, ("backbone", "plan"), answers=True)
run_take = jax.jit(jax_defaults()(take_first), static_argnames="capacity")
run_resize = jax.jit(jax_defaults()(resize), static_argnames=("capacity", "mesh"))


def num_compiled() -> int:
    """Counts these programs and those of decoding compiled so far in this process."""
    programs = (run_encode, run_choose, run_rank, run_place, run_halt, run_begin)
    programs += (decoding.run_decode,)
    count = run_take._cache_size() + run_resize._cache_size()
    return count + sum(program.num_compiled() for program in programs)
