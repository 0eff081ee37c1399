"""`generate` and `stream`: answers to questions about pictures."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.inference import decoding
from stepprune_jax.inference.prefix import (
    Prefix,
    SelectFn,
    check_budget,
    check_positions,
    policy_selector,
    prepare,
)
from stepprune_jax.inference.request import Picture, Prompt, Request, read_request
from stepprune_jax.inference.sampling import check_sampling
from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.models.layers import check_attention
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT
from stepprune_jax.parallel.placement import mesh_of


class Answer(NamedTuple):
    """What the model said to one prompt.

    Times are those of a warm program, without compilation (see `generate`).

    Attributes:
        text: special tokens dropped, stripped of white space at both ends.
        token_ids: all ids generated, the stop id included.
        visual_tokens: of the prompt's images before pruning.
        kept: of these, how many the language model saw.
        ttft_ms: milliseconds from the call to the first token of the batch: pictures to pixels,
            tower, selection, projector, prefill.
        tokens_per_s: decode steps per second after the first token; a batch makes one token per
            row in each. 0 if there was no further step.
    """

    text: str
    token_ids: tuple[int, ...]
    visual_tokens: int
    kept: int
    ttft_ms: float
    tokens_per_s: float


class Options(NamedTuple):
    """How to answer; the fields are described at `generate`."""

    policy: Policy | None = None
    budget: int | None = None
    stop_bias: float | int | None = None
    select_fn: SelectFn | None = None
    positions: str = "original"
    max_tokens: int = 128
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    seed: int | Array = 0
    stop_ids: Sequence[int] | None = None
    context_limit: int = CONTEXT_LIMIT
    attention: str = "matmul"
    warm_up: bool = True


class _Event(NamedTuple):
    """One token of one row, and the text that became certain with it."""

    row: int
    token: int
    piece: str


class _Begun(NamedTuple):
    """A batch after its first token."""

    prefix: Prefix
    state: decoding.Decoding
    settings: decoding.Settings
    ttft_ms: float


# Batches whose programs have been compiled in this process.
_WARM: set[Any] = set()


def generate(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[Picture] | Picture | None] | None = None,
    *,
    policy: Policy | None = None,
    budget: int | None = None,
    stop_bias: float | int | None = None,
    select_fn: SelectFn | None = None,
    positions: str = "original",
    max_tokens: int = 128,
    temperature: float | int = 0.0,
    top_p: float | int = 1.0,
    seed: int | Array = 0,
    stop_ids: Sequence[int] | None = None,
    context_limit: int = CONTEXT_LIMIT,
    on_token: Callable[[int, int, str], None] | None = None,
    attention: str = "matmul",
    warm_up: bool = True,
) -> list[Answer]:
    """Answers a batch of prompts, with or without pictures, with or without pruning.

    A row's answer does not depend on the rest of the batch. Programs are compiled once per bucket
    of shapes; temperature, top_p and stop ids may change freely.

    Args:
        model: from `load_vlm`, on one device or sharded over a mesh.
        prompts: the user's words: a question each, or the turns of a conversation (user first) that
            ends with a question. The template is added here.
        images: for each prompt its pictures (paths or Pillow images), or None.
        policy: prunes each image for its prompt's words.
        budget: exact number of tokens that the policy keeps of each image; None lets it stop by
            itself.
        stop_bias: added to the policy's stop logits, in place of its own bias.
        select_fn: another way to prune, `(features [i, n, d], text [i, l, e], text_mask [i, l]) ->
            Pruned`, in place of `policy`; rows are pairs of image and prompt.
        positions: position ids of kept tokens: "original" or "compact".
        max_tokens: longest answer.
        temperature: 0 for greedy.
        top_p: probability mass to sample from.
        seed: an integer or a PRNG key. The same seed gives the same answer.
        stop_ids: ids that end an answer; by default those of the configuration.
        context_limit: longest prompt after expansion, with the counts that were kept; longer ones
            are cut at the right end, with a warning.
        on_token: called with (row, id, text) at each token as it comes; the texts of a row
            concatenate to its answer.
        attention: "matmul", "xla" or "cudnn".
        warm_up: runs a batch of new shapes once before the one that is timed, so that times hold
            no compilation.

    Returns:
        An `Answer` per prompt.

    Raises:
        FileNotFoundError: a picture is missing.
        TypeError: a prompt of a wrong type.
        ValueError: bad prompts, pictures or settings; the message names them.
    """
    options = Options(
        policy, budget, stop_bias, select_fn, positions, max_tokens, temperature, top_p, seed,
        stop_ids, context_limit, attention, warm_up,
    )  # fmt: skip
    if on_token is None:
        return _answer_at_once(model, prompts, images, options)
    steps = _answer_by_token(model, prompts, images, options)
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            return end.value
        on_token(*event)


def stream(
    model: VLM,
    prompt: Prompt,
    images: Sequence[Picture] | Picture | None = None,
    **options: Any,
) -> Iterator[str]:
    """Answers one prompt piece by piece.

    Args:
        model: from `load_vlm`.
        prompt: as in `generate`.
        images: the prompt's pictures.
        **options: as in `generate`, but for `on_token`.

    Yields:
        Pieces of text as they become certain; together they are the text of the answer.

    Returns:
        The `Answer`, as the value of the generator.
    """
    answers = yield from _pieces(_answer_by_token(model, [prompt], [images], Options(**options)))
    return answers[0]


def check_options(config: LlavaConfig, options: Options) -> None:
    """Refuses settings that mean nothing, before any work.

    Args:
        config: the model's configuration.
        options: the settings.

    Raises:
        ValueError: which one, and what was expected.
    """
    check_sampling(options.temperature, options.top_p)
    check_positions(options.positions)
    check_budget(options.policy, config, options.budget)
    check_attention(options.attention)
    if options.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(f"attention 'cudnn' needs a GPU, jax uses {jax.default_backend()!r}")
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens is {options.max_tokens}, expected at least 1")
    if options.context_limit < 1:
        raise ValueError(f"context_limit is {options.context_limit}, expected at least 1")
    if options.policy is not None and options.select_fn is not None:
        raise ValueError("policy and select_fn are both given, expected one")
    if options.stop_bias is not None and options.policy is None:
        raise ValueError("a stop bias (--stop_bias) needs a policy (--policy)")


def _begin(model: VLM, prompts: Sequence[Prompt], images: Any, options: Options) -> _Begun:
    """Everything up to the first token, timed when all its programs are compiled."""
    check_options(model.config, options)
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: load it with load_vlm")
    begin = time.perf_counter()
    request = read_request(model.tokenizer, model.image_settings, model.config, prompts, images)
    on_host = time.perf_counter() - begin
    selector = options.select_fn
    if options.policy is not None:
        selector = policy_selector(model, options.policy, options.budget, options.stop_bias)
    key = jax.random.key(options.seed) if isinstance(options.seed, int) else options.seed
    stops = model.config.eos_token_ids if options.stop_ids is None else options.stop_ids
    settings = decoding.Settings(
        np.float32(options.temperature), np.float32(options.top_p), np.array(stops, np.int32)
    )
    keys = decoding.row_keys(key, len(request.ids))

    def run() -> _Begun:
        begin = time.perf_counter()
        prefix, state = _first_token(model, request, selector, keys, settings, options)
        taken = on_host + time.perf_counter() - begin
        return _Begun(prefix, state, settings, 1000 * taken)

    begun = run()
    signature = (
        model.config, mesh_of(model.params), jax.tree.leaves(model.params)[0].dtype,
        begun.prefix.shapes, options.max_tokens, settings.stop_ids.shape,
        options.policy and options.policy.config, options.budget is None, id(options.select_fn),
    )  # fmt: skip
    if options.warm_up and signature not in _WARM:
        if options.max_tokens > 1:
            jax.block_until_ready(_continue(model, begun, 0).token)
        begun = run()
    _WARM.add(signature)
    return begun


def _first_token(
    model: VLM, request: Request, selector: SelectFn | None, keys: Array, settings: Any,
    options: Options,
) -> tuple[Prefix, decoding.Decoding]:  # fmt: skip
    """Prefix, prefill and first token, waited for."""
    prefix = prepare(
        model, request, select_fn=selector, positions=options.positions,
        context_limit=options.context_limit, attention=options.attention,
    )  # fmt: skip
    state = decoding.run_start(
        model.params, model.config, prefix.sequence, keys, settings,
        max_tokens=options.max_tokens, attention=options.attention, mesh=mesh_of(model.params),
    )  # fmt: skip
    return prefix, jax.block_until_ready(state)


def _continue(model: VLM, begun: _Begun, limit: int) -> decoding.Decoding:
    """All steps up to a limit; consumes the state. One step at a time is the same program."""
    return decoding.run_decode(
        model.params, model.config, begun.state, begun.settings, np.int32(limit),
        mesh=mesh_of(model.params),
    )  # fmt: skip


def _answers(model: VLM, begun: _Begun, rows: Sequence[Sequence[int]], rate: float) -> list[Answer]:
    """Puts answers together."""
    prefix, answers = begun.prefix, []
    for ids, visual, kept in zip(rows, prefix.visual_tokens, prefix.kept, strict=True):
        text, ids = answer_text(model.tokenizer, ids), tuple(map(int, ids))
        answers.append(Answer(text, ids, visual, kept, begun.ttft_ms, rate))
    return answers


def _rate(steps: int, seconds: float) -> float:
    """Steps per second, 0 for none."""
    return steps / seconds if steps else 0.0


def _answer_at_once(
    model: VLM, prompts: Sequence[Prompt], images: Any, options: Options
) -> list[Answer]:
    """Answers in one program per batch."""
    begun = _begin(model, prompts, images, options)
    begin = time.perf_counter()
    end = _continue(model, begun, options.max_tokens)
    tokens, count, step = jax.device_get((end.tokens, end.count, end.step))
    rate = _rate(int(step) - 1, time.perf_counter() - begin)
    return _answers(
        model, begun, [row[:n].tolist() for row, n in zip(tokens, count, strict=True)], rate
    )


def _answer_by_token(
    model: VLM, prompts: Sequence[Prompt], images: Any, options: Options
) -> Generator[_Event, None, list[Answer]]:
    """Answers with a look at each token."""
    begun = _begin(model, prompts, images, options)
    rows: list[list[int]] = [[] for _ in prompts]
    texts = [TextStream(model.tokenizer) for _ in prompts]
    seconds, step = 0.0, 1
    before = np.zeros(len(rows), bool)
    token, finished = jax.device_get((begun.state.token, begun.state.finished))
    while True:
        last = step == options.max_tokens
        for row in np.flatnonzero(~before).tolist():
            rows[row].append(int(token[row]))
            piece = texts[row].add(int(token[row]))
            if finished[row] or last:
                piece += texts[row].finish()
            yield _Event(row, int(token[row]), piece)
        if last or finished.all():
            return _answers(model, begun, rows, _rate(step - 1, seconds))
        begin, before = time.perf_counter(), finished
        begun = begun._replace(state=_continue(model, begun, step + 1))
        token, finished = jax.device_get((begun.state.token, begun.state.finished))
        seconds, step = seconds + time.perf_counter() - begin, step + 1


def _pieces(
    events: Generator[_Event, None, list[Answer]],
) -> Generator[str, None, list[Answer]]:
    """The texts of events, without the empty ones."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return end.value
        if event.piece:
            yield event.piece
