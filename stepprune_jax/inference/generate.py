"""Answers to questions about images: `generate`, `stream`, and the `Generator` that both use."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PythonGenerator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Decoding, Images, PrefillResult, RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, Variant, answer_set
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.encode import EncodedQuestions
from stepprune_jax.inference.plan import check_videos, plan_batch
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
        kept: number of visual tokens that remain after all pruning.
        kept_indices: for each image of the prompt, the raster indices of its kept tokens, from 0;
            -1 for merged tokens. A `Ranker`, which selects one by one or by a score, gives them in
            the order of selection. Other methods give them in the order of the model's input.
        grids: for each image of the prompt, rows and columns of its tokens before pruning; for a
            video, the number of its temporal patches, and rows and columns of each of them. The
            indices of the next temporal patch follow the indices of the patch before.
    """

    text: str
    token_ids: tuple[int, ...]
    visual_tokens: int
    kept: int
    kept_indices: tuple[tuple[int, ...], ...]
    grids: tuple[tuple[int, ...], ...]

    @property
    def kept_per_patch(self) -> tuple[tuple[int, ...], ...]:
        """For each image and video, the number of tokens that each temporal patch kept.

        An image is one temporal patch. Merged tokens belong to no patch, and are not counted.
        """
        return tuple(map(kept_per_patch, self.kept_indices, self.grids))


def kept_per_patch(indices: Sequence[int], grid: Sequence[int]) -> tuple[int, ...]:
    """Counts the kept tokens of each temporal patch of a video.

    Args:
        indices: raster indices of the kept tokens in the video; -1 for merged tokens.
        grid: number of temporal patches, and rows and columns of each of them; or rows and columns
            of an image, which is one temporal patch.

    Returns:
        One count for each temporal patch, in the order of time.
    """
    num_patches = grid[0] if len(grid) == 3 else 1
    unmerged = np.asarray([index for index in indices if index >= 0], int)
    tokens_per_patch = max(1, grid[-2] * grid[-1])
    patch_of = unmerged // tokens_per_patch if num_patches > 1 else np.zeros_like(unmerged)
    return tuple(np.bincount(patch_of, minlength=num_patches).tolist())


