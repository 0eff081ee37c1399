"""Answers to questions about images: `generate`, `stream`, and the `Generator` behind both."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Generator as Events
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import PrefillResult, RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, Variant, answer_set
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.encode import EncodedQuestions
from stepprune_jax.inference.request import ImageLike, Prompt, Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.pruning import POSITIONS, AllTokens, Pruner
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import expect


class Answer(NamedTuple):
    """The answer to one prompt.

    Attributes:
        text: the text, without special tokens and surrounding white space.
        token_ids: all generated ids, including the stop id.
        visual_tokens: visual tokens of the prompt's images before pruning.
        kept: number of these that remain in the language model after its last cut.
        kept_indices: for each image of the prompt, the indices of these tokens in raster order from
            0, and -1 for merged ones. In order of choice for methods that choose sequentially or by
            a score (`Ranker`s), otherwise in the order of the row.
        grids: for each image of the prompt, rows and columns of its tokens before pruning.
    """

    text: str
    token_ids: tuple[int, ...]
    visual_tokens: int
    kept: int
    kept_indices: tuple[tuple[int, ...], ...]
    grids: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Generator:
    """Answers from a frozen model and the visual tokens that a pruner keeps.

    Building one checks that its parts fit, before any work. Its programs are compiled once per
    bucket of shapes; another temperature above 0, top_p or exact budget compiles nothing.

    Attributes:
        model: the model from `load_vlm`, on one device or sharded over a mesh. Its weights are
            needed to answer, not to build or to `read`.
        pruner: how visual tokens are pruned; by default not at all.
        sampling: how tokens are drawn; by default greedily.
        options: how the model is run, and the longest answer.

    Raises:
        TypeError: the pruner is not a `Pruner`.
        ValueError: a bad value, a budget that is too large, or a policy of another model; the
            message names it and what was expected.
    """

    model: VLM
    pruner: Pruner = AllTokens()
    sampling: Sampling = Sampling()
    options: RunOptions = RunOptions()

    def __post_init__(self):
        check_run(self.model.config, self.pruner, self.sampling, self.options)

    @functools.cached_property
    def placed(self) -> Pruner:
        """The pruner on the model's devices."""
        return pipeline.place_pruner(self.model, self.pruner)

    @functools.cached_property
    def resolved(self) -> Sampling:
        """How tokens are drawn, as programs read it."""
        return self.sampling.resolve(self.model.config.eos_token_ids, self.model.repetition_penalty)

    def read(
        self,
        prompts: Sequence[Prompt],
        images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
        *,
        system: str | None = None,
        as_shown: bool = True,
    ) -> Request:
        """Checks and prepares prompts and images; see `read_request`."""
        return read_request(self.model, prompts, images, system=system, as_shown=as_shown)

    def begin(self, request: Request) -> PrefillResult:
        """Runs a request up to its first tokens."""
        batch = pipeline.prepare(
            self.model, self.placed, request.prompts(), request.images, self.options
        )
        return pipeline.begin(self.model, batch, self.resolved)

    def answer(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> list[Answer]:
        """Answers a request, all tokens after the first in one program.

        Args:
            request: result of `read`.
            trace: called with the batch once the first tokens are known.

        Returns:
            One `Answer` per prompt. A prompt's answer does not depend on the others.

        Raises:
            NotFiniteError: the model's logits are not finite for some prompts. The message gives
                their numbers; `answers` of the error has all other answers.
        """
        begun = self.begin(request)
        if trace is not None:
            trace(begun)
        state = pipeline.finish(self.model, begun.state, self.resolved, self.options)
        return self._answers(request, begun, state)

    def stream(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> Events[tuple[int, int, str], None, list[Answer]]:
        """Answers a request token by token.

        Args:
            request: result of `read`.
            trace: called with the batch once the first tokens are known.

        Yields:
            (row, id, text) of each token as it is drawn. The text has become final with the token,
            and is often empty; the texts of a row concatenate to the text of its answer. The id is
            -1, and the row ends, where the model's logits are not finite.

        Returns:
            One `Answer` per prompt, as the value of the generator.

        Raises:
            NotFiniteError: as `answer`, once all other prompts have their answers.
        """
        begun = self.begin(request)
        if trace is not None:
            trace(begun)
        state, rows, longest = begun.state, len(request.ids), self.options.max_tokens
        texts = [TextStream(self.model.tokenizer) for _ in range(rows)]
        before = np.zeros(rows, bool)
        first = pipeline.StepOutput(*jax.device_get((state.token, state.finished, state.finite)))
        later = pipeline.decode(self.model, state, self.resolved, self.options)
        events = itertools.chain([(state, first)], later)
        for step, (after, drawn) in enumerate(events, 1):
            state = after
            for row in np.flatnonzero(~before).tolist():
                if not drawn.finite[row]:
                    yield row, -1, ""
                    continue
                piece = texts[row].add(int(drawn.token[row]))
                if drawn.finished[row] or step == longest:
                    piece += texts[row].finish()
                yield row, int(drawn.token[row]), piece
            before = drawn.finished
            if before.all():
                break
        return self._answers(request, begun, state)

    def answer_set(
        self,
        asked: EncodedQuestions,
        batching: Batching,
        variants: Sequence[Variant] | None = None,
        *,
        partial: bool = False,
    ) -> "Events[Answers, None, None]":
        """Answers a set of questions, batch by batch; a method that ranks does so once.

        Args:
            asked: the questions, with one image each or none, from `encode_questions`.
            batching: sizes.
            variants: the pruner with other budgets or stop biases, each with the rows of `asked`
                that it is to answer, None for all. By default the pruner itself, for all.
            partial: whether a question with logits that are not finite has an empty answer, see
                `Answers.finite`, instead of being an error.

        Yields:
            The answers of each variant, in the order of its rows. The work on one begins when it is
            asked for.

        Raises:
            NotFiniteError: the model's logits are not finite for some questions. The message gives
                their numbers; `answers` of the error has the answers of the variant.
        """
        variants = variants or [(self.pruner, None)]
        for pruner, _ in variants:
            check_run(self.model.config, pruner, self.sampling, self.options)
        return answer_set(self.model, variants, asked, self.options, batching, partial=partial)

    def _answers(
        self, request: Request, begun: PrefillResult, state: pipeline.Decoding
    ) -> list[Answer]:
        """Assembles the answers once all tokens are drawn; raises as `answer`."""
        tokens, count, finite = jax.device_get((state.tokens, state.count, state.finite))
        stage = begun.trace.stages[-1]
        index, image_of, order = to_host((stage.index, stage.image, begun.trace.order))
        answers = []
        for row, shown in enumerate(request.image_of):
            ids = tokens[row, : count[row]].tolist()
            left = (index[row][image_of[row] == image] for image in range(len(shown)))
            orders = [None] * len(shown) if order is None else order[row]
            grids = request.images.grid[list(shown)].tolist() if shown else ()
            answers.append(
                Answer(
                    text=answer_text(self.model.tokenizer, ids),
                    token_ids=tuple(ids),
                    visual_tokens=int(begun.visual_tokens[row]),
                    kept=int(begun.kept[row]),
                    kept_indices=tuple(map(_kept_of, left, orders)),
                    grids=tuple(map(tuple, grids)),
                )
            )
        if not finite.all():
            broken = np.flatnonzero(~finite).tolist()
            for row in broken:
                answers[row] = None
            raise NotFiniteError(broken, answers)
        return answers


def generate(
    model: VLM,
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | None = None,
    pruner: Pruner = AllTokens(),
    *,
    sampling: Sampling = Sampling(),
    options: RunOptions = RunOptions(),
    trace: Callable[[PrefillResult], None] | None = None,
) -> list[Answer]:
    """Answers a batch of prompts, with or without images, with or without pruning.

    A prompt's answer does not depend on the rest of the batch. A `Generator` answers many requests.

    Args:
        model: the model from `load_vlm`, on one device or sharded over a mesh.
        prompts: the user's text: a question each, or the turns of a conversation that ends with a
            question. The chat template is added here.
        images: for each prompt its images (paths, bytes or Pillow images), one alone without a
            list, or None.
        pruner: how visual tokens are pruned, such as `FastV(budget=64)` or the result of
            `load_policy`; by default not at all.
        sampling: how tokens are drawn; by default greedily.
        options: how the model is run, and the longest answer.
        trace: called with the `PrefillResult` batch once the first tokens are known.

    Returns:
        One `Answer` per prompt.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt or a pruner of a wrong type.
        ValueError: bad prompts, images or options; the message names them.
        NotFiniteError: as `Generator.answer`.
    """
    generator = Generator(model, pruner, sampling, options)
    return generator.answer(generator.read(prompts, images), trace)


def stream(
    model: VLM,
    prompt: Prompt,
    images: Sequence[ImageLike] | ImageLike | None = None,
    pruner: Pruner = AllTokens(),
    *,
    sampling: Sampling = Sampling(),
    options: RunOptions = RunOptions(),
) -> Events[str, None, Answer]:
    """Streams the answer to one prompt.

    Args are those of `generate`, for a single prompt.

    Yields:
        Pieces of text as they become final; they concatenate to the answer's text.

    Returns:
        The `Answer`, as the value of the generator.
    """
    generator = Generator(model, pruner, sampling, options)
    events = generator.stream(generator.read([prompt], [images]))
    while True:
        try:
            _, _, piece = next(events)
        except StopIteration as end:
            return end.value[0]
        if piece:
            yield piece


def check_run(config: ModelConfig, pruner: Pruner, sampling: Sampling, options: RunOptions) -> None:
    """Checks that a pruner fits a model, and how it is to be run; raises as `Generator`."""
    sampling.check()
    options.execution.check_backend()
    longest, most, limit = config.text.max_positions, options.max_tokens, options.context_limit
    trained = f"an integer from 1 to {longest}, the positions that the model was trained with"
    expect("positions", options.positions, options.positions in POSITIONS, ", ".join(POSITIONS))
    expect("max_tokens", most, is_count(most) and most <= longest, trained)
    expect("context_limit", limit, limit is None or is_count(limit), "an integer from 1")
    if not isinstance(pruner, Pruner):
        raise TypeError(f"pruner is {pruner!r}, expected a Pruner, such as FastV(budget=64)")
    pruner.check(config, config.max_image_tokens)


def _kept_of(left: Int[np.ndarray, "k"], order: Int[np.ndarray, "t"] | None) -> tuple[int, ...]:
    """Returns indices of an image's remaining tokens, in order of choice if there is one."""
    if order is not None:  # truncation to the context may have removed some of them
        left = order[np.isin(order, left[left >= 0])]
    return tuple(left.tolist())


def trace_arrays(begun: PrefillResult, row: int = 0) -> dict[str, np.ndarray]:
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
    trace = to_host(begun.trace)
    arrays = {"logits": np.asarray(trace.logits[row], np.float32)}
    for number, stage in enumerate(trace.stages):
        visual = stage.image[row] >= 0
        arrays[f"kept_{number}"] = stage.index[row][visual]
        arrays[f"image_{number}"] = stage.image[row][visual]
        arrays[f"slot_{number}"] = np.flatnonzero(visual).astype(np.int32)
        position = stage.position[row][:, : stage.length[row]]
        arrays[f"position_{number}"] = position[0] if len(position) == 1 else position
    return arrays
