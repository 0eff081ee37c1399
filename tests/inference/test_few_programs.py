"""How many programs, and read-backs, bring pixels to the first token, whatever the pruner."""

import jax
import pytest
from generation_reference import ByQuestion, random_image
from small_world import stepprune

from stepprune_jax.inference import RunOptions, greedy, pipeline, read_request
from stepprune_jax.registry import build_pruner

COMPILED = "/jax/core/compile/backend_compile_duration"
METHODS = {
    "exact": lambda: build_pruner("stepprune", 3, policy=stepprune()),
    "cut": lambda: build_pruner("fastv", 3, options={"layer": 1}),
    "own stop": lambda: ByQuestion(),
}


@pytest.fixture
def compilations():
    """Names of the programs that are compiled from now on; none has been before."""
    events = []

    def note(event, duration, **about):
        if event == COMPILED:
            events.append(about)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_takes_one_program_or_two_and_a_look(name, llava_model, compilations, monkeypatch):
    images = [[random_image(1)], None, [random_image(2), random_image(3)]]
    request = read_request(llava_model, ["What is this?", "two", "red"], images)
    method, sampling = pipeline.place_pruner(llava_model, METHODS[name]()), greedy([2])
    reads, to_host = [], pipeline.to_host
    monkeypatch.setattr(pipeline, "to_host", lambda tree: reads.append(tree) or to_host(tree))
    prompts, options, before = request.prompts(), RunOptions(max_tokens=2), len(compilations)
    result = pipeline.first_tokens(llava_model, method, prompts, request.images, options, sampling)
    jax.block_until_ready(result)
    # An operation outside of a program would be one more: nothing has been compiled before.
    expected = (2, 1) if name == "own stop" else (1, 0)
    assert (len(compilations) - before, len(reads)) == expected
