"""StepPrune as a model of lmms-eval, whose protocol differs from our own evaluation.

    lmms-eval --model stepprune_jax --model_args pretrained=DIR,policy=FILE,budget=64 \
        --tasks pope --batch_size 1

Prompts, data and post-processing are lmms-eval's, and differ from those of LLaVA's programs, which
`eval.py` follows: figures of the two do not belong in one table. Model, policy and decoding are
those of `eval.py`. Install with `pip install stepprune-jax[lmms-eval]`; lmms-eval finds the model
through its entry points.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from tqdm import tqdm

from stepprune_jax.integrations.answerer import (
    AnswererOptions,
    AskedQuestion,
    answer_questions,
    load_answerer,
)
from stepprune_jax.user_input import UserError

try:
    from lmms_eval.api.model import lmms
    from lmms_eval.models.registry_v2 import ModelManifest
except ImportError as error:
    raise ImportError(
        f"lmms-eval cannot be imported ({error}): pip install stepprune-jax[lmms-eval]"
    ) from error

NAME = "stepprune_jax"
# The longest answer if a task sets none, as in lmms-eval's own LLaVA models.
MAX_NEW_TOKENS = 1024
# Settings of a task that are used, and those that do not affect greedy answers.
_HEEDED = {"max_new_tokens", "until", "temperature", "do_sample", "num_beams"}
_HARMLESS = {"top_p", "top_k", "use_cache"}


class StepPruneModel(lmms):
    """A LLaVA whose visual tokens are pruned, for lmms-eval's tasks with images or none."""

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
            device: ignored; jax chooses, by JAX_PLATFORMS.
            max_batch_size: ignored.
            **options: further fields of `answerer.AnswererOptions`.

        Raises:
            FileNotFoundError: model or policy is missing.
            TypeError: an unknown option.
            ValueError: an option with a bad value.
        """
        super().__init__()
        # As text it comes from a command line.
        size = int(batch_size) if str(batch_size).isdecimal() else batch_size
        self._answerer = load_answerer(
            AnswererOptions(pretrained=pretrained, batch_size=size, **options)
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers lmms-eval's requests greedily.

        `until` ends an answer and is not part of it; `max_new_tokens` bounds it.

        Args:
            requests: `Instance`s whose arguments are context, generation settings, `doc_to_visual`,
                document number, task and split.

        Returns:
            One answer per request, in their order.

        Raises:
            ValueError: sampling or beams, or a video.
        """
        wanted = [self._wanted(request) for request in requests]
        with tqdm(total=len(wanted), desc=NAME, unit="answer", mininterval=1) as bar:
            texts = answer_questions(self._answerer, wanted, lambda n: bar.update(n - bar.n))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args[:2], text)
        return texts

    def _wanted(self, request: Any) -> AskedQuestion:
        """Converts a request to a question."""
        context, settings, doc_to_visual, number, task, split = request.args
        where = f"{task}, {split}, document {number}"
        visuals = doc_to_visual(self.task_dict[task][split][number]) or []
        visuals = [visual for visual in visuals if visual is not None]
        if not all(isinstance(visual, Image.Image) for visual in visuals):
            kinds = ", ".join(type(visual).__name__ for visual in visuals)
            raise UserError(f"{where}: expected images, got {len(visuals)} visual(s): {kinds}")
        _check_greedy(settings, where)
        until = settings.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        longest = settings.get("max_new_tokens")
        longest = MAX_NEW_TOKENS if longest is None else int(longest)
        return AskedQuestion(context, tuple(visuals), longest, until)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Raises, as the paper's benchmarks are all answered by generation."""
        raise NotImplementedError(
            f"{NAME} has no loglikelihood: use tasks with output_type generate_until"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raises, as a policy chooses tokens once, for one question."""
        raise NotImplementedError(
            f"{NAME} answers one question per request: use tasks with output_type generate_until"
        )


def _check_greedy(settings: Mapping[str, object], where: str) -> None:
    """Rejects settings that are not greedy, and warns of those without effect."""
    sampled = settings.get("temperature", 1 if settings.get("do_sample") else 0)
    if sampled or (settings.get("num_beams") or 1) != 1:
        names = ("do_sample", "num_beams", "temperature")
        given = ", ".join(f"{name} {settings[name]!r}" for name in names if name in settings)
        raise UserError(f"{where}: answers are greedy (temperature 0, one beam), got {given}")
    ignored = sorted(settings.keys() - _HEEDED - _HARMLESS)
    if ignored:
        warnings.warn(f"generation settings without effect: {', '.join(ignored)}", stacklevel=2)


def manifest() -> ModelManifest:
    """Returns the manifest for lmms-eval's entry point group `lmms_eval.models`."""
    return ModelManifest(model_id=NAME, simple_class_path=f"{__name__}.{StepPruneModel.__name__}")
