"""Times of an answer: to the first token, for compilation, and between tokens."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from stepprune_jax.inference.base import PrefillResult
from stepprune_jax.inference.generate import Answer, Generator
from stepprune_jax.inference.request import Request
from stepprune_jax.inference.text import stream_text


class Compiling:
    """Context manager that measures the seconds of tracing, lowering and compiling.

    jax reports each span at its end, and a span may lie within another span. Time that several
    spans cover counts once. ::

        with Compiling() as compiling:
            answer = generator.answer(request)
        print(compiling.seconds)
    """

    def __init__(self):
        self._spans: list[tuple[float, float]] = []
        self._on = False

    def __enter__(self) -> "Compiling":
        self._on = True
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, seconds: float, **_: object) -> None:
        if not self._on or not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        begin = end - seconds
        self._spans = [span for span in self._spans if span[1] <= begin]
        self._spans.append((begin, end))

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return sum((end - begin for begin, end in self._spans), 0.0)


class Times(NamedTuple):
    """Times of an answer.

    Attributes:
        first_token: seconds from the request to the first token.
        compiling: seconds of compilation before the first token.
        tokens_per_s: decoding steps per second after the first token, without compilation; each
            step generates one token per row. 0 if there was no further step.
    """

    first_token: float
    compiling: float
    tokens_per_s: float

    def __str__(self) -> str:
        first = f"{1000 * self.first_token:.1f} ms"
        if self.compiling:
            first = f"{self.first_token:.1f} s, {self.compiling:.1f} of it preparing programs"
        return f"first token after {first}, {self.tokens_per_s:.1f} tokens/s"


def timed_answer(
    generator: Generator,
    request: Request,
    write: Callable[[str], None] = lambda piece: None,
    trace: Callable[[PrefillResult], None] | None = None,
) -> tuple[Answer, Times]:
    """Answers a request of one prompt token by token, and measures the times.

    Args:
        generator: answers the request.
        request: the request.
        write: called with each piece of text as it becomes final.
        trace: as in `Generator.stream`.

    Returns:
        The answer, and its times.
    """
    start, first_token, first_compiling, num_pieces = time.perf_counter(), 0.0, 0.0, 0
    with Compiling() as compiling:
        pieces = stream_text(generator.model.tokenizer, generator.stream(request, trace))
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                (answer,) = end.value
                break
            if not num_pieces:
                first_token, first_compiling = time.perf_counter() - start, compiling.seconds
            num_pieces += 1
            write(piece)
        total = time.perf_counter() - start - compiling.seconds
    num_steps = len(answer.token_ids) - 1
    decoding = total - (first_token - first_compiling)
    return answer, Times(first_token, first_compiling, num_steps / decoding if num_steps else 0.0)
