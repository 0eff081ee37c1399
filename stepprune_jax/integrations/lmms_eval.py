"""Provides StepPrune as a model of lmms-eval, for tasks with images, videos or text only.

    lmms-eval --model stepprune_jax --model_args pretrained=DIR,policy=FILE,budget=64 \
        --tasks pope --batch_size 1

Model, policy and decoding are the same as in `eval.py`. Prompts, data and post-processing are not:
lmms-eval has its own, and `eval.py` follows LLaVA's programs. Do not compare scores of both
programs. Install with `pip install ".[lmms-eval]"` in a clone of the repository. lmms-eval finds
the model through its entry points. Videos also need ".[video]".
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from stepprune_jax.data.images import open_image
from stepprune_jax.data.videos import Video, sample_with_limit
from stepprune_jax.extras import install_command
from stepprune_jax.integrations.answerer import (
    AnswererOptions,
    AskedQuestion,
    answer_questions,
    load_answerer,
)
from stepprune_jax.user_input import UserError, naming

try:
    from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
    from lmms_eval.models.registry_v2 import (  # pyright: ignore[reportMissingImports]
        ModelManifest,
    )
except ImportError as error:
    raise ImportError(
        f"lmms-eval cannot be imported ({error}): {install_command('lmms-eval')}"
    ) from error

NAME = "stepprune_jax"
# Length limit of answers if a task sets none, as in lmms-eval's LLaVA models.
MAX_NEW_TOKENS = 1024
# Generation settings that the model uses or checks, and settings that greedy answers ignore.
_USED_SETTINGS = {"max_new_tokens", "until", "temperature", "do_sample", "num_beams"}
_IRRELEVANT_SETTINGS = {"top_p", "top_k", "use_cache"}
# Suffixes of images that tasks name by their path. All other paths are videos.
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
# Rate in frames per second of frames that a task has sampled. Qwen's own reader, which the Qwen
# models of lmms-eval use, assumes the same rate.
_FRAMES_RATE = 2.0


class StepPruneModel(lmms):
    """A vision-language model with pruned visual tokens, for tasks with images, videos or text."""

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        max_num_frames: int = 32,
        fps: float | int | None = None,
        frames_as_video: bool = False,
        **options: Any,
    ):
        """Loads the model.

        Args:
            pretrained: checkpoint folder or hub id.
            batch_size: questions per batch on each device.
            device: ignored; JAX_PLATFORMS selects jax's device.
            max_batch_size: ignored.
            max_num_frames: number of frames to sample of each video, evenly spaced, as in
                lmms-eval's Qwen models. A shorter video is used entirely.
            fps: number of frames to sample per second instead, up to `max_num_frames`; for frames
                that a task has sampled, their rate.
            frames_as_video: whether several images of a document are the frames of one video, as in
                MVBench's `episodic_reasoning`. By default they are images, as in lmms-eval's Qwen
                models.
            **options: further fields of `answerer.AnswererOptions`.

        Raises:
            FileNotFoundError: model or policy is missing.
            TypeError: an option is unknown.
            UserError: an option has an invalid value, or lmms-eval was launched as several
                processes.
        """
        super().__init__()
        num_processes = os.environ.get("WORLD_SIZE", "1")
        if num_processes != "1":
            raise UserError(
                f"WORLD_SIZE is {num_processes}, expected 1: one process uses all devices; start "
                "lmms-eval without accelerate launch or torchrun, or set WORLD_SIZE=1"
            )
        # The command line passes the number as a text. `load_answerer` refuses other texts.
        options["batch_size"] = int(batch_size) if str(batch_size).isdecimal() else batch_size
        Video([], fps, max_num_frames)  # Checks the numbers before the model is loaded.
        self._fps, self._max_num_frames = fps, max_num_frames
        self._frames_as_video = frames_as_video
        self._answerer = load_answerer(AnswererOptions(pretrained=pretrained, **options))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers lmms-eval's requests greedily.

        Args:
            requests: lmms-eval's `Instance`s. Their arguments are the user's message, the
                generation settings, a function that maps a document to its images and videos, the
                index of the document, the name of the task, and the split.

        Returns:
            One answer per request, in the order of `requests`.

        Raises:
            FileNotFoundError: there is no file of a video.
            UserError: a request has a visual of an unknown type, or a video that model or method do
                not take, or it needs sampling or several beams.
        """
        questions = [self._read_question(request) for request in requests]
        with tqdm(total=len(questions), desc=NAME, unit="answer", mininterval=1) as progress_bar:
            answers = answer_questions(
                self._answerer,
                questions,
                lambda num_answered: progress_bar.update(num_answered - progress_bar.n),
            )
        for request, answer in zip(requests, answers, strict=True):
            # lmms-eval's cache of answers has message and settings as its key.
            self.cache_hook.add_partial("generate_until", request.args[:2], answer)
        return answers

    def _read_question(self, request: Any) -> AskedQuestion:
        """Converts a request of lmms-eval to a question.

        Args:
            request: an `Instance`; see `generate_until`.

        Raises:
            UserError: the request has a visual of an unknown type, or needs sampling or several
                beams.
        """
        message, settings, doc_to_visual, document_id, task, split = request.args
        location = f"{task}, {split}, document {document_id}"
        visuals = doc_to_visual(self.task_dict[task][split][document_id]) or []
        visuals = [visual for visual in visuals if visual is not None]
        with naming(location):
            images = self._read_visuals(visuals)
        _check_greedy(settings, location)
        until = settings.get("until") or ()
        stop_texts = (until,) if isinstance(until, str) else tuple(until)
        max_new_tokens = settings.get("max_new_tokens")
        max_new_tokens = MAX_NEW_TOKENS if max_new_tokens is None else int(max_new_tokens)
        return AskedQuestion(message, tuple(images), max_new_tokens, stop_texts)

    def _read_visuals(self, visuals: Sequence[Any]) -> list[Image.Image | Video]:
        """Converts the visuals of a document to images and videos.

        A path with a suffix of `_IMAGE_SUFFIXES` is an image, and any other path a video. A list of
        images and an array [n, height, width, 3] are the frames of a video.

        Raises:
            UserError: a visual has another type.
        """
        are_images = all(isinstance(visual, Image.Image) for visual in visuals)
        if self._frames_as_video and are_images and len(visuals) > 1:
            visuals = [visuals]
        images = []
        for visual in visuals:
            if isinstance(visual, str | Path):
                is_image = Path(visual).suffix.lower() in _IMAGE_SUFFIXES
                images.append(open_image(visual) if is_image else self._sample_file(visual))
            elif isinstance(visual, Image.Image):
                images.append(visual)
            elif isinstance(visual, list | tuple | np.ndarray) and len(visual):
                has_too_many = len(visual) > self._max_num_frames
                num_frames = self._max_num_frames if has_too_many else None
                images.append(Video(visual, self._fps or _FRAMES_RATE, num_frames))
            else:
                type_names = ", ".join(type(visual).__name__ for visual in visuals)
                raise UserError(
                    "expected images, and videos as paths or frames, got "
                    f"{len(visuals)} visual(s): {type_names}"
                )
        return images

    def _sample_file(self, path: str | Path) -> Video:
        """Returns a video file with the sampling of the model's arguments.

        A file that is missing or damaged has any sampling: the answerer reports it.
        """
        if self._fps is not None:
            with contextlib.suppress(OSError, UserError):
                return sample_with_limit(path, self._fps, self._max_num_frames)
        return Video(path, num_frames=self._max_num_frames)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Raises a NotImplementedError: all benchmarks of the paper generate their answers."""
        raise NotImplementedError(
            f"{NAME} has no loglikelihood: use tasks with output_type generate_until"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raises a NotImplementedError: a policy selects tokens for one question."""
        raise NotImplementedError(
            f"{NAME} answers one question per request: use tasks with output_type generate_until"
        )


def _check_greedy(settings: Mapping[str, object], location: str) -> None:
    """Checks that generation settings request greedy decoding, and warns about unknown settings.

    Args:
        settings: generation settings of a task.
        location: task, split and document, for the error message.

    Raises:
        UserError: the settings request sampling or several beams.
    """
    # As in transformers, sampling without a temperature has temperature 1.
    temperature = settings.get("temperature", 1 if settings.get("do_sample") else 0)
    if temperature or (settings.get("num_beams") or 1) != 1:
        names = ("do_sample", "num_beams", "temperature")
        values = ", ".join(f"{name} {settings[name]!r}" for name in names if name in settings)
        raise UserError(f"{location}: answers are greedy (temperature 0, one beam), got {values}")
    unknown_settings = sorted(settings.keys() - _USED_SETTINGS - _IRRELEVANT_SETTINGS)
    if unknown_settings:
        message = f"generation settings without effect: {', '.join(unknown_settings)}"
        warnings.warn(message, stacklevel=2)


def manifest() -> ModelManifest:
    """Returns the manifest for lmms-eval's entry point group `lmms_eval.models`."""
    return ModelManifest(model_id=NAME, simple_class_path=f"{__name__}.{StepPruneModel.__name__}")