@dataclasses.dataclass(frozen=True)
class Generator:
    """Answers prompts with a frozen model, from the visual tokens that a pruner keeps.

    The constructor checks that pruner and options fit the model. Programs are compiled once per
    bucket of shapes. A different temperature above 0, top_p or exact budget needs no compilation.

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
        request = read_request(self.model, prompts, images, system=system, as_shown=as_shown)
        check_videos(self.pruner, request.images)
        return request

    def begin(self, request: Request) -> PrefillResult:
        """Runs the prefill of a request and samples the first token of each prompt."""
        batch = plan_batch(self.model, self.placed, request.prompts(), request.images, self.options)
        inputs = pipeline.prepare_prefill(self.model, batch)
        return pipeline.prefill(self.model, inputs, self.resolved)

    def answer(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> list[Answer]:
        """Answers a request; one program samples all tokens after the first.

        Args:
            request: result of `read`.
            trace: called with the result of the prefill, for example to store its trace.

        Returns:
            One `Answer` per prompt. A prompt's answer does not depend on the other prompts.

        Raises:
            stepprune_jax.inference.NotFiniteError: the logits are not finite for some prompts. The
                message gives the numbers of these prompts. The attribute `answers` has the other
                answers.
        """
        prefilled = self.begin(request)
        if trace is not None:
            trace(prefilled)
        state = pipeline.finish(self.model, prefilled.state, self.resolved, self.options)
        return self._build_answers(request, prefilled, state)

    def stream(
        self, request: Request, trace: Callable[[PrefillResult], None] | None = None
    ) -> PythonGenerator[tuple[int, int], None, list[Answer]]:
        """Answers a request token by token.

        Text is decoded only for the returned answers. To stream text, pass the ids to
        `text.stream_text` or `text.TextStream`.

        Args:
            request: result of `read`.
            trace: called with the result of the prefill, for example to store its trace.

        Yields:
            (row, id) of each token. If the model's logits are not finite, the id is -1 and the row
            ends.

        Returns:
            One `Answer` per prompt, as the value of the generator.

        Raises:
            NotFiniteError: as in `answer`, after all other prompts have their answers.
        """
        prefilled = self.begin(request)
        if trace is not None:
            trace(prefilled)
        state, is_finished = prefilled.state, np.zeros(len(request.ids), bool)
        first_output = jax.device_get((state.token, state.finished, state.finite))
        first_step = state, pipeline.StepOutput(*first_output)
        later_steps = pipeline.decode(self.model, state, self.resolved, self.options)
        for next_state, output in itertools.chain([first_step], later_steps):
            state = next_state
            for row in np.flatnonzero(~is_finished).tolist():
                yield row, int(output.token[row]) if output.finite[row] else -1
            is_finished = output.finished
            if is_finished.all():
                break
        return self._build_answers(request, prefilled, state)

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
            variants: pairs of a pruner and the rows of `questions` to answer; None in place of rows
                selects all rows. The pruners differ only in budget or stop bias. The default is
                `pruner` with all rows.
            partial: whether a question with logits that are not finite gets an empty answer, see
                `Answers.finite`, instead of an error.

        Yields:
            The answers of each variant, in the order of its rows. Each variant is computed when the
            caller requests its answers.

        Raises:
            NotFiniteError: the model's logits are not finite for some questions. The message gives
                the numbers of these questions. The attribute `answers` has the variant's answers.
        """
        variants = variants or [(self.pruner, None)]
        for pruner, _ in variants:
            check_run(self.model.config, pruner, self.sampling, self.options)
        return answer_set(self.model, variants, questions, self.options, batching, partial=partial)

    def _build_answers(
        self, request: Request, prefilled: PrefillResult, state: Decoding
    ) -> list[Answer]:
        """Builds the answers to a request after all tokens are sampled.

        Args:
            request: the request.
            prefilled: result of the prefill, with the kept tokens.
            state: state after the last decoding step, with the generated ids.

        Returns:
            One `Answer` per prompt.

        Raises:
            NotFiniteError: the model's logits are not finite for some prompts.
        """
        tokens, num_tokens, finite = jax.device_get((state.tokens, state.count, state.finite))
        last_stage, order = prefilled.trace.stages[-1], prefilled.trace.order
        index, image_of_slot, order = to_host((last_stage.index, last_stage.image, order))
        answers = []
        for row, image_rows in enumerate(request.image_of):
            ids = tokens[row, : num_tokens[row]].tolist()
            order_of_row = None if order is None else order[row]
            kept_indices = list_kept_indices(
                index[row], image_of_slot[row], order_of_row, len(image_rows)
            )
            answers.append(
                Answer(
                    text=answer_text(self.model.tokenizer, ids),
                    token_ids=tuple(ids),
                    visual_tokens=int(prefilled.visual_tokens[row]),
                    kept=int(prefilled.kept[row]),
                    kept_indices=kept_indices,
                    grids=list_grids(request.images, image_rows),
                )
            )
        if not finite.all():
            rows_not_finite = np.flatnonzero(~finite).tolist()
            for row in rows_not_finite:
                answers[row] = None
            raise NotFiniteError(rows_not_finite, answers)
        return answers


def list_kept_indices(
    index: Int[np.ndarray, "s"],
    image: Int[np.ndarray, "s"],
    order: Int[np.ndarray, "j t"] | None,
    num_images: int,
) -> tuple[tuple[int, ...], ...]:
    """Lists the kept tokens of each image of a row.

    Args:
        index: [s] index of each visual token in its image, as in `Sequence`.
        image: [s] number of each token's image in the row; -1 for text and padding.
        order: [j, t] indices of the tokens of each image in the order of selection, -1 in the
            padding; None for a method without an order.
        num_images: number of images of the row.

    Returns:
        The indices of each image, as in `Answer.kept_indices`.
    """
    kept_indices = []
    for image_number in range(num_images):
        indices = index[image == image_number]
        if order is not None:
            # The order of selection also has tokens that were truncated with the row.
            indices = order[image_number][np.isin(order[image_number], indices[indices >= 0])]
        kept_indices.append(tuple(indices.tolist()))
    return tuple(kept_indices)


