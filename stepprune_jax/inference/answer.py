"""`generate` and `stream`: answers to questions about images."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import check_fits
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Begun, RunOptions
from stepprune_jax.inference.decoding import check_finite
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import ImageLike, Prompt, Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel.placement import fetch
from stepprune_jax.pruning import POSITIONS, Method
from stepprune_jax.pruning.method import NO_PRUNING
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import expect


class Answer(NamedTuple):
    """The answer to one prompt.

    Times are those of warm programs, without compilation (see `RunOptions.warm_up`).

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


def generate(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
    method: Method = NO_PRUNING,
    *,
    sampling: Sampling = Sampling(),
    options: RunOptions = RunOptions(),
    on_token: Callable[[int, int, str], None] | None = None,
    trace: Callable[[Begun], None] | None = None,
) -> list[Answer]:
    """Answers a batch of prompts, with or without images, with or without pruning.

    A row's answer does not depend on the rest of the batch. Programs are compiled once per bucket
    of shapes; changing temperature, top_p or stop ids compiles nothing.

    Args:
        model: the model from `load_vlm`, on one device or sharded over a mesh.
        prompts: the user's text: a question each, or the turns of a conversation that ends with a
            question. The chat template is added here.
        images: for each prompt its images (paths, bytes or Pillow images), or None.
        method: how visual tokens are pruned, from `make_method`; by default not at all.
        sampling: how tokens are drawn; by default greedily.
        options: how the model is run, and the longest answer.
        on_token: called with (row, id, text) for each token as it is generated; the texts of a row
            concatenate to its answer.
        trace: called with the `Begun` batch once the first tokens are known.

    Returns:
        One `Answer` per prompt.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt or a method of a wrong type.
        ValueError: bad prompts, images or options; the message names them.
    """
    check_run(model.config, method, sampling, options)
    request = read_request(model, prompts, images)
    return answer(model, request, method, sampling, options, on_token, trace)


def stream(
    model: VLM,
    prompt: Prompt,
    images: Sequence[ImageLike] | ImageLike | None = None,
    method: Method = NO_PRUNING,
    *,
    sampling: Sampling = Sampling(),
    options: RunOptions = RunOptions(),
) -> Generator[str, None, Answer]:
    """Streams the answer to one prompt.

    Args are those of `generate`, for a single prompt.

    Yields:
        Pieces of text as they become final; they concatenate to the answer's text.

    Returns:
        The `Answer`, as the value of the generator.
    """
    check_run(model.config, method, sampling, options)
    request = read_request(model, [prompt], [images])
    decoder = _Decoder(model, request, method, sampling, options)
    for _, _, piece in decoder.tokens():
        if piece:
            yield piece
    return decoder.answers()[0]


def answer(
    model: VLM,
    request: Request,
    method: Method,
    sampling: Sampling,
    options: RunOptions,
    on_token: Callable[[int, int, str], None] | None = None,
    trace: Callable[[Begun], None] | None = None,
) -> list[Answer]:
    """Answers a request, whose method and options `check_run` has checked; see `generate`."""
    decoder = _Decoder(model, request, method, sampling, options)
    if trace is not None:
        trace(decoder.begun)
    if on_token is None:
        decoder.finish()
    else:
        for event in decoder.tokens():
            on_token(*event)
    return decoder.answers()


def check_run(config: ModelConfig, method: Method, sampling: Sampling, options: RunOptions) -> None:
    """Checks that a method fits a model, and how it is to be run, before any work.

    Raises:
        TypeError: the method is not a `Method`.
        ValueError: a bad value, a budget that is too large, or a policy of another model; the
            message names it and what was expected.
    """
    sampling.check()
    options.execution.check_backend()
    longest, most, limit = config.text.max_positions, options.max_tokens, options.context_limit
    trained = f"an integer from 1 to {longest}, the positions that the model was trained with"
    expect("positions", options.positions, options.positions in POSITIONS, ", ".join(POSITIONS))
    expect("max_tokens", most, is_count(most) and most <= longest, trained)
    expect("context_limit", limit, limit is None or is_count(limit), "an integer from 1")
    if not isinstance(method, Method):
        raise TypeError(f"method is {method!r}, expected a Method, such as make_method returns")
    if method.pruner.config_type is not None:
        check_fits(method.pruner.config, config)
    method.pruner.check(config, config.max_image_tokens)


