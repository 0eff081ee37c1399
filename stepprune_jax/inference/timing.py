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

    jax reports each span of time at its end, and spans may be nested. Nested spans count once. ::

        with Compiling() as compiling:
            answer = generator.answer(request)
        print(compiling.seconds)
    """

    def __init__(self):
        self._spans: list[tuple[float, float]] = []  # disjoint (start, end) times

    def __enter__(self) -> "Compiling":
        jax.monitoring.register_event_duration_secs_listener(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._record)

    def _record(self, event: str, duration_secs: float, **_: object) -> None:
        """Records a span that ends now, in place of the spans that it includes."""
        if not event.startswith("/jax/core/compile/"):
            return
        end_time = time.perf_counter()
        start_time = end_time - duration_secs
        self._spans = [span for span in self._spans if span[1] <= start_time]
        self._spans.append((start_time, end_time))

    @property
    def seconds(self) -> float:
        """Seconds of compilation until now."""
        return sum((end_time - start_time for start_time, end_time in self._spans), 0.0)


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
        delay = f"{1000 * self.first_token:.1f} ms"
        if self.compiling:
            delay = f"{self.first_token:.1f} s, {self.compiling:.1f} of it preparing programs"
        return f"first token after {delay}, {self.tokens_per_s:.1f} tokens/s"


def timed_answer(
    generator: Generator,
    request: Request,
    write: Callable[[str], None] = lambda piece: None,
    trace: Callable[[PrefillResult], None] | None = None,
) -> tuple[Answer, Times]:
    """Answers a request of one prompt token by token, and measures the times.

    Args:
        generator: answers the request.
        request: a request with one prompt.
        write: called with each piece of text that no later token can change.
        trace: called with the result of the prefill.

    Returns:
        The answer, and its times.
    """
    start_time, first_token, first_compiling, num_pieces = time.perf_counter(), 0.0, 0.0, 0
    with Compiling() as compiling:
        pieces = stream_text(generator.model.tokenizer, generator.stream(request, trace))
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                (answer,) = end.value
                break
            if not num_pieces:
                first_token = time.perf_counter() - start_time
                first_compiling = compiling.seconds
            num_pieces += 1
            write(piece)
        seconds = time.perf_counter() - start_time - compiling.seconds
    num_steps = len(answer.token_ids) - 1
    decoding_seconds = seconds - (first_token - first_compiling)
    tokens_per_s = num_steps / decoding_seconds if num_steps else 0.0
    return answer, Times(first_token, first_compiling, tokens_per_s)