def list_grids(images: Images | None, rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns `Answer.grids` of the images and videos at some rows."""
    if images is None:
        return ()
    grids = []
    for row in rows:
        num_rows, columns = images.grid[row].tolist()
        frames = 1 if images.clips is None else int(images.clips.frames[row])
        is_video = images.clips is not None and bool(images.clips.is_video[row])
        grids.append((frames, num_rows // frames, columns) if is_video else (num_rows, columns))
    return tuple(grids)


def generate(
    model: VLM,
    prompts: Sequence[Prompt] | str,
    images: Sequence[Sequence[ImageLike] | ImageLike | None] | ImageLike | None = None,
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
            ends with a question. A single text is one question. The chat template is added here.
        images: for each prompt its images and videos: a list of paths, bytes or Pillow images, and
            of `Video`s. One image needs no list, and None means no image. If `prompts` is a single
            text, the images of that text.
        pruner: how visual tokens are pruned, such as `FastV(budget=64)` or the result of
            `load_policy`; the default keeps all tokens.
        sampling: how tokens are sampled; greedy by default.
        options: how the model is run, and the longest answer.
        trace: called with the result of the prefill, for example to store its trace.

    Returns:
        One `Answer` per prompt.

    Raises:
        FileNotFoundError: an image is missing.
        TypeError: a prompt or a pruner has a wrong type.
        ValueError: a prompt, an image or an option is invalid; the message names it.
        NotFiniteError: the model's logits are not finite for some prompts.
    """
    generator = Generator(model, pruner, sampling, options)
    images_of_prompts: Any = images
    if isinstance(prompts, str):
        prompts, images_of_prompts = [prompts], None if images is None else [images]
    return generator.answer(generator.read(prompts, images_of_prompts), trace)


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

    Args:
        model: see `generate`.
        prompt: a question, or the turns of a conversation that ends with a question.
        images: the images and videos of the prompt: a list, a single one, or None.
        pruner: how visual tokens are pruned.
        sampling: how tokens are sampled; greedy by default.
        options: how the model is run, and the longest answer.

    Yields:
        Pieces of text that no later token can change. Their concatenation is the answer's text.

    Returns:
        The `Answer`, as the value of the generator.
    """
    generator = Generator(model, pruner, sampling, options)
    tokens = generator.stream(generator.read([prompt], [images]))
    return (yield from stream_text(model.tokenizer, tokens))[0]


def check_run(config: ModelConfig, pruner: Pruner, sampling: Sampling, options: RunOptions) -> None:
    """Checks a pruner, sampling settings and run options against a model.

    Args:
        config: the model's configuration.
        pruner: the pruner.
        sampling: how tokens are sampled.
        options: how the model is run.

    Raises:
        TypeError: the pruner is not a `Pruner`.
        ValueError: a value is out of its range, or the pruner does not fit the model.
    """
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


def trace_arrays(result: PrefillResult, row: int = 0) -> dict[str, np.ndarray]:
    """Returns which visual tokens of a prompt reach each stage of the language model.

    A stage is a span of layers. Stage 0 begins at the first layer; each later stage begins where
    the pruner drops tokens between layers.

    Args:
        result: result of the prefill.
        row: index of the prompt in the batch.

    Returns:
        Arrays by name. "logits" is [v] float32, at the prompt's last token. For each stage s with k
        visual tokens:
        "kept_s": [k] int32 index of each visual token in its image; -1 for merged and added tokens.
        "image_s": [k] int32 number of the token's image.
        "slot_s": [k] int32 place of the token in the row.
        "position_s": [length] int32 position ids of all tokens of the row, including text; [p,
        length] for a model with p position ids per token.
    """
    trace = to_host(result.trace)
    arrays: dict[str, np.ndarray] = {"logits": np.asarray(trace.logits[row], np.float32)}
    for stage_index, stage in enumerate(trace.stages):
        is_visual = stage.image[row] >= 0
        arrays[f"kept_{stage_index}"] = stage.index[row][is_visual]
        arrays[f"image_{stage_index}"] = stage.image[row][is_visual]
        arrays[f"slot_{stage_index}"] = np.flatnonzero(is_visual).astype(np.int32)
        position = stage.position[row][:, : stage.length[row]]
        arrays[f"position_{stage_index}"] = position[0] if len(position) == 1 else position
    return arrays