class _Decoder:
    """A batch on its way from the first token to the last."""

    def __init__(
        self,
        model: VLM,
        request: Request,
        method: Method,
        sampling: Sampling,
        options: RunOptions,
    ):
        """Runs everything up to the first token, timed once all its programs are compiled."""
        begin = time.perf_counter()
        self._model, self._options, images = model, options, request.images
        self._sampling = sampling.resolve(model.config.eos_token_ids, model.repetition_penalty)
        prompts = request.prompts()
        on_host = request.seconds + time.perf_counter() - begin
        method = pipeline.place_method(model, method)

        def run() -> tuple[Begun, float]:
            begin = time.perf_counter()
            batch = pipeline.prepare(model, method, prompts, images, options)
            begun = pipeline.begin(model, batch, self._sampling)
            jax.block_until_ready(begun.state)
            return begun, 1000 * (on_host + time.perf_counter() - begin)

        before = num_compiled()
        self.begun, self._ttft_ms = run()
        if options.warm_up and num_compiled() > before:
            # A limit of 0 compiles the decoding without drawing a token.
            jax.block_until_ready(self._step(self.begun.state, 0).token)
            self.begun, self._ttft_ms = run()
        self._state, self._seconds = self.begun.state, 0.0
        self._grids = [
            tuple(map(tuple, images.grid[list(shown)].tolist())) if shown else ()
            for shown in request.image_of
        ]

    def _step(self, state: pipeline.Decoding, limit: int) -> pipeline.Decoding:
        return pipeline.finish(self._model, state, self._sampling, limit, self._options.execution)

    def finish(self) -> None:
        """Draws all tokens in one program."""
        begin = time.perf_counter()
        self._state = self._step(self._state, self._options.max_tokens)
        check_finite(jax.device_get(self._state.finite), np.arange(len(self._grids)))
        self._seconds = time.perf_counter() - begin

    def tokens(self) -> Iterator[tuple[int, int, str]]:
        """Yields row, id and final text of each token as it is drawn."""
        texts = [TextStream(self._model.tokenizer) for _ in self._grids]
        step, before, begin = 1, np.zeros(len(texts), bool), time.perf_counter()
        while True:
            state, last = self._state, step == self._options.max_tokens
            token, finished, finite = jax.device_get((state.token, state.finished, state.finite))
            check_finite(finite, np.arange(len(texts)))
            self._seconds += time.perf_counter() - begin
            for row in np.flatnonzero(~before).tolist():
                piece = texts[row].add(int(token[row]))
                if finished[row] or last:
                    piece += texts[row].finish()
                yield row, int(token[row]), piece
            if last or finished.all():
                return
            begin, before, step = time.perf_counter(), finished, step + 1
            self._state = self._step(state, step)

    def answers(self) -> list[Answer]:
        """Assembles the answers once all tokens are drawn."""
        state, trace = self._state, self.begun.trace
        tokens, count, step = jax.device_get((state.tokens, state.count, state.step))
        stage = trace.stages[-1]
        index, image_of, order = fetch((stage.index, stage.image, trace.order))
        rate = (int(step) - 1) / self._seconds if step > 1 else 0.0
        answers = []
        for row, grids in enumerate(self._grids):
            ids = tokens[row, : count[row]].tolist()
            left = (index[row][image_of[row] == image] for image in range(len(grids)))
            orders = [None] * len(grids) if order is None else order[row]
            answers.append(
                Answer(
                    text=answer_text(self._model.tokenizer, ids),
                    token_ids=tuple(ids),
                    visual_tokens=int(self.begun.visual_tokens[row]),
                    kept=int(self.begun.kept[row]),
                    kept_indices=tuple(map(_kept_of, left, orders)),
                    grids=grids,
                    ttft_ms=self._ttft_ms,
                    tokens_per_s=rate,
                )
            )
        return answers


def _kept_of(left: Int[np.ndarray, "k"], order: Int[np.ndarray, "t"] | None) -> tuple[int, ...]:
    """Returns indices of an image's remaining tokens, in order of choice if there is one."""
    if order is not None:  # truncation to the context may have removed some of them
        left = order[np.isin(order, left[left >= 0])]
    return tuple(left.tolist())


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
