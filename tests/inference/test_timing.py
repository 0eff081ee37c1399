"""What of an answer's time was spent on making programs."""

import time

import jax
import jax.numpy as jnp
from generation_reference import random_image
from small_world import stepprune

from stepprune_jax.inference import Generator, RunOptions
from stepprune_jax.inference.timing import Compiling, Times, timed_answer


def test_a_program_that_is_made_is_counted_once():
    outer = jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.cos)(x))
    begin = time.perf_counter()
    with Compiling() as compiling:
        outer(jnp.ones(7)).block_until_ready()
    seconds = compiling.seconds
    # Functions within it are reported, too, and are a part of it.
    assert 0 < seconds <= time.perf_counter() - begin
    jax.jit(lambda x: x * 3)(jnp.ones(7))
    assert compiling.seconds == seconds
    with Compiling() as second_call:
        outer(jnp.ones(7)).block_until_ready()
    assert second_call.seconds == 0.0


def test_spans_within_others_add_nothing(monkeypatch):
    compiling, now = Compiling(), [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with compiling:
        for end, seconds in ((11.0, 0.5), (12.0, 0.5), (13.0, 2.75), (15.0, 1.0)):
            now[0] = end
            jax.monitoring.record_event_duration_secs("/jax/core/compile/part", seconds)
        jax.monitoring.record_event_duration_secs("/jax/another", 9.0)
    assert compiling.seconds == 2.75 + 1.0


def test_the_first_answer_tells_its_compilation_and_the_second_has_none(llava_model):
    # An answer of a length that no other test asks for.
    options = RunOptions(max_tokens=11)
    generator = Generator(llava_model, stepprune().with_budget(3), options=options)
    request, pieces, traces = generator.read(["red dog?"], [random_image(1)]), [], []
    first, first_times = timed_answer(generator, request, pieces.append, traces.append)
    second, second_times = timed_answer(generator, request)
    assert [first] == generator.answer(request) == [second]
    assert "".join(pieces) == first.text and len(pieces) == len(first.token_ids) + 1
    assert len(traces) == 1
    assert 0 < first_times.compiling < first_times.first_token
    assert second_times.compiling == 0.0 < second_times.first_token < first_times.first_token
    assert second_times.tokens_per_s > 0 and first_times.tokens_per_s > 0


def test_a_single_token_has_no_rate(llava_model):
    generator = Generator(llava_model, options=RunOptions(max_tokens=1))
    _, times = timed_answer(generator, generator.read(["red dog?"]))
    assert times.tokens_per_s == 0.0


def test_times_are_printed_in_words():
    assert str(Times(0.0123, 0.0, 51.26)) == "first token after 12.3 ms, 51.3 tokens/s"
    words = "first token after 3.6 s, 3.4 of it preparing programs, 4.0 tokens/s"
    assert str(Times(3.61, 3.38, 4.0)) == words
