"""Provides StepPrune as a model of lmms-eval.

    lmms-eval --model stepprune_jax --model_args pretrained=DIR,policy=FILE,budget=64 \
        --tasks pope --batch_size 1

Model, policy and decoding are the same as in `eval.py`. Prompts, data and post-processing are not:
lmms-eval has its own, and `eval.py` follows LLaVA's programs. Do not compare scores of both
programs. Install with `pip install ".[lmms-eval]"` in a clone of the repository. lmms-eval finds
the model through its entry points.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from tqdm import tqdm

from stepprune_jax.extras import install_command
from stepprune_jax.integrations.answerer import (
    AnswererOptions,
    AskedQuestion,
    answer_questions,
    load_answerer,
)
from stepprune_jax.user_input import UserError

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


class StepPruneModel(lmms):
    """A vision-language model with pruned visual tokens, for tasks with images or text only."""

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ):
        """Loads the model.

        Args:
            pretrained: checkpoint folder or hub id.
            batch_size: questions per batch on each device.
            device: ignored; JAX_PLATFORMS selects jax's device.
            max_batch_size: ignored.
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
        self._answerer = load_answerer(AnswererOptions(pretrained=pretrained, **options))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers lmms-eval's requests greedily.

        Args:
            requests: lmms-eval's `Instance`s. Their arguments are the user's message, the
                generation settings, a function that maps a document to its images, the index of the
                document, the name of the task, and the split.

        Returns:
            One answer per request, in the order of `requests`.

        Raises:
            UserError: a request has a video, or needs sampling or several beams.
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
            UserError: the request has a video, or needs sampling or several beams.
        """
        message, settings, doc_to_visual, document_id, task, split = request.args
        location = f"{task}, {split}, document {document_id}"
        visuals = doc_to_visual(self.task_dict[task][split][document_id]) or []
        visuals = [visual for visual in visuals if visual is not None]
        if not all(isinstance(visual, Image.Image) for visual in visuals):
            type_names = ", ".join(type(visual).__name__ for visual in visuals)
            raise UserError(
                f"{location}: expected images, got {len(visuals)} visual(s): {type_names}"
            )
        _check_greedy(settings, location)
        until = settings.get("until") or ()
        stop_texts = (until,) if isinstance(until, str) else tuple(until)
        max_new_tokens = settings.get("max_new_tokens")
        max_new_tokens = MAX_NEW_TOKENS if max_new_tokens is None else int(max_new_tokens)
        return AskedQuestion(message, tuple(visuals), max_new_tokens, stop_texts)

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
