"""`generate` and `stream`: answers to questions about images."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import check_fits
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.inference import decoding, pipeline
from stepprune_jax.inference.buckets import row_bucket
from stepprune_jax.inference.decoding import RunOptions
from stepprune_jax.inference.pipeline import Begun, Prompts, read_images
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import ImageLike, Prompt, Request, read_request
from stepprune_jax.inference.sampling import check_sampling
from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import fetch
from stepprune_jax.pruning import POSITIONS, Budget, Method, Policy, Pruner, make_method
from stepprune_jax.settings import is_count, is_number


class Answer(NamedTuple):
    """The answer to one prompt.

    Times are those of warm programs, without compilation (see `Options.warm_up`).

    Attributes:
        text: the text, without special tokens and surrounding white space.
        token_ids: all generated ids, including the stop id.
        visual_tokens: visual tokens of the prompt's images before pruning.
        kept: number of these that remain in the language model after its last cut.
        kept_indices: for each image of the prompt, the indices of these tokens in raster order from
            0, and -1 for merged ones. In order of choice for methods that choose sequentially or by
            a score (`Ranker`s), otherwise in the order of the row.
        grids: for each image of the prompt, rows and columns of its tokens before pruning.
        ttft_ms: milliseconds from the call to the first token of the batch: image preprocessing,
            tower, selection, projector, prefill.
        tokens_per_s: decoding steps per second after the first token; each step generates one token
            per row. 0 if there was no further step.
    """

    text: str
    token_ids: tuple[int, ...]
    visual_tokens: int
    kept: int
    kept_indices: tuple[tuple[int, ...], ...]
    grids: tuple[tuple[int, int], ...]
    ttft_ms: float
    tokens_per_s: float


class Options(NamedTuple):
    """Keyword arguments of `generate` and `stream`.

    Attributes:
        pruner: the pruner: a name of `PRUNERS`, a custom `Pruner`, or a `Method`; by default that
            of the policy, or none.
        budget: tokens to keep per image: a count, a `Budget`, or text for `Budget.parse`; None lets
            a policy stop by itself.
        policy: the policy of a trained pruner.
        mean_budget: mean number of tokens to keep per image, instead of `budget`; sets the stop
            bias from the policy's calibration.
        stop_bias: number added to the policy's stop logits, instead of its own bias.
        pruner_options: fields of the named pruner.
        positions: position ids of kept tokens: "own", as in the authors' program, "original" or
            "compact".
        max_tokens: longest answer, in tokens.
        temperature: sampling temperature; 0 is greedy.
        top_p: probability mass to sample from.
        repetition_penalty: penalty on tokens of the prompt and the answer so far, see
            `sampling.penalise`; by default that of the model's folder, or 1, which is none.
        seed: an integer or a PRNG key. The same seed gives the same answer.
        stop_ids: ids that end an answer; by default those of the configuration.
        context_limit: longest prompt after expansion, with the kept tokens; longer ones are
            truncated at the right end, with a warning. None for that of the model's family.
        execution: how the model's layers are run.
        warm_up: whether to run a batch of new shapes once before the timed run, so that times
            include no compilation.
        trace: called with the `Begun` batch once the first tokens are known.
    """

    pruner: str | Pruner | Method | None = None
    budget: int | str | Budget | None = None
    policy: Policy | None = None
    mean_budget: float | int | None = None
    stop_bias: float | int | None = None
    pruner_options: Mapping[str, Any] | None = None
    positions: str = "own"
    max_tokens: int = 128
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    repetition_penalty: float | int | None = None
    seed: int | Array = 0
    stop_ids: Sequence[int] | None = None
    context_limit: int | None = None
    execution: Execution = Execution()
    warm_up: bool = True
    trace: Callable[[Begun], None] | None = None


class _Event(NamedTuple):
    """A token of a row, and the text that became final with it."""

    row: int
    token: int
    piece: str


class _Begun(NamedTuple):
    """A batch after its first token."""

    batch: Begun
    sampling: decoding.Sampling
    ttft_ms: float
    grids: list[tuple[tuple[int, int], ...]]


def generate(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
    *,
    on_token: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> list[Answer]:
    """Answers a batch of prompts, with or without images, with or without pruning.

    A row's answer does not depend on the rest of the batch. Programs are compiled once per bucket
    of shapes; changing temperature, top_p or stop ids compiles nothing.

    Args:
        model: the model from `load_vlm`, on one device or sharded over a mesh.
        prompts: the user's text: a question each, or the turns of a conversation that ends with a
            question. The chat template is added here.
        images: for each prompt its images (paths or Pillow images), or None.
        on_token: called with (row, id, text) for each token as it is generated; the texts of a row
            concatenate to its answer.
        **options: fields of `Options`.

    Returns:
        One `Answer` per prompt.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt of a wrong type, or an unknown option.
        ValueError: bad prompts, images or options; the message names them.
    """
    if on_token is None:
        return _answer_at_once(model, prompts, images, Options(**options))
    steps = _answer_by_token(model, prompts, images, Options(**options))
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            return end.value
        on_token(*event)


def stream(
    model: VLM,
    prompt: Prompt,
    images: Sequence[ImageLike] | ImageLike | None = None,
    **options: Any,
) -> Iterator[str]:
    """Streams the answer to one prompt.

    Args:
        model: the model from `load_vlm`.
        prompt: as in `generate`.
        images: the prompt's images.
        **options: fields of `Options`.

    Yields:
        Pieces of text as they become final; they concatenate to the answer's text.

    Returns:
        The `Answer`, as the value of the generator.
    """
    answers = yield from _pieces(_answer_by_token(model, [prompt], [images], Options(**options)))
    return answers[0]


def method_of(config: ModelConfig, options: Options) -> Method:
    """Builds the method that the options select, and checks that it fits the model.

    Args:
        config: the model's configuration.
        options: the options.

    Raises:
        TypeError: the pruner is not a name, a `Pruner` or a `Method`.
        ValueError: an unknown pruner, an unsupported budget, or a policy of another model.
    """
    pruner = options.pruner
    if isinstance(pruner, Method | Pruner):
        for name in ("budget", "policy", "mean_budget", "stop_bias", "pruner_options"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name} is given with a pruner that has its own")
        method = pruner if isinstance(pruner, Method) else Method(pruner)
    elif not isinstance(pruner, str | None):
        raise TypeError(f"pruner is {pruner!r}, expected a name, a Pruner or a Method")
    else:
        method = make_method(
            pruner,
            read_budget(options.budget, options.mean_budget, options.stop_bias),
            policy=options.policy,
            stop_bias=options.stop_bias,
            options=options.pruner_options,
        )
    if options.policy is not None:
        check_fits(options.policy, config)
    method.pruner.check(config, config.max_image_tokens)
    return method


def read_budget(
    budget: int | str | Budget | None,
    mean_budget: float | int | None,
    stop_bias: float | int | None = None,
) -> int | str | Budget | None:
    """Reads a budget that may be a mean budget.

    Args:
        budget: a budget for `make_method`.
        mean_budget: a mean count instead.
        stop_bias: a stop bias, which excludes a mean count.

    Returns:
        The budget that is given, or None.

    Raises:
        ValueError: a mean count with another of the three, or one that is not a positive number.
    """
    if mean_budget is None:
        return budget
    for name, value in (("budget", budget), ("stop_bias", stop_bias)):
        if value is not None:
            raise ValueError(f"{name} and mean_budget are given, expected one of them")
    if not is_number(mean_budget) or mean_budget <= 0:
        raise ValueError(f"mean_budget is {mean_budget!r}, expected a positive number")
    return Budget("mean", mean_budget)


def check_options(config: ModelConfig, options: Options) -> Method:
    """Checks the options before any work.

    Args:
        config: the model's configuration.
        options: the options.

    Returns:
        The pruning method.

    Raises:
        ValueError: an option has a bad value; the message names it and what was expected.
    """
    penalty = 1.0 if options.repetition_penalty is None else options.repetition_penalty
    check_sampling(options.temperature, options.top_p, penalty)
    if options.positions not in POSITIONS:
        raise ValueError(f"positions is {options.positions!r}; supported: {', '.join(POSITIONS)}")
    options.execution.check_backend()
    longest = config.text.max_positions
    if not is_count(options.max_tokens) or options.max_tokens > longest:
        raise ValueError(
            f"max_tokens is {options.max_tokens!r}, expected an integer from 1 to {longest}, the "
            "positions that the model was trained with"
        )
    if options.context_limit is not None and not is_count(options.context_limit):
        raise ValueError(f"context_limit is {options.context_limit!r}, expected an integer from 1")
    if isinstance(options.seed, int) and not (is_count(options.seed, 0) and options.seed < 1 << 32):
        raise ValueError(f"seed is {options.seed}, expected an integer from 0, below 2**32")
    return method_of(config, options)


def make_prompts(request: Request) -> Prompts:
    """Pads a request's ids to buckets, and lists its images."""
    ids = pad_batch(request.ids)
    # Few widths, since each pair of a width and a row length is a program.
    longest = max(map(len, request.question_ids))
    words = pad_batch(request.question_ids, multiple=max(16, 1 << (longest - 1).bit_length()))
    b, j = len(request.ids), row_bucket(max(map(len, request.image_of)))
    image_of = np.full((b, j), -1, np.int32)
    for row, numbers in enumerate(request.image_of):
        image_of[row, : len(numbers)] = numbers
    return Prompts(*ids, *words, image_of, np.arange(b, dtype=np.int32))


