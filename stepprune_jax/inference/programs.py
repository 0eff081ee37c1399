"""From pixels to the first token, as pure functions and as the few programs that run them.

    encode -> see -> keep -> place -> decoding.start

`choose` is the first three of them, `begin` the others, and `answer` all: a batch whose counts are
known on the host runs as one program, and one whose pruner stops by itself as two, with its counts
read back between them. Shared work has its own programs: the tower once per image (`encode`), and
a ranking once for all budgets (`rank`). Weights are arguments of every program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.inference import decoding
from stepprune_jax.inference.decoding import Decoding, RunOptions, Sampling, Stages, Trace
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import constrain_rows, jit_for_weights
from stepprune_jax.pruning import Kept, Pruner, Ranking, View
from stepprune_jax.pruning.base import take_first


class Features(NamedTuple):
    """Images after the tower.

    Attributes:
        tokens: [i, n, d] visual tokens; a smaller image's are a prefix of its row.
        taps: [i, ...] intermediates of the tower, in the order of `Pruner.taps`.
    """

    tokens: Float[Array, "i n d"]
    taps: tuple[Array, ...] = ()


class Pixels(NamedTuple):
    """Images before the tower.

    Attributes:
        values: result of the family's preprocessing.
    """

    values: Any


class Pairs(NamedTuple):
    """The (image, prompt) pairs of a batch, which are the rows of a pruner.

    Attributes:
        image: [r] row of the image.
        grid: [r, 2] rows and columns of the image's patches.
        size: [r] tokens of the image; None where all have n.
        words: [r, w] ids of the user's words.
        num_words: [r] number of these.
        number: [r] number of the row, the seed of its random draws.
        count: [r] tokens to keep if known, otherwise all.
    """

    image: Int[Array, "r"]
    grid: Int[Array, "r 2"]
    size: Int[Array, "r"] | None
    words: Int[Array, "r w"]
    num_words: Int[Array, "r"]
    number: Int[Array, "r"]
    count: Int[Array, "r"]


class Texts(NamedTuple):
    """Prompts with the places of their images.

    Attributes:
        ids: [b, l] right-padded ids, with -200 in place of an image.
        length: [b] number of ids.
        pair: [b, j] row of each image in `Pairs`.
        shown: [b, j] True = image.
        grid: [b, j, 2] rows and columns of its patches.
        counts: for each cut, [b, j] tokens of each image that remain after it.
    """

    ids: Int[Array, "b l"]
    length: Int[Array, "b"]
    pair: Int[Array, "b j"]
    shown: Bool[Array, "b j"]
    grid: Int[Array, "b j 2"]
    counts: tuple[Int[Array, "b j"], ...] = ()


class Choice(NamedTuple):
    """How tokens are kept; static.

    Attributes:
        pruner: the result of `Pruner.program`.
        capacity: padded number of kept tokens per image.
        execution: how the tower's blocks are run.
    """

    pruner: Pruner
    capacity: int
    execution: Execution


def encode(
    params: dict[str, Any],
    config: ModelConfig,
    pixels: Any,
    *,
    taps: tuple[Tap, ...],
    execution: Execution,
    mesh: Mesh | None,
) -> Features:
    """Runs the tower over images."""
    tokens, tapped = config.family.encode_image(params, config, pixels, taps, execution)
    chosen = tuple(tapped[f"{tap.kind}.{tap.layer}"] for tap in taps)
    return constrain_rows(mesh, Features(tokens, chosen))


def see(
    params: dict[str, Any],
    config: ModelConfig,
    images: Features,
    pairs: Pairs,
    *,
    projected: bool,
    mesh: Mesh | None,
) -> View:
    """Builds a pruner's view, of projected or unprojected tokens, with a row for each pair."""
    n, tokens = images.tokens.shape[1], images.tokens[pairs.image]
    if projected:
        tokens = config.family.project(params, config, tokens)
    return constrain_rows(
        mesh,
        View(
            tokens=tokens,
            valid=None if pairs.size is None else jnp.arange(n) < pairs.size[:, None],
            grid=pairs.grid,
            text=decoder.embed(params["language"], pairs.words),
            text_valid=jnp.arange(pairs.words.shape[1]) < pairs.num_words[:, None],
            number=pairs.number,
            count=pairs.count,
            taps=tuple(tap[pairs.image] for tap in images.taps),
        ),
    )


def choose(
    params: dict[str, Any],
    config: ModelConfig,
    learned: Any,
    images: Pixels | Features,
    pairs: Pairs,
    *,
    choice: Choice,
    mesh: Mesh | None,
) -> Kept:
    """Keeps tokens of each pair.

    Args:
        params: the model's weights.
        config: the model's shape.
        learned: trained parameters of the pruner.
        images: images before or after the tower.
        pairs: the other inputs of the pruner.
        choice: how tokens are kept.
        mesh: mesh of the weights.

    Returns:
        The kept tokens.
    """
    pruner = choice.pruner
    if isinstance(images, Pixels):
        images = encode(
            params,
            config,
            images.values,
            taps=pruner.taps(config),
            execution=choice.execution,
            mesh=mesh,
        )
    view = see(params, config, images, pairs, projected=pruner.after_projector, mesh=mesh)
    return pruner.select(learned, view, choice.capacity)


