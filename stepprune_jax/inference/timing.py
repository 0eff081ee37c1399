"""Measures an answer, and how much of it was spent making programs, for those who report it."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from stepprune_jax.inference.base import PrefillResult
from stepprune_jax.inference.generate import Answer, Generator
from stepprune_jax.inference.request import Request


class Compiling:
    """Seconds that jax spends on making programs while it is entered.

    Tracing, lowering and compiling are reported at their ends, and nested ones within the outer
    one: what counts is the time that at least one of them covers. ::

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
        """The time so far."""
        return sum((end - begin for begin, end in self._spans), 0.0)


class Times(NamedTuple):
    """How long an answer took.

    Attributes:
        first_token: seconds from the request to the first token.
        compiling: of these, seconds in which programs were made.
        tokens_per_s: decoding steps per second after the first token, without compilation; each
            step generates one token per row. 0 if there was no further step.
    """

    first_token: float
    compiling: float
    tokens_per_s: float

    def __str__(self) -> str:
        made = f", {self.compiling:.1f} of it compiling" if self.compiling else ""
        first = f"{1000 * self.first_token:.1f} ms" if not made else f"{self.first_token:.1f} s"
        return f"first token after {first}{made}, {self.tokens_per_s:.1f} tokens/s"


def timed_answer(
    generator: Generator,
    request: Request,
    write: Callable[[str], None] = lambda piece: None,
    trace: Callable[[PrefillResult], None] | None = None,
) -> tuple[Answer, Times]:
    """Answers a request of one prompt token by token, and measures it.

    Args:
        generator: what answers.
        request: the prompt, read before.
        write: called with each piece of text as it becomes final.
        trace: as in `Generator.stream`.

    Returns:
        The answer, and its times.
    """
    begin, times, steps = time.perf_counter(), (0.0, 0.0), 0
    with Compiling() as compiling:
        events = generator.stream(request, trace)
        while True:
            try:
                _, _, piece = next(events)
            except StopIteration as end:
                (answer,) = end.value
                break
            if not steps:
                times = time.perf_counter() - begin, compiling.seconds
            steps += 1
            write(piece)
        rest = time.perf_counter() - begin - compiling.seconds - (times[0] - times[1])
    return answer, Times(*times, (steps - 1) / rest if steps > 1 else 0.0)