def _begin(model: VLM, prompts: Sequence[Prompt], images: Any, options: Options) -> _Begun:
    """Runs everything up to the first token, timed once all its programs are compiled."""
    method = check_options(model.config, options)
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: load it with load_vlm")
    begin = time.perf_counter()
    request = read_request(model.tokenizer, model.image_settings, model.config, prompts, images)
    rows = make_prompts(request)
    shown = None if request.pixels is None else read_images(model.config, request.pixels)
    on_host = time.perf_counter() - begin
    method = pipeline.place_method(model, method)
    key = jax.random.key(options.seed) if isinstance(options.seed, int) else options.seed
    stops = model.config.eos_token_ids if options.stop_ids is None else options.stop_ids
    penalty = options.repetition_penalty
    penalty = model.repetition_penalty if penalty is None else penalty
    sampling = decoding.Sampling(
        key,
        np.float32(options.temperature),
        np.float32(options.top_p),
        np.array(stops, np.int32),
        None if penalty == 1 else np.float32(penalty),
    )
    how = RunOptions(
        options.positions, options.execution, options.context_limit, options.max_tokens
    )

    def run() -> _Begun:
        begin = time.perf_counter()
        batch = pipeline.begin(model, method, rows, shown, sampling, how)
        jax.block_until_ready(batch.state)
        ttft_ms = 1000 * (on_host + time.perf_counter() - begin)
        return _Begun(batch, sampling, ttft_ms, _grids(rows, shown))

    before = num_compiled()
    begun = run()
    if options.warm_up and num_compiled() > before:
        # A limit of 0 compiles the decoding without drawing a token.
        state = pipeline.finish(model, begun.batch.state, sampling, 0, options.execution)
        jax.block_until_ready(state.token)
        begun = run()
    if options.trace is not None:
        options.trace(begun.batch)
    return begun