def rank(
    params: dict[str, Any],
    config: ModelConfig,
    learned: Any,
    images: Features,
    pairs: Pairs,
    *,
    pruner: Pruner,
    steps: int,
    mesh: Mesh | None,
) -> Ranking:
    """Orders the tokens of each pair; the order has `steps` entries."""
    view = see(params, config, images, pairs, projected=pruner.after_projector, mesh=mesh)
    return pruner.rank(learned, view, steps)


def place(
    params: dict[str, Any],
    config: ModelConfig,
    kept: Kept,
    texts: Texts,
    *,
    capacity: int,
    positions: str,
    projected: bool,
    mesh: Mesh | None,
) -> vlm.Sequence:
    """Projects the kept tokens and puts them in place of the images.

    Args:
        params: the model's weights.
        config: the model's shape.
        kept: kept tokens of each pair.
        texts: the prompts.
        capacity: length of the rows.
        positions: "original" or "compact"; see `vlm.assemble`.
        projected: whether the tokens are already projected.
        mesh: mesh of the weights.

    Returns:
        The rows that enter the language model.
    """
    # No image fills more slots than a row has; one more slot reveals that the row is truncated.
    parts = (kept.index, kept.place, kept.tokens, kept.valid)
    index, at, tokens, valid = (part[:, : capacity + 1] for part in parts)
    tokens = tokens if projected else config.family.project(params, config, tokens)
    index, at, tokens, valid = (part[texts.pair] for part in (index, at, tokens, valid))
    visual = vlm.Visual(tokens, valid & texts.shown[..., None], index, at, texts.grid)
    sequence = vlm.assemble(params, config, texts.ids, texts.length, visual, positions, capacity)
    return constrain_rows(mesh, sequence)


def begin(
    params: dict[str, Any],
    config: ModelConfig,
    learned: Any,
    kept: Kept,
    texts: Texts,
    sampling: Sampling,
    *,
    stages: Stages,
    options: RunOptions,
    mesh: Mesh | None,
) -> tuple[Decoding, Trace]:
    """Runs the language model over prompts with kept tokens, and draws the first tokens.

    Args:
        params: the model's weights.
        config: the model's shape.
        learned: trained parameters of the pruner.
        kept: kept tokens of each pair.
        texts: the prompts.
        sampling: how tokens are drawn.
        stages: static sizes, and cuts between layers.
        options: how the model is run.
        mesh: mesh of the weights.

    Returns:
        The state after the first tokens, and the record of the prefill.
    """
    sequence = place(
        params,
        config,
        kept,
        texts,
        capacity=stages.slots[0],
        positions=options.positions,
        projected=stages.projected,
        mesh=mesh,
    )
    penalised = sampling.repetition_penalty is not None
    state, trace = decoding.start(
        params,
        config,
        learned,
        sequence,
        texts.counts,
        sampling,
        stages=stages,
        options=options,
        seen=decoding.seen_ids(config, texts.ids, texts.length) if penalised else None,
        mesh=mesh,
    )
    if kept.order is not None:
        order = jnp.where(texts.shown[..., None], kept.order[texts.pair], -1)
        trace = trace._replace(order=constrain_rows(mesh, order))
    return state, trace


def answer(
    params: dict[str, Any],
    config: ModelConfig,
    learned: Any,
    images: Pixels | Features,
    pairs: Pairs,
    texts: Texts,
    sampling: Sampling,
    *,
    choice: Choice,
    stages: Stages,
    options: RunOptions,
    mesh: Mesh | None,
) -> tuple[Decoding, Trace]:
    """Runs `choose` and then `begin`, for counts known in advance; arguments as there."""
    kept = choose(params, config, learned, images, pairs, choice=choice, mesh=mesh)
    return begin(
        params, config, learned, kept, texts, sampling, stages=stages, options=options, mesh=mesh
    )


run_encode = jit_for_weights(encode, ("config", "taps", "execution", "mesh"))
run_see = jit_for_weights(see, ("config", "projected", "mesh"))
run_choose = jit_for_weights(choose, ("config", "choice", "mesh"))
run_rank = jit_for_weights(rank, ("config", "pruner", "steps", "mesh"))
run_begin = jit_for_weights(begin, ("config", "stages", "options", "mesh"))
run_answer = jit_for_weights(answer, ("config", "choice", "stages", "options", "mesh"))
run_take = jax.jit(take_first, static_argnames="capacity")


def num_compiled() -> int:
    """Counts these programs and those of decoding compiled so far in this process."""
    programs = (run_encode, run_choose, run_rank, run_begin, run_answer, decoding.run_decode)
    return run_take._cache_size() + sum(program.num_compiled() for program in programs)
