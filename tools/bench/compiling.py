"""Measures the processor time to trace and compile a policy's first update and first selection.

    python -m tools.bench.compiling

The policy precedes a model without cost: the loss is the mean square of the tokens. The optimizer
is AdamW, as in examples/own_model.py. Processor time is the sum over the compiler's threads. With
`--before PATH`, the command also measures another checkout of this package, in alternation.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import stepprune_jax as sp
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.timing import table
from tools.bench.timing import machine

WORDS = 16


def update_of(loss: Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable:
    """Returns the training step of a policy for a loss of (policy, key, image, text)."""

    def update(policy, moments, key, image, text):
        def of_params(params):
            return loss(policy.replace(params=params), key, image, text)

        (_, (metrics, _)), grads = jax.value_and_grad(of_params, has_aux=True)(policy.params)
        updates, moments = optimizer.update(grads, moments, policy.params)
        params = optax.apply_updates(policy.params, updates)
        return policy.replace(params=params), moments, metrics

    return update


def gate_loss(policy, key, image, text):
    """Computes the loss of the noise gate."""
    return policy.train_loss(key, image, text, lambda tokens: (tokens**2).mean())


def rloo_loss(policy, key, image, text):
    """Computes the loss of RLOO on sampled subsets."""
    return policy.rloo_loss(key, image, text, lambda kept: (kept.tokens**2).mean((-1, -2)))


def programs(num_tokens: int, width: int, batch: int) -> dict[str, tuple[Callable, tuple]]:
    """Returns the functions of a policy by name, with the shapes of their arguments."""
    config = sp.PolicyConfig(feature_width=width, text_width=width, num_heads=4)
    stats = sp.FeatureStats.start(width)
    policy = jax.eval_shape(lambda key: sp.StepPrune.init(key, config, stats), jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    moments = jax.eval_shape(optimizer.init, policy.params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shape, kept = jax.ShapeDtypeStruct, min(64, num_tokens // 2)
    image = shape((batch, num_tokens, width), jnp.float32)
    text = shape((batch, WORDS, width), jnp.float32)

    def select(policy, image, text):
        return policy.select(image, text, capacity=kept)

    state = policy, moments, key, image, text
    return {
        "update through the gate": (update_of(gate_loss, optimizer), state),
        "update by RLOO on sampled subsets": (update_of(rloo_loss, optimizer), state),
        "selection of an exact number": (select, (policy.with_budget(kept), image, text)),
        "selection with the learned stop": (select, (policy, image, text)),
    }


def measure(num_tokens: int, width: int, batch: int) -> dict[str, tuple[float, float]]:
    """Returns the processor seconds to trace and to compile each program."""
    seconds = {}
    for name, (function, shapes) in programs(num_tokens, width, batch).items():
        start = time.process_time()
        lowered = jax.jit(function).lower(*shapes)
        traced = time.process_time()
        lowered.compile()
        seconds[name] = traced - start, time.process_time() - traced
    return seconds


def measure_in_process(checkout: Path, arguments: list[str]) -> dict[str, tuple[float, float]]:
    """Measures a checkout in a new process without a program cache."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": ""}
    command = [sys.executable, __file__, "--json", *arguments]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def main(arguments: list[str] | None = None):
    """Runs the command: prints a table for each number of tokens."""
    parser = Parser(prog="tools.bench.compiling", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=integer_from(2), nargs="+", default=[144, 576, 2928])
    parser.add_argument("--width", type=integer_from(4), default=64)
    parser.add_argument("--batch", type=integer_from(1), default=8)
    parser.add_argument("--repeats", type=integer_from(1), default=3)
    parser.add_argument("--before", type=Path, help="another checkout to measure in alternation")
    parser.add_argument("--json", action="store_true", help="measure once, and print JSON")
    flags = parser.parse_args(arguments)
    if flags.json:
        print(json.dumps(measure(flags.tokens[0], flags.width, flags.batch)))
        return
    here = Path(__file__).resolve().parents[2]
    checkouts = {"this": here} | ({} if flags.before is None else {"before": flags.before})
    print(machine(), flush=True)
    for tokens in flags.tokens:
        run_arguments = [
            "--tokens",
            str(tokens),
            "--width",
            str(flags.width),
            "--batch",
            str(flags.batch),
        ]
        runs = {name: [] for name in checkouts}
        for _ in range(flags.repeats):
            for name, checkout in checkouts.items():
                runs[name].append(measure_in_process(checkout, run_arguments))
        rows = []
        for program in runs["this"][0]:
            cells = [program]
            for name in reversed(checkouts):
                parts = [min(run[program][part] for run in runs[name]) for part in (0, 1)]
                cells += [f"{seconds:.1f}" for seconds in parts]
            rows.append(cells)
        header = [f"{tokens} tokens, width {flags.width}, batch {flags.batch}; processor s"]
        for name in reversed(checkouts):
            label = "" if len(checkouts) == 1 else f", {name}"
            header += [f"tracing{label}", f"compiling{label}"]
        print(table(header, rows), "\n", flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.compiling", main)