def _answers(model: VLM, begun: _Begun, rows: Sequence[Sequence[int]], rate: float) -> list[Answer]:
    """Assembles the answers."""
    trace, answers = begun.batch.trace, []
    index, image_of, order = fetch((trace.stages[-1].index, trace.stages[-1].image, trace.order))
    for row, ids in enumerate(rows):
        answers.append(
            Answer(
                text=answer_text(model.tokenizer, ids),
                token_ids=tuple(map(int, ids)),
                visual_tokens=int(begun.batch.visual_tokens[row]),
                kept=int(begun.batch.kept[row]),
                kept_indices=tuple(
                    _kept_of(
                        index[row][image_of[row] == image],
                        None if order is None else order[row, image],
                    )
                    for image in range(len(begun.grids[row]))
                ),
                grids=begun.grids[row],
                ttft_ms=begun.ttft_ms,
                tokens_per_s=rate,
            )
        )
    return answers


def _kept_of(left: Int[np.ndarray, "k"], order: Int[np.ndarray, "t"] | None) -> tuple[int, ...]:
    """Returns indices of an image's remaining tokens, in order of choice if there is one."""
    if order is not None:  # truncation to the context may have removed some of them
        left = order[np.isin(order, left[left >= 0])]
    return tuple(left.tolist())


