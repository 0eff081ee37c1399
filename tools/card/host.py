"""What the host does in a call: until its dispatch returns, until it is ready, and CUDA graphs.

The programs of an answer are called, and one that reads nothing of the same weights. XLA's log says
how often and how long a call's graphs were updated; `tools.card.sections` switches it on.
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
from stepprune_jax.efficiency.measure import draw_batch
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.efficiency.rows import draw_learned, read_rows
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.inference import greedy, pipeline
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.models import vlm
from stepprune_jax.parallel.placement import prepare_to_answer
from tools.card import figures

_CALLS, _TEXT, _NEW_TOKENS = 10, 64, 32
_UPDATE = re.compile(r"Updated command buffer in (\d+) \S+; num_commands=(\d+)")


def timed(call: Callable[..., object], setup: Callable[[], tuple] = tuple) -> dict[str, object]:
    """Times calls with what a setup returns, and reads what they log."""
    returned, ready, log = [], [], []
    jax.block_until_ready(call(*setup()))
    for _ in range(_CALLS):
        given = jax.block_until_ready(setup())
        with _stderr(log):
            begin = time.perf_counter()
            result = call(*given)
            returned.append(1e3 * (time.perf_counter() - begin))
            jax.block_until_ready(result)
            ready.append(1e3 * (time.perf_counter() - begin))
    measured = {"returns_ms": returned, "ready_ms": ready}
    spread = {name: [statistics.median(x), min(x), max(x)] for name, x in measured.items()}
    return spread | (graphs(log) if jax.default_backend() == "gpu" else {})


def graphs(log: list[str]) -> dict[str, float]:
    """Returns a call's mean launches and updates of graphs, their microseconds and commands."""
    updates = [map(int, found) for line in log for found in _UPDATE.findall(line)]
    micros, commands = map(sum, zip(*updates, strict=True)) if updates else (0, 0)
    launches = sum("Execute command buffer" in line for line in log)
    counts = {"graph_launches": launches, "graph_updates": len(updates)}
    counts |= {"update_us": micros, "updated_commands": commands}
    return {name: count / _CALLS for name, count in counts.items()}


@contextlib.contextmanager
def _stderr(lines: list[str]) -> Iterator[None]:
    """Adds what is written to stderr, by XLA as well."""
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file


def main() -> None:
    """Measures."""
    parser = figures.parser(__doc__)
    parser.add_argument("--rows", nargs="+", help="as of stepprune_jax.efficiency")
    given = parser.parse_args()
    backbone, one, sampling = find_backbone(given.model), jnp.zeros(8), greedy(())
    batch, options = draw_batch(backbone, 1, _TEXT), RunOptions(_NEW_TOKENS)
    nothing = jax.jit(lambda params, x: x + 1, keep_unused=True)
    if jax.default_backend() != "gpu":
        figures.add(given.out, "CUDA graphs", none="needs a GPU")
    model = VLM(prepare_to_answer(random_weights(vlm.abstract_params(backbone))), backbone)
    figures.add(given.out, "reads none", **timed(functools.partial(nothing, model.params, one)))
    for row in map(draw_learned, read_rows(given.rows, backbone.config, 1, "float32")):
        pruner = pipeline.place_pruner(model, row.pruner)
        inputs = model, pruner, batch.prompts, batch.images, options
        prepare = functools.partial(pipeline.prepare, *inputs)
        begin = functools.partial(pipeline.begin, model, prepare(), sampling)

        def decode(state):
            return pipeline.finish(model, state, sampling, options)

        figures.add(given.out, f"{row.name}, prepare", **timed(prepare))
        figures.add(given.out, f"{row.name}, begin", **timed(begin))
        measured = timed(decode, lambda begin=begin: (begin().state,))
        figures.add(given.out, f"{row.name}, decode", **measured)


if __name__ == "__main__":
    main()
