"""Answers to questions about images: `generate`, `stream`, and the `Generator` that both use."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PythonGenerator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Decoding, PrefillResult, RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, Variant, answer_set
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.encode import EncodedQuestions
from stepprune_jax.inference.request import ImageLike, Prompt, Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.text import answer_text, stream_text
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
        visual_tokens: number of visual tokens of the prompt's images before pruning.
        kept: number of visual tokens after the last cut of the language model.
        kept_indices: for each image of the prompt, the raster indices of its kept tokens, from 0;
            -1 for merged tokens. They are in the order of selection for methods that select
            sequentially or by a score (`Ranker`), otherwise in the order of the row.
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

    The constructor checks that the parts fit each other. Programs are compiled once per bucket of
    shapes. Another temperature above 0, another top_p or another exact budget compiles nothing.

    Attributes:
        model: the model from `load_vlm`, on one device or sharded over a mesh. The constructor and
            `read` do not need its weights.
        pruner: how visual tokens are pruned; the default keeps all tokens.
        sampling: how tokens are sampled; greedy by default.
        options: how the model is run, and the longest answer.

    Raises:
        TypeError: the pruner is not a `Pruner`.
        ValueError: a bad value, a budget that is too large, or a policy of another model. The
            message names the value and what was expected.
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
        """The sampling settings with the model's defaults, as programs read them."""
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
        return pipeline.first_tokens(
            self.model,
            self.placed,
            request.prompts(),
            request.images,
            self.options,
            self.resolved,
        )

    def answer(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> list[Answer]:
        """Answers a request; one program samples all tokens after the first.

        Args:
            request: result of `read`.
            trace: called with the batch after its first tokens.

        Returns:
            One `Answer` per prompt. A prompt's answer does not depend on the other prompts.

        Raises:
            NotFiniteError: the model's logits are not finite for some prompts. The message gives
                their numbers; `answers` of the error has the answers to the other prompts.
        """
        result = self.begin(request)
        if trace is not None:
            trace(result)
        state = pipeline.finish(self.model, result.state, self.resolved, self.options)
        return self._answers(request, result, state)

    def stream(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> PythonGenerator[tuple[int, int], None, list[Answer]]:
        """Answers a request token by token.

        Text is decoded once, for the returned answers. `text.stream_text` and `text.TextStream`
        turn ids into pieces of text, where and when a caller wants them.

        Args:
            request: result of `read`.
            trace: called with the batch after its first tokens.

        Yields:
            (row, id) of each token. The id is -1, and the row ends, where the model's logits are
            not finite.

        Returns:
            One `Answer` per prompt, as the value of the generator.

        Raises:
            NotFiniteError: as `answer`, after all other prompts have their answers.
        """
        result = self.begin(request)
        if trace is not None:
            trace(result)
        state, is_finished = result.state, np.zeros(len(request.ids), bool)
        first = state, pipeline.first_output(state)
        later = pipeline.decode(self.model, state, self.resolved, self.options)
        for next_state, output in itertools.chain([first], later):
            state = next_state
            for row in np.flatnonzero(~is_finished).tolist():
                yield row, int(output.token[row]) if output.finite[row] else -1
            is_finished = output.finished
            if is_finished.all():
                break
        return self._answers(request, result, state)

    def answer_set(
        self,
        questions: EncodedQuestions,
        batching: Batching,
        variants: Sequence[Variant] | None = None,
        *,
        partial: bool = False,
    ) -> Iterator[Answers]:
        """Answers a data set batch by batch; a `Ranker` orders the tokens once for all variants.

        Args:
            questions: the questions, with at most one image each, from `encode_questions`.
            batching: how the questions are divided into batches.
            variants: the pruner with other budgets or stop biases, each with the rows of
                `questions` that it answers; None selects all rows. The default is the pruner itself
                with all rows.
            partial: whether a question with logits that are not finite gets an empty answer, see
                `Answers.finite`, instead of an error.

        Yields:
            The answers of each variant, in the order of its rows. The work on a variant begins when
            the iterator reaches it.

        Raises:
            NotFiniteError: the model's logits are not finite for some questions. The message gives
                their numbers; `answers` of the error has the answers of the variant.
        """
        variants = variants or [(self.pruner, None)]
        for pruner, _ in variants:
            check_run(self.model.config, pruner, self.sampling, self.options)
        return answer_set(self.model, variants, questions, self.options, batching, partial=partial)

    def _answers(self, request: Request, result: PrefillResult, state: Decoding) -> list[Answer]:
        """Builds the answers after all tokens are sampled; raises as `answer`."""
        tokens, count, finite = jax.device_get((state.tokens, state.count, state.finite))
        stage = result.trace.stages[-1]
        index, image_of, order = to_host((stage.index, stage.image, result.trace.order))
        answers = []
        for row, images in enumerate(request.image_of):
            ids = tokens[row, : count[row]].tolist()
            kept = [index[row][image_of[row] == image] for image in range(len(images))]
            if order is not None:
                kept = map(_in_order, kept, order[row])
            grids = request.images.grid[list(images)].tolist() if images else ()
            answers.append(
                Answer(
                    text=answer_text(self.model.tokenizer, ids),
                    token_ids=tuple(ids),
                    visual_tokens=int(result.visual_tokens[row]),
                    kept=int(result.kept[row]),
                    kept_indices=tuple(tuple(indices.tolist()) for indices in kept),
                    grids=tuple(map(tuple, grids)),
                )
            )
        if not finite.all():
            not_finite = np.flatnonzero(~finite).tolist()
            for row in not_finite:
                answers[row] = None
            raise NotFiniteError(not_finite, answers)
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

    A prompt's answer does not depend on the other prompts of the batch. To answer many requests,
    build a `Generator` once.

    Args:
        model: the model from `load_vlm`, on one device or sharded over a mesh.
        prompts: the user's text: for each prompt a question, or the turns of a conversation that
            ends with a question. The chat template is added here.
        images: for each prompt its images: a list of paths, bytes or Pillow images, a single image
            without a list, or None.
        pruner: how visual tokens are pruned, such as `FastV(budget=64)` or the result of
            `load_policy`; the default keeps all tokens.
        sampling: how tokens are sampled; greedy by default.
        options: how the model is run, and the longest answer.
        trace: called with the batch after its first tokens.

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
) -> PythonGenerator[str, None, Answer]:
    """Streams the text of the answer to one prompt.

    Args are those of `generate`, for a single prompt.

    Yields:
        Pieces of text as they become final; they concatenate to the answer's text.

    Returns:
        The `Answer`, as the value of the generator.
    """
    generator = Generator(model, pruner, sampling, options)
    tokens = generator.stream(generator.read([prompt], [images]))
    return (yield from stream_text(model.tokenizer, tokens))[0]


def check_run(config: ModelConfig, pruner: Pruner, sampling: Sampling, options: RunOptions) -> None:
    """Checks that a pruner fits a model, and the values of its options; raises as `Generator`."""
    sampling.check()
    options.execution.check_backend()
    max_tokens, max_positions = options.max_tokens, config.text.max_positions
    limit = options.context_limit
    expected = (
        f"an integer from 1 to {max_positions}, the positions that the model was trained with"
    )
    expect("positions", options.positions, options.positions in POSITIONS, ", ".join(POSITIONS))
    expect("max_tokens", max_tokens, is_count(max_tokens) and max_tokens <= max_positions, expected)
    expect("context_limit", limit, limit is None or is_count(limit), "an integer from 1")
    if not isinstance(pruner, Pruner):
        raise TypeError(f"pruner is {pruner!r}, expected a Pruner, such as FastV(budget=64)")
    pruner.check(config, config.max_image_tokens)


def _in_order(kept: Int[np.ndarray, "k"], order: Int[np.ndarray, "t"]) -> Int[np.ndarray, "_"]:
    """Returns the indices of an image's kept tokens in the order of selection.

    The order may have more indices, of tokens that were truncated with the row.
    """
    return order[np.isin(order, kept[kept >= 0])]


def trace_arrays(result: PrefillResult, row: int = 0) -> dict[str, np.ndarray]:
    """Returns the trace of a prompt's visual tokens through the language model.

    Args:
        result: the batch after its first tokens.
        row: the prompt.

    Returns:
        For each stage s of the language model: `kept_s` [k] int32, the index of every visual token
        in its image, -1 for merged and added tokens; `image_s` [k] int32, the number of the image;
        `slot_s` [k] int32, the slot in the row; `position_s` int32, the position ids of all tokens
        of the row including text, [length], or [p, length] where a token has p ids. Also `logits`
        [v] float32 at the prompt's last token.
    """
    trace = to_host(result.trace)
    arrays = {"logits": np.asarray(trace.logits[row], np.float32)}
    for number, stage in enumerate(trace.stages):
        visual = stage.image[row] >= 0
        arrays[f"kept_{number}"] = stage.index[row][visual]
        arrays[f"image_{number}"] = stage.image[row][visual]
        arrays[f"slot_{number}"] = np.flatnonzero(visual).astype(np.int32)
        position = stage.position[row][:, : stage.length[row]]
        arrays[f"position_{number}"] = position[0] if len(position) == 1 else position
    return arrays