def _grids(rows: Prompts, images: pipeline.Images | None) -> list[tuple[tuple[int, int], ...]]:
    """Returns rows and columns of the tokens of each prompt's images."""
    if images is None:
        return [()] * len(rows.length)
    return [
        tuple((int(height), int(width)) for height, width in images.grid[shown[shown >= 0]])
        for shown in rows.image_of
    ]


def _rate(steps: int, seconds: float) -> float:
    """Returns steps per second; 0 for no steps."""
    return steps / seconds if steps else 0.0


def _answer_at_once(
    model: VLM, prompts: Sequence[Prompt], images: Any, options: Options
) -> list[Answer]:
    """Answers in one program per batch."""
    begun = _begin(model, prompts, images, options)
    begin = time.perf_counter()
    state, limit = begun.batch.state, options.max_tokens
    end = pipeline.finish(model, state, begun.sampling, limit, options.execution)
    tokens, count, step, finite = jax.device_get((end.tokens, end.count, end.step, end.finite))
    decoding.check_finite(finite, np.arange(len(finite)))
    rate = _rate(int(step) - 1, time.perf_counter() - begin)
    return _answers(
        model, begun, [row[:n].tolist() for row, n in zip(tokens, count, strict=True)], rate
    )


def _answer_by_token(
    model: VLM, prompts: Sequence[Prompt], images: Any, options: Options
) -> Generator[_Event, None, list[Answer]]:
    """Answers token by token."""
    begun = _begin(model, prompts, images, options)
    rows: list[list[int]] = [[] for _ in prompts]
    texts = [TextStream(model.tokenizer) for _ in prompts]
    seconds, step, begin = 0.0, 1, time.perf_counter()
    before, state = np.zeros(len(rows), bool), begun.batch.state
    while True:
        token, finished, finite = jax.device_get((state.token, state.finished, state.finite))
        decoding.check_finite(finite, np.arange(len(rows)))
        seconds += time.perf_counter() - begin
        last = step == options.max_tokens
        for row in np.flatnonzero(~before).tolist():
            rows[row].append(int(token[row]))
            piece = texts[row].add(int(token[row]))
            if finished[row] or last:
                piece += texts[row].finish()
            yield _Event(row, int(token[row]), piece)
        if last or finished.all():
            return _answers(model, begun, rows, _rate(step - 1, seconds))
        begin, before, step = time.perf_counter(), finished, step + 1
        state = pipeline.finish(model, state, begun.sampling, step, options.execution)


def _pieces(
    events: Generator[_Event, None, list[Answer]],
) -> Generator[str, None, list[Answer]]:
    """Yields the non-empty texts of events."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return end.value
        if event.piece:
            yield event.piece


def trace_arrays(begun: Begun, row: int = 0) -> dict[str, np.ndarray]:
    """Returns the trace of a prompt's visual tokens through the language model.

    Args:
        begun: the batch.
        row: the prompt.

    Returns:
        For each stage s of the language model: `kept_s` [k] int32, the index of every visual token
        in its image, -1 for merged and added ones; `image_s` [k] int32, the number of its image;
        `slot_s` [k] int32, its slot in the row; `position_s` int32, the position ids of all tokens
        of the row including text, [length], or [p, length] where a token has several; and `logits`
        [v] float32 at the prompt's last token.
    """
    trace = fetch(begun.trace)
    arrays = {"logits": np.asarray(trace.logits[row], np.float32)}
    for number, stage in enumerate(trace.stages):
        visual = stage.image[row] >= 0
        arrays[f"kept_{number}"] = stage.index[row][visual]
        arrays[f"image_{number}"] = stage.image[row][visual]
        arrays[f"slot_{number}"] = np.flatnonzero(visual).astype(np.int32)
        position = stage.position[row][:, : stage.length[row]]
        arrays[f"position_{number}"] = position[0] if len(position) == 1 else position
    return arrays
