"""Times the host's part of a call: until its dispatch returns, and until the result is ready.

The calls are the programs of an answer, and a program that reads nothing from the same weights. On
GPUs, XLA's log has the updates of CUDA graphs; `tools.card.sections` turns the log on.
"""

import contextlib
import functools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.efficiency.measure import random_batch
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.efficiency.rows import random_policy, read_rows
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.inference import greedy, pipeline
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models import vlm
from stepprune_jax.parallel.placement import prepare_to_answer
from tools.card import figures

_CALLS, _TEXT, _NEW_TOKENS = 10, 64, 32
_UPDATE = re.compile(r"Updated command buffer in (\d+) \S+; num_commands=(\d+)")


def time_calls(
    call: Callable[..., object], setup: Callable[[], tuple] = tuple
) -> dict[str, object]:
    """Times calls of a function.

    Args:
        call: the function.
        setup: returns the arguments of a call; not timed.

    Returns:
        Milliseconds until the call returns and until its result is ready, each as median, minimum
        and maximum. On GPUs, also the result of `graph_statistics`.
    """
    returned, ready, log = [], [], []
    jax.block_until_ready(call(*setup()))
    for _ in range(_CALLS):
        arguments = jax.block_until_ready(setup())
        with _capture_stderr(log):
            start_time = time.perf_counter()
            result = call(*arguments)
            returned.append(1e3 * (time.perf_counter() - start_time))
            jax.block_until_ready(result)
            ready.append(1e3 * (time.perf_counter() - start_time))
    measured = {"returns_ms": returned, "ready_ms": ready}
    spread = {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in measured.items()
    }
    return spread | (graph_statistics(log) if jax.default_backend() == "gpu" else {})


def graph_statistics(log: list[str]) -> dict[str, float]:
    """Returns launches and updates of CUDA graphs per call, and the cost of the updates."""
    updates = [map(int, match) for line in log for match in _UPDATE.findall(line)]
    micros, commands = map(sum, zip(*updates, strict=True)) if updates else (0, 0)
    launches = sum("Execute command buffer" in line for line in log)
    counts = {"graph_launches": launches, "graph_updates": len(updates)}
    counts |= {"update_us": micros, "updated_commands": commands}
    return {name: count / _CALLS for name, count in counts.items()}


@contextlib.contextmanager
def _capture_stderr(lines: list[str]) -> Iterator[None]:
    """Appends the lines that are written to stderr, including XLA's lines, to a list."""
    saved_stderr = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
            file.seek(0)
            lines += file


def main() -> None:
    """Runs the command."""
    parser = figures.parser(__doc__)
    parser.add_argument("--rows", nargs="+", help="rows, as for stepprune_jax.efficiency")
    flags = parser.parse_args()
    backbone, vector, sampling = find_backbone(flags.model), jnp.zeros(8), greedy(())
    batch, options = random_batch(backbone, 1, _TEXT), RunOptions(_NEW_TOKENS)
    reads_no_weights = jax.jit(lambda params, x: x + 1, keep_unused=True)
    if jax.default_backend() != "gpu":
        figures.add(flags.out, "CUDA graphs", none="needs a GPU")
    model = VLM(prepare_to_answer(random_weights(vlm.abstract_params(backbone))), backbone)
    figures.add(
        flags.out,
        "reads none",
        **time_calls(functools.partial(reads_no_weights, model.params, vector)),
    )
    for row in map(random_policy, read_rows(flags.rows, backbone.config, 1, "float32")):
        pruner = pipeline.place_pruner(model, row.pruner)
        inputs = model, pruner, batch.prompts, batch.images, options
        plan = functools.partial(plan_batch, *inputs)
        prefill_inputs = pipeline.prepare_prefill(model, plan())
        prefill = functools.partial(pipeline.prefill, model, prefill_inputs, sampling)

        def decode(state):
            return pipeline.finish(model, state, sampling, options)

        # The arrays of a plan are not outputs of programs, so only the call itself is timed.
        figures.add(
            flags.out, f"{row.name}, plan", **time_calls(lambda plan=plan: plan().pairing.counts)
        )
        figures.add(
            flags.out, f"{row.name}, prefill", **time_calls(lambda prefill=prefill: prefill()[:2])
        )
        measured = time_calls(decode, lambda prefill=prefill: (prefill().state,))
        figures.add(flags.out, f"{row.name}, decode", **measured)


if __name__ == "__main__":
    main()
